"""Far more samples are made than the rewards score: the learner trains what they do score, and nothing is lost."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import pytest

from echo_ops.report.offsets import OffsetWatch
from echo_schemas.naming import Namespace
from echo_schemas.records import DropReason
from echo_schemas.topics import TRAJECTORIES
from tests.chaos.live_run import open_run
from tests.chaos.proof import in_words
from tests.endurance.slow import SECONDS
from tests.integration.endurance.overload import CONFIG, WATCHED_S, begin, changes_for, end
from tests.thorough import only_thorough

pytestmark = [pytest.mark.kafka, pytest.mark.slow, only_thorough, pytest.mark.timeout(900)]

_DRAINED_S = 60.0
# Of what the rewards score: less would be no overload.
_LEAST_OVERLOAD = 2.0
# Of the steps that the rewards are enough for: what they score may be too old when its group is whole. On two busy cores it was 0.4.
_LEAST_SHARE = 0.15


def test_the_learner_trains_what_slow_rewards_score_and_nothing_is_lost(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> None:
    changes = changes_for(kafka_bootstrap, namespace, "overload") | {
        "ECHO_REWARDS__tests.endurance.slow:slow": "1.0",
        "ECHO_SCORING__CONCURRENCY": "1",
    }
    with open_run(tmp_path, changes, config=CONFIG) as run:
        settings = run.swarm.settings
        begin(run)
        with closing(OffsetWatch(run.bus.cluster, run.bus.namespace)) as offsets:
            version, written = run.follower.version, offsets.ends(TRAJECTORIES)
            run.pause(WATCHED_S)
            num_steps, num_made = run.follower.version - version, offsets.ends(TRAJECTORIES) - written
        report, reasons = end(run, _DRAINED_S)
    assert DropReason.EVICTED not in reasons
    num_scored = WATCHED_S / SECONDS
    sys.stdout.write(
        f"{num_made} samples made, {num_scored:.0f} at most scored, {num_steps} steps in {WATCHED_S:g} s. {in_words(report)}\n"
    )
    assert num_made > _LEAST_OVERLOAD * num_scored, f"{num_made} samples were made: that is no overload"
    per_step = settings.learner.groups_per_step * settings.rollout.group_size
    assert num_steps > _LEAST_SHARE * num_scored / per_step, f"{num_steps} steps, {report.counts}"
