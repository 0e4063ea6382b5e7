"""The learner's reading side, fed by hand: when it may choose, when it stops reading, and who hears that reading failed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from echo_bus.clock import Clock, Deadline, SystemClock
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_core.assembly import GroupAssembler
from echo_core.batch_choice import ChosenGroup
from echo_core.groups import AssemblyLimits
from echo_core.policy import StalenessPolicy
from echo_learner.admission import AdmissionLimits
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.trust import WorkerTrust
from echo_runtime.places import PlaceTimes
from echo_schemas.columns import pack_tokens, seqs_of
from echo_schemas.records import Coordinates, DropReason, Experts, Purpose, Record, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS_DEAD, REWARDS, TRAJECTORIES, Topic
from tests.unit.core.records import EXACT, GROUP_SIZE, at, reward, trajectory
from tests.unit.learner.test_trust import ManualClock

WAIT_S = 60.0
_PLACES = ((TRAJECTORIES.name, 0), (REWARDS.name, 0))
_OTHER_PLACES = ((TRAJECTORIES.name, 1), (REWARDS.name, 1))
POLICY = StalenessPolicy(budget=0, publication_period=1, groups_per_step=2, group_size=GROUP_SIZE)
MAX_READY = 2 * (0 + 2) * 2


class ScriptedReader:
    """Hands out what the test feeds. `end`: the log's length when reading starts."""

    def __init__(self) -> None:
        self.end = 0
        self.started_at: Mapping[Any, int] | None = None
        self.places: tuple[Any, ...] = _PLACES
        self.paused: set[Any] = set()
        self.closed = False
        self.reachable: frozenset[Any] = frozenset()
        self.num_looks = 0
        self.goal: dict[Any, int] = {}
        self.given: list[Message] = []
        self.went_back: list[tuple[Any, int]] = []
        self.positions = dict.fromkeys(_PLACES, 0)
        self.fed: queue.Queue[list[Message] | Exception] = queue.Queue()

    def start(self, positions: Mapping[Any, int]) -> dict[Any, int]:
        self.started_at = positions
        return self.goal or {(TRAJECTORIES.name, 0): self.end}

    def has_reached(self, ends: Mapping[Any, int]) -> bool:
        return all(self.positions[place] >= end for place, end in ends.items())

    def read(self, max_messages: int, timeout_s: float) -> list[Message]:
        try:
            messages = self.fed.get(timeout=min(timeout_s, 0.005))
        except queue.Empty:
            return []
        if isinstance(messages, Exception):
            raise messages
        for message in messages:
            self.positions[message.topic.name, message.partition] = message.offset + 1
        self.given += [message for message in messages if message not in self.given]
        return messages

    def go_back(self, offsets: Mapping[Any, int]) -> dict[Any, int]:
        """What was fed of the partitions comes again."""
        for place, offset in offsets.items():
            assert place not in self.paused, "the client would forget it"
            self._feed_again(place, offset)
        return dict(offsets)

    def _feed_again(self, place: Any, offset: int) -> None:
        self.positions[place] = offset
        again = [message for message in self.given if (message.topic.name, message.partition) == place and message.offset >= offset]
        self.fed.put(again)
        self.went_back.append((place, offset))

    def take_ends(self, then_look: Iterable[Any]) -> frozenset[Any]:
        self.num_looks += 1
        return self.reachable & frozenset(then_look)

    def pause(self, places: Iterable[Any]) -> None:
        self.paused |= set(places)

    def resume(self, places: Iterable[Any]) -> None:
        self.paused -= set(places)

    def close(self) -> None:
        self.closed = True


def idle_evaluations(metrics: LearnerMetrics) -> Evaluations:
    """Of a run without any: nothing is opened, nothing is asked."""

    def never() -> Any:
        raise AssertionError("nothing is to be evaluated")

    return Evaluations("demo", (), open_requests=never, recorded=never, window=1, metrics=metrics, clock=SystemClock())


