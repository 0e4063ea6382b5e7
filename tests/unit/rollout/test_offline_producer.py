"""The offline producer over the in-memory cluster: every seq once, at the run's pace, and one allocator whatever is started."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from echo_bus.clock import SystemClock
from echo_core.policy import Admission, StalenessPolicy
from echo_rollout.metrics import OfflineMetrics
from echo_rollout.offline.episodes import Episode
from echo_rollout.offline.producer import OfflineProducer, Schedule
from echo_rollout.offline.rendering import RenderedEpisode
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.records import ChatMessage, LogprobSource, Progress, RunState, Span, Trajectory, TrajectorySource
from echo_schemas.topics import PROGRESS
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, Swarm, Thread, closed_together, wait_until

WINDOW = 8
"""(S + p + 1) · groups per step of the swarm's settings at p = 0."""


def rendered(line: int) -> RenderedEpisode:
    """Two turns; the line is a token, so that records tell where they come from."""
    messages = (ChatMessage(role="user", content="u"), ChatMessage(role="assistant", content="a"))
    return RenderedEpisode(
        episode=Episode(line=line, messages=messages, turn_rewards=(1.0, -2.5), entry='{"x": 1}'),
        token_ids=np.array([1, line, 3, 4, 5], np.int32),
        generated=(Span(start=1, end=3), Span(start=4, end=5)),
        prompt="u",
        completion="a",
    )


GROUPS = [tuple(rendered(10 * number + index) for index in range(2 + number % 2)) for number in range(6)]


def offline(swarm: Swarm, *, epochs: int = 1, first_seq: int = 0) -> Thread:
    """The producer on a thread of its own."""

    def run(stop: StopSignal) -> None:
        bus, settings = swarm.bus, swarm.settings
        policy = StalenessPolicy(
            budget=1, publication_period=1, groups_per_step=settings.learner.groups_per_step, group_size=2, admission=Admission.FREE
        )
        progress, control = bus.view(PROGRESS, Progress), bus.orders()
        with closed_together(progress, control), closing(bus.transactions("feeder")) as writer:
            producer = OfflineProducer(
                settings=settings,
                policy=policy,
                groups=GROUPS,
                schedule=Schedule(num_groups=len(GROUPS), epochs=epochs, seed=0, first_seq=first_seq),
                file="hands.jsonl",
                sha256="5" * 64,
                bus=bus,
                writer=writer,
                progress=progress,
                control=control,
                metrics=OfflineMetrics(CollectorRegistry()),
                clock=SystemClock(),
            )
            producer.run(stop)

    return swarm._thread(run)


def ended(thread: Thread) -> BaseException | None:
    """What the thread raised, once it is over."""
    wait_until(lambda: not thread.is_alive, "the producer to end")
    return thread.error


def seqs(swarm: Swarm) -> list[int]:
    """Each group in the log once, all members there."""
    by_seq: dict[int, list[Trajectory]] = {}
    for record in swarm.trajectories():
        by_seq.setdefault(record.seq, []).append(record)
    for members in by_seq.values():
        assert sorted(member.index for member in members) == list(range(members[0].group_size))
    return sorted(by_seq)


