"""A live run that makes far more samples than it trains: how it begins, and what it proves when it has ended."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from echo_bus.clock import Deadline
from echo_replay.verdicts import AuditReport
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, DropReason
from echo_schemas.topics import DROPS
from tests.chaos.live_run import LiveRun
from tests.chaos.proof import prove
from tests.chaos.swarm import ENDED_AS_TOLD
from tests.installed import missing

CONFIG = Path(__file__).parents[2] / "endurance" / "overload.toml"
WATCHED_S = 30.0
_BEGINS_WITHIN_S = 400.0


def changes_for(bootstrap: str, namespace: Namespace, run: str) -> dict[str, str]:
    """The settings that each test has. Skips the test where something is not installed."""
    if absent := missing("transformers", "faust", "deepspeed"):
        pytest.skip(f"{absent} are missing: install the extra 'all-cpu'")
    return {"ECHO_KAFKA__BOOTSTRAP": bootstrap, "ECHO_KAFKA__NAMESPACE": namespace.name, "ECHO_RUN__NAME": run}


def begin(run: LiveRun) -> None:
    """Start every role, and wait for the first steps."""
    run.swarm.start_all()
    run.wait_for(3, _BEGINS_WITHIN_S, "the run begins")


def end(run: LiveRun, drained_s: float) -> tuple[AuditReport, set[DropReason]]:
    """Nobody has ended by himself; end everybody, and prove the run. Returns also why records were dropped."""
    assert run.swarm.exits == [], [str(each) for each in run.swarm.exits]
    run.swarm.terminate_all()
    for name in run.swarm.names:
        assert run.swarm.wait_ended(run.swarm.child(name), Deadline.after(drained_s), run.wait) in ENDED_AS_TOLD
    report = prove(run.bus)
    with closing(run.bus.reader([DROPS])) as reader:
        reader.start()
        records = [message.record for batch in reader.read_to_end(Deadline.after(drained_s)) for message in batch]
    return report, {record.why for record in records if isinstance(record, Drop)}