class Setup:
    """An intake and what feeds it. Group g's members lie at offsets 2g and 2g + 1 of a partition, its rewards at the same of theirs."""

    def __init__(
        self, clock: Clock | None = None, *, max_bytes: int = 1 << 30, max_early_rewards: int = 100, keeps_texts: bool = False
    ) -> None:
        self.reader = ScriptedReader()
        self.metrics = LearnerMetrics()
        clock = clock or SystemClock()
        self.trust = WorkerTrust(self.metrics, clock, tolerance=0.01)
        self.intake = Intake(
            cast("LogReader", self.reader),
            GroupAssembler(
                "demo",
                EXACT,
                AssemblyLimits(max_open_groups=4, max_early_rewards=max_early_rewards, group_timeout_s=5.0, reward_timeout_s=5.0),
            ),
            policy=POLICY,
            limits=AdmissionLimits(vocabulary=32, max_length=100_000),
            trust=self.trust,
            evaluations=idle_evaluations(self.metrics),
            places=PlaceTimes(CollectorRegistry(), clock),
            metrics=self.metrics,
            clock=clock,
            max_bytes=max_bytes,
            keeps_texts=keeps_texts,
        )

    def feed_group(self, number: int, seq: int, *, partition: int = 0, **fields: Any) -> None:
        self.feed_members(number, seq, partition=partition, **fields)
        self.feed_rewards(number, seq, partition=partition)

    def feed_members(self, number: int, seq: int, *, partition: int = 0, **fields: Any) -> None:
        members = enumerate(_places_of(number, partition))
        self.reader.fed.put([_message(TRAJECTORIES, where, trajectory(seq, index, **fields)) for index, where in members])

    def feed_rewards(self, number: int, seq: int, *, partition: int = 0) -> None:
        members = enumerate(_places_of(number, partition))
        self.reader.fed.put([_message(REWARDS, where, reward(where, seq, index=index)) for index, where in members])

    def batch(self, timeout_s: float = WAIT_S) -> list[int] | None:
        """The seqs of the next batch; nobody's claim is doubted."""
        groups = self.look(timeout_s) or self.look(timeout_s)
        return None if groups is None else [group.seq for group in groups]

    def look(self, timeout_s: float) -> tuple[ChosenGroup, ...] | None:
        """As the learner's loop does: claims first, then a batch."""
        for sample in self.trust.take_samples():
            self.trust.judge(sample, None)
        return self.intake.next_batch(0, EXACT, timeout_s)

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = Deadline.after(WAIT_S)
        while not condition():
            assert not deadline.expired(), f"waited until {what}"
            threading.Event().wait(0.002)


def _places_of(number: int, partition: int) -> list[Coordinates]:
    return [at(GROUP_SIZE * number + index, partition) for index in range(GROUP_SIZE)]


def _message(topic: Topic, where: Coordinates, record: Record) -> Message:
    return Message(
        topic=topic, partition=where.partition, offset=where.offset, key=None, record=record, headers={}, timestamp_ms=0, num_bytes=0
    )


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup()
    yield made
    made.intake.close()
    assert made.reader.closed


def test_no_batch_is_chosen_before_the_log_is_read_to_where_it_ended(setup: Setup) -> None:
    """Oldest first, however they lie in the log: a restart chooses what a learner that had read everything would have."""
    setup.reader.end = 4 * GROUP_SIZE
    setup.intake.start(None)
    for number, seq in enumerate((3, 2)):
        setup.feed_group(number, seq)
    setup.wait_until(lambda: setup.intake.num_ready == 2, "two groups are ready")
    assert setup.batch(timeout_s=0.02) is None
    for number, seq in enumerate((1, 0), 2):
        setup.feed_group(number, seq)
    assert setup.batch() == [0, 1]
    assert setup.batch() == [2, 3]
    assert setup.intake.floor == 4


