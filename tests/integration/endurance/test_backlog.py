"""Far more samples are made than are trained, and old ones are weighed down, not dropped: the learner falls ever further behind what is
scored, and goes on at its pace."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from echo_ops.report.offsets import OffsetWatch
from echo_schemas.naming import Namespace
from echo_schemas.records import DropReason
from echo_schemas.topics import REWARDS
from tests.chaos.live_run import open_run
from tests.chaos.proof import in_words
from tests.integration.endurance.overload import CONFIG, WATCHED_S, begin, changes_for, end
from tests.thorough import only_thorough

pytestmark = [pytest.mark.kafka, pytest.mark.slow, only_thorough, pytest.mark.timeout(1500)]

# Twice the rewards that a learner keeps for trajectories which it has not read.
_BACKLOG = 60_000
_BACKLOG_WITHIN_S = 400.0
_DRAINED_S = 120.0
# Of the pace at the begin; the machine's other work changes by so much.
_LEAST_SHARE = 0.4


def test_a_learner_that_is_far_behind_what_is_scored_goes_on_at_its_pace(
    kafka_bootstrap: str, namespace: Namespace, tmp_path: Path
) -> None:
    changes = changes_for(kafka_bootstrap, namespace, "backlog") | {
        "ECHO_STALENESS__OVER_BUDGET": "downweight",
        # Twice what a learner on fast cores trains.
        "ECHO_ROLLOUT__OPTIONS": '{"seconds": 0.1, "slots": 32}',
        "ECHO_ROLLOUT__GROUPS_IN_FLIGHT": "32",
        "ECHO_ROLLOUT__GROUP_SIZE": "8",
        "ECHO_LEARNER__GROUPS_PER_STEP": "32",
    }
    with open_run(tmp_path, changes, config=CONFIG) as run:
        settings = run.swarm.settings
        per_step = settings.learner.groups_per_step * settings.rollout.group_size
        begin(run)
        begun = run.follower.version
        run.pause(WATCHED_S)
        at_first = run.follower.version - begun
        with closing(OffsetWatch(run.bus.cluster, run.bus.namespace)) as offsets:

            def is_behind() -> bool:
                return offsets.ends(REWARDS) - run.follower.version * per_step > _BACKLOG

            run.wait_until(is_behind, _BACKLOG_WITHIN_S, f"{_BACKLOG} samples are scored and not trained")
        version = run.follower.version
        run.pause(WATCHED_S)
        then = run.follower.version - version
        report, reasons = end(run, _DRAINED_S)
    sys.stdout.write(f"{at_first} steps in the first {WATCHED_S:g} s, {then} with a backlog of {_BACKLOG} samples. {in_words(report)}\n")
    assert not reasons & {DropReason.UNREWARDED, DropReason.EVICTED}
    logs = "".join(path.read_text(encoding="utf-8", errors="replace") for path in (run.swarm.folder / "logs").glob("reward*"))
    assert "scored again" not in logs, "the learner asked for rewards that it had read"
    assert then > _LEAST_SHARE * at_first, f"{at_first} steps in {WATCHED_S:g} s at first, and {then} with a backlog"