def test_a_file_goes_into_the_log_once_and_the_producer_ends(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    thread = offline(swarm)
    swarm.say(version=2, published=2)
    assert ended(thread) is None
    assert seqs(swarm) == list(range(len(GROUPS)))
    lines = Counter(record.metadata["line"] for record in swarm.trajectories())
    assert lines == Counter(str(member.episode.line) for group in GROUPS for member in group)


def test_a_record_says_what_it_is(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    thread = offline(swarm)
    swarm.say(version=2, published=2)
    assert ended(thread) is None
    record = next(record for record in swarm.trajectories() if record.metadata["line"] == "11")
    assert (record.source, record.logprob_source, record.engine) == (TrajectorySource.OFFLINE, LogprobSource.RECOMPUTED, "offline")
    assert (record.min_version, record.max_version, record.weights_sha256) == (2, 2, "")
    assert record.logprob_values.tolist() == [0.0] * 3
    assert (record.turn_rewards, record.entry, record.group_size) == ((1.0, -2.5), '{"x": 1}', 3)
    assert record.run_id == RUN


def test_nothing_is_written_before_the_learner_has_spoken_and_no_more_than_pace_allows(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    offline(swarm, epochs=0)
    swarm.order(RunState.RUNNING)
    assert not swarm.trajectories()
    swarm.say()
    wait_until(lambda: len(seqs(swarm)) == WINDOW, "the groups that pace admits")
    swarm.say(version=1, published=1, groups_trained=4, next_seq=4)
    wait_until(lambda: len(seqs(swarm)) == WINDOW + 4, "the groups that the next version admits")
    assert seqs(swarm) == list(range(12))


def test_who_starts_again_goes_on_where_the_log_ends_and_fills_what_is_missing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    first = offline(swarm, epochs=0)
    swarm.say()
    wait_until(lambda: len(seqs(swarm)) == WINDOW, "the first window")
    first.stop()
    before = swarm.trajectories()
    swarm.say(version=1, published=1, groups_trained=4, next_seq=4)
    second = offline(swarm, epochs=2)
    assert ended(second) is None
    assert seqs(swarm) == list(range(12))
    assert len(swarm.trajectories()) > len(before)
    assert len({(record.seq, record.index) for record in swarm.trajectories()}) == len(swarm.trajectories())


def test_a_run_has_one_allocator_whatever_is_started(make_swarm: MakeSwarm) -> None:
    # Room in the window, so that the feeder has something to write when pace lets it.
    swarm = make_swarm(rollout={"depth": 16})
    swarm.publish_version(0)
    feeder = swarm.start_feeder()
    wait_until(swarm.requests, "the feeder's first request")
    producer = offline(swarm, epochs=0)
    wait_until(swarm.trajectories, "the producer's first group")
    swarm.say(version=1, published=1, groups_trained=4, next_seq=4)
    wait_until(lambda: not feeder.is_alive, "the feeder to end")
    assert isinstance(feeder.error, UserError)
    again = swarm.start_feeder()

    def is_over() -> bool:
        # Who has been replaced learns it with the next thing it writes, and it writes when the learner is further.
        version = swarm.progress.version + 1
        swarm.say(version=version, published=version, groups_trained=4 * version, next_seq=4 * version)
        return not producer.is_alive

    wait_until(is_over, "the producer to end")
    assert isinstance(producer.error, UserError)
    assert "Another allocator has taken over" in producer.error.message
    again.stop()


def test_a_paused_run_gets_nothing_and_a_stopping_one_ends_the_producer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.order(RunState.PAUSED)
    swarm.say()
    thread = offline(swarm)
    swarm.order(RunState.RUNNING)
    assert ended(thread) is None
    stopping = offline(swarm, epochs=0)
    swarm.order(RunState.STOPPING)
    assert ended(stopping) is None
    # The endless one may have begun its next epoch before it was told to end.
    written = seqs(swarm)
    assert len(written) >= len(GROUPS)
    assert written == list(range(len(written)))


def test_a_first_seq_that_leaves_a_gap_is_refused(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.say(next_seq=4, groups_trained=4, version=1, published=1)
    found = ended(offline(swarm, first_seq=5))
    assert isinstance(found, UserError)
    assert found.hint == "Set [offline] first_seq = 4, or less."
    assert ended(offline(swarm, first_seq=4)) is None
    assert seqs(swarm) == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("epochs", [1, 3])
def test_each_epoch_holds_every_group_once_in_an_order_of_its_own(epochs: int) -> None:
    schedule = Schedule(num_groups=20, epochs=epochs, seed=4, first_seq=7)
    assert schedule.end == 7 + 20 * epochs
    orders: list[list[int]] = [[schedule.group_of(7 + 20 * epoch + place) for place in range(20)] for epoch in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[0] != orders[1] != orders[2]
    assert orders[0] == [Schedule(num_groups=20, epochs=9, seed=4).group_of(seq) for seq in range(20)]


def test_without_epochs_there_is_no_end() -> None:
    endless: Any = Schedule(num_groups=2, epochs=0, seed=0).end
    assert endless is None
