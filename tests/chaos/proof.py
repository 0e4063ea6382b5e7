"""What must be true after every schedule: the audit finds every promise kept, and the log holds the weights, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_replay.audit import audit_run
from echo_replay.verdicts import SENTENCES, AuditReport, Verdict
from echo_schemas.records import SessionClaim
from echo_schemas.topics import STEPS
from tests.chaos.swarm import Swarm

_READ_S = 60.0
_NO_RECORDS = "are no records"
_RETRAIN_S = 2_000.0


def prove(bus: Bus, *, is_attacked: bool = False) -> AuditReport:
    """Audit the run. Fails, with the first counter-examples or with what could not be looked at, unless all is proved.

    `is_attacked`: bytes that are no records were put on topics of the learner's own, and the audit rightly says that it cannot read them.
    """
    report = audit_run(bus, str(bus.run_id))
    said = []
    for finding in report.findings:
        is_excused = is_attacked and all(gap.endswith(_NO_RECORDS) for gap in finding.gaps)
        if finding.verdict is Verdict.PROVED or (finding.verdict is Verdict.UNPROVED and is_excused):
            continue
        said.append(f"{finding.verdict.value}: {SENTENCES[finding.promise]}")
        said += [f"    {example.says} {dict(example.where)}" for example in finding.examples]
        said += [f"    because {gap}" for gap in finding.gaps]
    assert not said, "\n".join([f"the audit of {report.num_steps} steps does not hold:", *said])
    return report


def in_words(report: AuditReport) -> str:
    """One line."""
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.counts.items() if count)
    return f"audit passed: {report.num_steps} steps, {report.num_trajectories} trajectories ({counts})"


def retrain(swarm: Swarm, version: int) -> str:
    """Train the whole run again from its log, in a process of its own. Fails unless every published version comes out byte for byte."""
    command = [sys.executable, "-m", "echo_ops.cli", "retrain", "--version", f"1..{version}", "--from-start", "--exact"]
    done = subprocess.run(
        [*command, "--config", str(swarm.config)],
        env={**swarm.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=_RETRAIN_S,
        check=False,
    )
    identical = done.stdout.count(": identical")
    assert (done.returncode, identical) == (0, version), f"{done.stdout[-3_000:]}\n{done.stderr[-3_000:]}"
    return f"{identical} versions trained again from the log, each the same byte for byte"


def num_sessions(bus: Bus) -> int:
    """How often a learner has claimed the run."""
    with closing(bus.reader([STEPS])) as reader:
        reader.start()
        records = [message.record for batch in reader.read_to_end(Deadline.after(_READ_S)) for message in batch]
    return sum(isinstance(record, SessionClaim) for record in records)