def test_a_full_store_of_groups_is_enough_to_choose_and_stops_reading(setup: Setup) -> None:
    """What lies further on can wait; rewards go on being read, and reading starts again when there is room."""
    setup.reader.end = 1_000
    setup.intake.start(None)
    for number in range(MAX_READY + 1):
        setup.feed_group(number, number)
    setup.wait_until(lambda: setup.reader.paused == set(_PLACES[:1]), "trajectories are paused, and rewards are not")
    assert setup.batch() == [0, 1]
    setup.wait_until(lambda: not setup.reader.paused, "trajectories are read again")
    assert setup.metrics.registry.get_sample_value("echo_learner_groups_ready") == MAX_READY - 1


def test_groups_that_wait_for_late_rewards_stop_the_reading_and_are_trained_when_these_come(setup: Setup) -> None:
    setup.intake.start(None)
    for number in range(MAX_READY + 1):
        setup.feed_members(number, number)
    setup.wait_until(lambda: setup.reader.paused == set(_PLACES[:1]), "trajectories are paused")
    assert setup.batch(timeout_s=0.02) is None
    for number in range(MAX_READY + 1):
        setup.feed_rewards(number, number)
    assert [setup.batch() for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    setup.wait_until(lambda: not setup.reader.paused, "trajectories are read again")
    assert setup.intake.settle()[1] == [], "nothing is dropped"


def test_a_partition_whose_rewards_are_behind_stops_the_reading_of_itself_alone() -> None:
    setup = Setup()
    setup.reader.places = (*_PLACES, *_OTHER_PLACES)
    setup.reader.positions |= dict.fromkeys(_OTHER_PLACES, 0)
    setup.intake.start(None)
    share, first = MAX_READY // 2, MAX_READY + 1
    for number in range(first):
        setup.feed_members(number, number)
    setup.wait_until(lambda: setup.reader.paused == {(TRAJECTORIES.name, 0)}, "the partition that has no rewards is paused")
    for number in range(share + 1):
        setup.feed_group(number, first + number, partition=1)
    setup.wait_until(lambda: setup.reader.paused == {(TRAJECTORIES.name, 0), (TRAJECTORIES.name, 1)}, "the other one has its share too")
    assert [setup.batch(), setup.batch()] == [[first, first + 1], [first + 2, first + 3]]
    setup.wait_until(lambda: setup.reader.paused == {(TRAJECTORIES.name, 0)}, "the other one is read again")
    for number in range(first):
        setup.feed_rewards(number, number)
    assert setup.batch() == [0, 1]
    setup.wait_until(lambda: not setup.reader.paused, "both are read again")
    assert setup.intake.settle()[1] == [], "nothing is dropped"
    setup.intake.close()


def test_a_reward_that_never_comes_ends_the_wait_while_the_reading_is_stopped() -> None:
    clock = ManualClock()
    setup = Setup(clock)
    setup.reader.reachable = frozenset({(REWARDS.name, 0)})
    setup.intake.start(None)
    for number in range(MAX_READY + 1):
        setup.feed_members(number, number)
    setup.wait_until(lambda: setup.reader.paused, "trajectories are paused")

    def is_over() -> bool:
        clock.now_s += 2.0
        return setup.batch(timeout_s=0.01) is None and setup.intake.floor == MAX_READY + 1

    setup.wait_until(is_over, "all groups are dropped")
    assert {drop.why for drop in setup.intake.settle()[1]} == {DropReason.UNREWARDED}
    setup.wait_until(lambda: not setup.reader.paused, "trajectories are read again")
    setup.intake.close()


def test_rewards_wait_in_the_log_too_when_many_of_unread_trajectories_are_held() -> None:
    """Scoring is ahead of a learner that trains slowly: what would be forgotten is not read."""
    setup = Setup(max_early_rewards=10)
    setup.intake.start(None)
    for number in range(MAX_READY + 1):
        setup.feed_group(number, number)
    for number in range(MAX_READY + 1, MAX_READY + 4):
        setup.feed_rewards(number, number)
    setup.wait_until(lambda: setup.reader.paused == set(_PLACES), "both topics are paused")
    assert setup.batch() == [0, 1]
    setup.wait_until(lambda: setup.reader.paused == {_PLACES[1]}, "trajectories are read again")
    setup.feed_members(MAX_READY + 1, MAX_READY + 1)
    setup.wait_until(lambda: setup.intake.num_ready == MAX_READY, "one of the groups has come")
    assert _PLACES[1] in setup.reader.paused, "few would be read before it is paused again"
    for number in range(MAX_READY + 2, MAX_READY + 4):
        setup.feed_members(number, number)
    setup.wait_until(lambda: setup.reader.paused == {_PLACES[0]}, "rewards are read again, and there are enough trajectories")
    setup.intake.close()


def test_rewards_of_trajectories_that_never_come_hold_up_no_start() -> None:
    """They are not read to the log's end, but no group lacks what lies there."""
    setup = Setup(max_early_rewards=4)
    setup.reader.goal = {(TRAJECTORIES.name, 0): 4, (REWARDS.name, 0): 1_000}
    setup.intake.start(None)
    for number in range(100, 102):
        setup.feed_rewards(number, number)
    for number in range(2):
        setup.feed_group(number, number)
    setup.wait_until(lambda: setup.reader.paused == {(REWARDS.name, 0)}, "rewards are far enough ahead")
    assert setup.batch() == [0, 1]
    setup.intake.close()


def test_rewards_that_are_far_ahead_in_one_partition_hold_up_no_batch_while_another_one_lacks_some() -> None:
    """After a start with a long backlog, while one of the scorers is away."""
    setup = Setup(max_early_rewards=10)
    setup.reader.places = (*_PLACES, *_OTHER_PLACES)
    setup.reader.positions = dict.fromkeys(setup.reader.places, 0)
    setup.reader.goal = {(TRAJECTORIES.name, 0): 1_000, (TRAJECTORIES.name, 1): 1_000, (REWARDS.name, 0): 24, (REWARDS.name, 1): 0}
    setup.intake.start(None)
    setup.feed_members(0, 500, partition=1)
    for number in range(MAX_READY):
        setup.feed_group(number, number)
    for number in range(MAX_READY, MAX_READY + 3):
        setup.feed_rewards(number, number)
    setup.wait_until(lambda: setup.reader.paused == set(_PLACES), "the first partition of both topics is paused")
    assert setup.batch() == [0, 1]
    setup.intake.close()


def test_a_start_waits_for_the_rewards_of_a_group_that_became_whole_behind_a_pause() -> None:
    """They lie in a partition that was paused for rewards of later trajectories; the group is the oldest."""
    setup = Setup(max_early_rewards=10)
    setup.reader.goal = {(TRAJECTORIES.name, 0): 6, (REWARDS.name, 0): 12}
    setup.intake.start(None)
    for number in range(2):
        setup.feed_group(number, 2 + number)
    for number in range(10, 13):
        setup.feed_rewards(number, number)
    setup.wait_until(lambda: setup.reader.paused == {_PLACES[1]}, "rewards are paused")
    assert not setup.intake.is_caught_up
    setup.reader.positions[_PLACES[1]] = 10
    setup.feed_members(2, 0)
    setup.wait_until(lambda: not setup.reader.paused, "they are read again")
    assert not setup.intake.is_caught_up
    members = enumerate(_places_of(2, 0))
    setup.reader.fed.put([_message(REWARDS, at(10 + index), reward(where, 0, index=index)) for index, where in members])
    assert setup.batch() == [0, 2]
    setup.intake.close()


def test_a_partition_of_rewards_is_read_on_while_a_whole_group_of_it_lacks_one() -> None:
    """The rewards of the other partition are far ahead; what they would displace is not read."""
    setup = Setup(max_early_rewards=10)
    setup.reader.places = (*_PLACES, *_OTHER_PLACES)
    setup.reader.positions = dict.fromkeys(setup.reader.places, 0)
    setup.intake.start(None)
    for number in range(MAX_READY):
        setup.feed_group(number, number)
    setup.feed_members(0, MAX_READY, partition=1)
    for number in range(MAX_READY, MAX_READY + 3):
        setup.feed_rewards(number, number + 1)
    setup.wait_until(lambda: setup.reader.paused == set(_PLACES), "the first partition of both topics is paused")
    setup.feed_rewards(0, MAX_READY, partition=1)
    setup.wait_until(lambda: setup.intake.num_ready == MAX_READY + 1, "the other one is read")
    setup.intake.close()


def test_rewards_that_had_no_room_are_read_again_when_their_trajectories_come() -> None:
    setup = Setup(max_early_rewards=4)
    failures: list[Any] = []
    setup.intake.call_on_reward(failures.append, lambda reward: True)
    setup.intake.start(None)
    for number in range(6):
        setup.feed_rewards(number, number)
    for number in range(6):
        setup.feed_members(number, number)
    setup.wait_until(lambda: setup.intake.num_ready == 6, "every group has its rewards")
    assert setup.reader.went_back[0] == ((REWARDS.name, 0), 4)
    assert len(failures) == 6 * GROUP_SIZE, "each reward is told once"
    assert setup.batch() == [0, 1]
    setup.intake.close()


def test_more_bytes_than_may_be_held_wait_in_the_log_once_a_batch_is_ready() -> None:
    """Samples of half a megabyte: reading stops after a batch, and the next one is read while that is trained."""
    setup = Setup(max_bytes=500_000)
    setup.reader.end = 1_000
    setup.intake.start(None)
    for number in range(POLICY.groups_per_step):
        assert not setup.reader.paused, "there is no batch yet"
        setup.feed_group(number, number, token_ids=pack_tokens([1] * 65_000), completion="x" * 240_000)
        setup.wait_until(lambda: setup.intake.num_ready == number + 1, "the group is ready")  # noqa: B023  called before the next round
    setup.wait_until(lambda: setup.reader.paused, "trajectories are paused")
    assert setup.metrics.registry.get_sample_value("echo_learner_open_bytes") == pytest.approx(4 * 260_000, rel=0.1), "no texts"
    assert setup.batch() == [0, 1], "what is held is enough to choose from"
    setup.wait_until(lambda: not setup.reader.paused, "trajectories are read again")
    setup.intake.close()


@pytest.mark.parametrize("keeps_texts", [False, True])
def test_texts_are_kept_only_for_whoever_looks_at_them(keeps_texts: bool) -> None:
    setup = Setup(keeps_texts=keeps_texts)
    setup.intake.start(None)
    for number in range(POLICY.groups_per_step):
        setup.feed_group(number, number)
    groups: list[ChosenGroup] = []

    def has_batch() -> bool:
        groups.extend(setup.look(0.01) or ())
        return bool(groups)

    setup.wait_until(has_batch, "there is a batch")
    kept = groups[0].samples[0].member.trajectory
    assert (kept.prompt, kept.completion, kept.entry) == (("p", "c", "{}") if keeps_texts else ("", "", ""))
    setup.intake.close()


def test_a_learner_that_waits_is_woken_by_the_group_that_was_missing(setup: Setup) -> None:
    setup.intake.start(None)
    setup.feed_group(0, 0)
    setup.wait_until(lambda: setup.intake.num_ready == 1, "one group is ready")
    found: list[list[int] | None] = []
    waiting = threading.Thread(target=lambda: found.append(setup.batch(timeout_s=WAIT_S)))
    waiting.start()
    setup.feed_group(1, 1)
    waiting.join(WAIT_S / 2)
    assert found == [[0, 1]]


def test_reading_goes_on_from_the_state(setup: Setup) -> None:
    setup.feed_group(0, 0)
    setup.feed_group(1, 7)
    setup.intake.start(None)
    setup.wait_until(lambda: setup.intake.num_ready == 2, "two groups are ready")
    state, drops = setup.intake.settle()
    assert drops == []
    other = Setup()
    other.intake.start(state)
    other.intake.close()
    assert other.reader.started_at == dict.fromkeys(_PLACES, 0), "both groups are still open"
    assert setup.batch() == [0, 7]
    state, _ = setup.intake.settle()
    another = Setup()
    another.intake.start(state)
    another.intake.close()
    assert another.reader.started_at == dict.fromkeys(_PLACES, 2 * GROUP_SIZE)


def dead_request(number: int, seq: int, purpose: Purpose = Purpose.TRAIN) -> Message:
    """A request that no worker takes, as the `number`-th dead letter."""
    request = RolloutRequest(
        run_id="demo",
        group_id=group_id_of("demo", seq, purpose),
        seq=seq,
        purpose=purpose,
        task="t",
        prompt_token_ids=b"\0\0\0\0",
        group_size=GROUP_SIZE,
        sampling=Sampling(max_new_tokens=1),
        required_version=0,
        learner_version=0,
        issued_ms=0,
    )
    made = _message(REQUESTS_DEAD, at(number), request)
    made.headers = {"echo-reason": b"retries_exhausted", "__connect.errors.exception.message": b"three deaths"}
    return made


def test_the_seq_of_a_dead_request_is_closed_once_the_log_is_read_unless_another_copy_was_done(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_learner.intake._TICK_S", 0.0)
    setup.reader.reachable = frozenset(_PLACES)
    setup.reader.end = 2 * GROUP_SIZE
    setup.reader.positions[REQUESTS_DEAD.name, 0] = 0
    setup.intake.start(None)
    setup.reader.fed.put([dead_request(0, 0), dead_request(1, 1), dead_request(2, 2, Purpose.PROBE), dead_request(3, 0)])
    setup.feed_group(0, 1)
    setup.wait_until(lambda: setup.intake.num_ready == 1, "the copy that was done is ready")
    assert setup.intake.settle()[1] == [], "the rest of the log may hold the group"
    setup.feed_group(1, 2)
    setup.wait_until(lambda: setup.intake.floor == 1, "the seq of the dead request is closed")
    (drop,) = setup.intake.settle()[1]
    assert (drop.seq, drop.why, drop.where) == (0, DropReason.FAILED, None)
    assert drop.detail == "Its request is a dead letter: retries_exhausted: three deaths"
    assert setup.batch() == [1, 2]


def test_a_dead_request_waits_for_the_end_of_the_partition_that_may_hold_the_answer_of_another_copy(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo_learner.intake._TICK_S", 0.0)
    setup.reader.positions[REQUESTS_DEAD.name, 0] = 0
    setup.intake.start(None)
    setup.wait_until(lambda: setup.intake.is_caught_up, "the log is read to where it ended at the start")
    setup.reader.fed.put([dead_request(0, 0), dead_request(1, 2)])
    setup.feed_group(0, 1)
    setup.wait_until(lambda: setup.intake.num_ready == 1, "the letters are read")
    assert setup.intake.settle()[1] == [], "the partition may be paused, and hold a group of either"
    setup.feed_group(1, 0)
    setup.wait_until(lambda: setup.intake.num_ready == 2, "the answer of another copy")
    setup.reader.reachable = frozenset(_PLACES)
    setup.wait_until(lambda: setup.intake.has_drops, "the other seq is closed")
    assert [(drop.seq, drop.why) for drop in setup.intake.settle()[1]] == [(2, DropReason.FAILED)]
    assert setup.batch() == [0, 1]


def test_progress_tells_what_is_closed_what_is_seen_and_up_to_when_the_log_is_read(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.intake._TICK_S", 0.0)
    monkeypatch.setattr("echo_learner.intake._LOOK_EVERYWHERE_S", 0.1)
    setup.intake.start(None)
    assert setup.intake.read_from(0) == {"seen": b"", "read_s": None}
    for number, seq in enumerate((1, 2, 4)):
        setup.feed_group(number, seq)
    assert setup.batch() == [1, 2]
    setup.intake.drop(6, DropReason.FAILED)
    setup.wait_until(lambda: seqs_of(1, setup.intake.read_from(1)["seen"]) == [1, 2, 4, 6], "the group that waits")
    assert seqs_of(1, setup.intake.closed_from(1)) == [1, 2, 6]
    assert seqs_of(2, setup.intake.closed_from(2)) == [2, 6]
    setup.reader.reachable = frozenset(_PLACES)
    setup.wait_until(lambda: setup.intake.read_from(0)["read_s"] is not None, "the end of the log")
    first = setup.intake.read_from(0)["read_s"]
    setup.wait_until(lambda: setup.intake.read_from(0)["read_s"] > first, "a later look")


def test_time_passes_only_while_the_ends_of_the_log_are_seen() -> None:
    """Not over a stop of the process, an outage or a pause: what came meanwhile was not read."""
    clock = ManualClock()
    setup = Setup(clock)
    setup.intake.start(None)

    def pass_s(seconds: float) -> None:
        looks = setup.reader.num_looks
        clock.now_s += seconds
        setup.wait_until(lambda: setup.reader.num_looks > looks, "time was looked at")

    setup.reader.fed.put([_message(TRAJECTORIES, at(0), trajectory(0, 0))])
    setup.wait_until(lambda: setup.intake.settle()[0].trajectory_read_to == {0: 1}, "half a group was read")
    for ends in (frozenset(), frozenset(_PLACES[1:])):
        setup.reader.reachable = ends
        for _ in range(8):
            pass_s(2.0)
    setup.reader.reachable = frozenset(_PLACES)
    pass_s(3_600.0)
    assert setup.intake.settle()[1] == []
    for _ in range(3):
        pass_s(2.0)
    assert {drop.why for drop in setup.intake.settle()[1]} == {DropReason.INCOMPLETE}
    setup.intake.close()


def test_the_error_of_the_reader_reaches_whoever_asks(setup: Setup) -> None:
    setup.intake.start(None)
    setup.reader.fed.put(OSError(5, "the network is gone"))
    with pytest.raises(OSError, match="the network is gone"):
        setup.batch()
    with pytest.raises(OSError, match="the network is gone"):
        setup.intake.settle()


def test_closing_before_the_start_is_no_error() -> None:
    made = Setup()
    made.intake.close()
    assert made.reader.closed


def test_a_batch_waits_until_somebody_has_looked_at_the_claims_in_it(setup: Setup) -> None:
    setup.intake.start(None)
    for number in range(POLICY.groups_per_step):
        setup.feed_group(number, number)
    deadline = Deadline.after(WAIT_S)
    while setup.intake.num_ready < POLICY.groups_per_step:
        assert setup.intake.next_batch(0, EXACT, 0.01) is None, "a claim was believed unseen"
        assert not deadline.expired(), "waited for the groups to be ready"
    assert setup.intake.next_batch(0, EXACT, WAIT_S) is None
    assert setup.batch() == list(range(POLICY.groups_per_step))


def test_a_claim_ends_the_learner_s_wait_so_that_it_is_looked_at_meanwhile(setup: Setup) -> None:
    setup.intake.start(None)
    setup.feed_group(0, 0)
    assert setup.intake.next_batch(0, EXACT, WAIT_S) is None, "one group is no batch"
    assert len(setup.trust.take_samples()) == 1, "one sample of the worker's claim"


def test_what_each_worker_delivered_is_counted_once(setup: Setup) -> None:
    setup.intake.start(None)
    setup.feed_group(0, 0, worker_id="a")
    setup.feed_group(1, 1, worker_id="b")
    assert setup.batch() == [0, 1]
    assert setup.intake.take_delivered() == {"a": GROUP_SIZE, "b": GROUP_SIZE}
    assert setup.intake.take_delivered() == {}


@pytest.mark.parametrize(
    ("shape", "number", "said"),
    [
        ((1, 2, 4), 3, None),
        ((1, 2, 3), 3, "not 2 of 3 in 1 layers"),
        ((2, 1, 4), 3, "not 1 of 4 in 2 layers"),
        (None, 3, "replay_experts is false"),
    ],
)
def test_experts_that_the_model_does_not_have_are_not_trained(shape: tuple[int, int, int] | None, number: int, said: str | None) -> None:
    record = trajectory(3, 0, experts=Experts.of(np.array([[[0, 1]], [[2, number]]], np.uint8)))
    fault = AdmissionLimits(vocabulary=32, max_length=8, experts=shape).fault_of(record)
    assert (fault is None) if said is None else (fault is not None and said in fault[1])
