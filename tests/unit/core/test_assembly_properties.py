"""The assembler under any interleaving, duplication, reordering, eviction and crash: a small log, a small learner, hypothesis for the rest.

The model: `trajectories` and `rewards` are append-only partitions. A writer appends attempts of groups, again and again, with other content
each time, in any mixture; a scorer appends rewards, repeated, late, wrong and foreign ones among them. A learner reads both in any
interleaving, takes ready groups, checkpoints when it likes (state, what it yielded, what it dropped, as one), and crashes when it likes:
then everything after the last checkpoint never happened, and it reads again from the checkpoint's lows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.assembly import GroupAssembler
from echo_core.groups import AssemblyLimits, AssemblyState, ReadyGroup
from echo_schemas.records import Coordinates, DropReason, Reward, Trajectory
from tests.thorough import examples
from tests.unit.core.records import EXACT, GROUP_SIZE, at, reward, trajectory

PARTITIONS = 2
SEQS = 4


@dataclass
class Log:
    """Two topics of two partitions."""

    trajectories: list[list[Trajectory]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])
    rewards: list[list[Reward]] = field(default_factory=lambda: [[] for _ in range(PARTITIONS)])


@dataclass
class Learner:
    """Reads, takes, checkpoints, crashes. `yielded` and `dropped` are the durable history: what the checkpoint says happened."""

    log: Log
    limits: AssemblyLimits
    assembler: GroupAssembler = field(init=False)
    state: AssemblyState | None = None
    yielded: list[ReadyGroup] = field(default_factory=list)
    dropped: list[tuple[int, Coordinates | None]] = field(default_factory=list)
    new_yielded: list[ReadyGroup] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    reward_positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.assembler = GroupAssembler("demo", EXACT, self.limits, state=self.state)
        lows = self.state.trajectory_lows if self.state else {}
        reward_lows = self.state.reward_lows if self.state else {}
        self.positions = [lows.get(number, 0) for number in range(PARTITIONS)]
        self.reward_positions = [reward_lows.get(number, 0) for number in range(PARTITIONS)]
        self.new_yielded = []

    def read_trajectory(self, partition: int) -> None:
        offset = self.positions[partition]
        if offset < len(self.log.trajectories[partition]):
            self.assembler.add_trajectory(at(offset, partition), self.log.trajectories[partition][offset])
            self.positions[partition] += 1
            self.go_back()

    def read_reward(self, partition: int) -> None:
        offset = self.reward_positions[partition]
        if offset < len(self.log.rewards[partition]):
            self.assembler.add_reward(at(offset, partition), self.log.rewards[partition][offset])
            self.reward_positions[partition] += 1
            self.go_back()

    def go_back(self) -> None:
        """As the intake does after each read."""
        for partition, offset in self.assembler.take_forgotten().items():
            assert offset < self.reward_positions[partition], "it was read before"
            self.reward_positions[partition] = offset

    def take(self) -> None:
        for group in self.assembler.ready[:1]:
            self.new_yielded.append(self.assembler.take(group.seq))

    def checkpoint(self) -> None:
        self.yielded += self.new_yielded
        self.dropped += [(drop.seq, drop.where) for drop in self.assembler.drain_drops()]
        self.new_yielded = []
        self.state = self.assembler.state()

    def read_all(self) -> None:
        for number in range(PARTITIONS):
            while self.positions[number] < len(self.log.trajectories[number]):
                self.read_trajectory(number)
            while self.reward_positions[number] < len(self.log.rewards[number]):
                self.read_reward(number)

    def records_read(self) -> set[Coordinates]:
        return {at(offset, number) for number in range(PARTITIONS) for offset in range(self.positions[number])}


def partition_of(seq: int) -> int:
    return seq % PARTITIONS


# A step of the world: what the writer, the scorer or the learner does next.
writes = st.tuples(st.just("write"), st.integers(0, SEQS - 1), st.integers(0, GROUP_SIZE - 1), st.sampled_from("abc"))
# Attempts that worked, so that groups do become whole.
wholes = st.tuples(st.just("whole"), st.integers(0, SEQS - 1), st.integers(0, 0), st.sampled_from("abc"))
scores = st.tuples(st.just("score"), st.integers(0, PARTITIONS - 1), st.integers(0, 30), st.sampled_from("abc"))
lies = st.tuples(st.just("lie"), st.integers(0, PARTITIONS - 1), st.integers(0, 40), st.sampled_from("abc"))
moves = st.tuples(
    st.sampled_from(["read", "read", "read reward", "read reward", "take", "take", "checkpoint", "crash", "tick", "catch up"]),
    st.integers(0, PARTITIONS - 1),
    st.integers(0, 0),
    st.just("a"),
)
worlds = st.lists(st.one_of(wholes, writes, scores, scores, lies, moves, moves, moves), max_size=80)


def play(steps: list[tuple[str, int, int, str]], limits: AssemblyLimits) -> Iterator[Learner]:
    """Run a world, yielding the learner after every step; at the end it scores and reads everything, takes and checkpoints."""
    log = Log()
    learner = Learner(log, limits)
    clock_s = 0.0
    for number, (what, one, two, letter) in enumerate(steps):
        if what == "write":
            log.trajectories[partition_of(one)].append(trajectory(one, two, attempt=letter, completion=f"text {number}"))
        elif what == "whole":
            for index in range(GROUP_SIZE):
                log.trajectories[partition_of(one)].append(trajectory(one, index, attempt=f"{letter}{number}", completion=f"text {number}"))
        elif what == "score" and two < len(log.trajectories[one]):
            _score(log, at(two, one), value=float(number))
        elif what == "lie":
            # A reward that names a place nobody wrote to, or a record of another group.
            log.rewards[one].append(reward(at(two, one), seq=SEQS - 1, value=-1.0 if two >= len(log.trajectories[one]) else None))
        elif what == "read":
            learner.read_trajectory(one)
        elif what == "read reward":
            learner.read_reward(one)
        elif what == "take":
            learner.take()
        elif what == "checkpoint":
            learner.checkpoint()
        elif what == "crash":
            learner.start()
        elif what == "tick":
            clock_s += 7.0
            learner.assembler.tick(clock_s, range(PARTITIONS), range(PARTITIONS))
        elif what == "catch up":
            learner.read_all()
        yield learner
    for number in range(PARTITIONS):
        for offset in range(len(log.trajectories[number])):
            _score(log, at(offset, number), value=1.0)
    learner.read_all()
    for _ in range(SEQS):
        learner.take()
    learner.checkpoint()
    yield learner


def _score(log: Log, where: Coordinates, value: float) -> None:
    judged = log.trajectories[where.partition][where.offset]
    log.rewards[where.partition].append(reward(where, judged.seq, value=value, attempt=judged.attempt, index=judged.index))


def check(learner: Learner) -> None:
    """What must hold of the durable history at any moment."""
    seqs = [group.seq for group in learner.yielded]
    assert len(seqs) == len(set(seqs)), "a group was yielded twice"
    for group in learner.yielded + learner.new_yielded:
        assert {member.trajectory.attempt for member in group.members} == {group.attempt}, "members of two attempts"
        assert [member.trajectory.index for member in group.members] == list(range(GROUP_SIZE))
        for member in group.members:
            judged = learner.log.trajectories[member.where.partition][member.where.offset]
            assert judged is member.trajectory, "a member is not the record at its coordinates"
            score = member.scores["exact"]
            if score.offset is not None:
                used = learner.log.rewards[member.where.partition][score.offset]
                assert used.of == member.where, "a reward was used that judges another record"
                assert used.value == score.value
    gone = [where for _, where in learner.dropped if where is not None]
    trained = [member.where for group in learner.yielded for member in group.members]
    assert len(gone) == len(set(gone)), "a record was dropped twice"
    assert len(trained) == len(set(trained)), "a record was trained twice"
    assert not set(gone) & set(trained), "a record was dropped and trained"
    closed = [seq for seq, where in learner.dropped if where is None]
    assert len(closed) == len(set(closed)), "a seq was closed twice"
    assert not set(closed) & set(seqs), "a seq was closed and trained"


def check_accounts(learner: Learner) -> None:
    """After a checkpoint: every record read is exactly one of yielded, dropped and open."""
    gone = {where for _, where in learner.dropped if where is not None}
    trained = {member.where for group in learner.yielded for member in group.members}
    opened = set(learner.assembler._by_place)
    assert not opened & (gone | trained), "an open record has a terminal state"
    assert gone | trained | opened == learner.records_read(), "a record that was read has no state, or one that was not has"


ROOMY = AssemblyLimits(max_open_groups=100, max_early_rewards=1_000, group_timeout_s=1e9, reward_timeout_s=1e9)
TIGHT = AssemblyLimits(max_open_groups=2, max_early_rewards=3, group_timeout_s=20.0, reward_timeout_s=10.0)


@settings(max_examples=examples(250))
@given(worlds, st.sampled_from([ROOMY, TIGHT]))
def test_whatever_happens_each_group_is_yielded_at_most_once_and_every_record_has_one_state(
    steps: list[tuple[str, int, int, str]], limits: AssemblyLimits
) -> None:
    learner = None
    for learner in play(steps, limits):
        check(learner)
    assert learner is not None
    check_accounts(learner)


@settings(max_examples=examples(120))
@given(worlds)
def test_every_group_with_a_whole_attempt_is_yielded_in_the_end(steps: list[tuple[str, int, int, str]]) -> None:
    *_, learner = play(steps, ROOMY)
    whole = set()
    for records in learner.log.trajectories:
        seen: dict[tuple[int, str], set[int]] = {}
        for record in records:
            seen.setdefault((record.seq, record.attempt), set()).add(record.index)
        whole |= {seq for (seq, _), indices in seen.items() if len(indices) == GROUP_SIZE}
    assert {group.seq for group in learner.yielded} == whole


reads = st.tuples(st.sampled_from(["read", "read reward", "read reward", "take", "checkpoint", "crash"]), st.integers(0, PARTITIONS - 1))


@settings(max_examples=examples(120))
@given(st.permutations(range(12)), st.lists(reads, min_size=40, max_size=80), st.integers(1, 4))
def test_rewards_that_were_written_once_are_enough_however_little_room_there_is(
    order: list[int], moves: list[tuple[str, int]], room: int
) -> None:
    """Reading `rewards` far ahead of `trajectories`, in another order, loses none: what had no room is read again."""
    log = Log()
    for seq in range(12):
        log.trajectories[partition_of(seq)] += [trajectory(seq, index) for index in range(GROUP_SIZE)]
    for seq in order:
        for index in range(GROUP_SIZE):
            _score(log, at(seq // PARTITIONS * GROUP_SIZE + index, partition_of(seq)), value=float(seq))
    learner = Learner(log, replace(ROOMY, max_early_rewards=room))
    for what, partition in moves:
        if what == "read":
            learner.read_trajectory(partition)
        elif what == "read reward":
            learner.read_reward(partition)
        else:
            {"take": learner.take, "checkpoint": learner.checkpoint, "crash": learner.start}[what]()
    learner.read_all()
    for _ in range(12):
        learner.take()
    learner.checkpoint()
    assert sorted(group.seq for group in learner.yielded) == list(range(12))
    check(learner)


@settings(max_examples=examples(120))
@given(worlds, st.integers(0, SEQS - 1), st.sampled_from(["a", "new"]))
def test_a_record_of_a_closed_seq_appended_again_changes_nothing(steps: list[tuple[str, int, int, str]], seq: int, attempt: str) -> None:
    *_, learner = play(steps, ROOMY)
    closed = {group.seq for group in learner.yielded}
    before = [group.seq for group in learner.yielded]
    for index in range(GROUP_SIZE):
        learner.log.trajectories[partition_of(seq)].append(trajectory(seq, index, attempt=attempt, completion="appended again"))
    learner.start()
    learner.read_all()
    learner.take()
    drops = learner.assembler.drain_drops()
    if seq in closed:
        assert [group.seq for group in learner.new_yielded] == []
        assert [drop.why for drop in drops] == [DropReason.DUPLICATE] * GROUP_SIZE
        assert [group.seq for group in learner.yielded] == before


@settings(max_examples=examples(80))
@given(worlds)
def test_a_restart_rebuilds_the_same_open_records(steps: list[tuple[str, int, int, str]]) -> None:
    *_, learner = play(steps, ROOMY)
    before = set(learner.assembler._by_place)
    learner.start()
    learner.read_all()
    assert set(learner.assembler._by_place) == before
    assert learner.assembler.drain_drops() == []


@settings(max_examples=examples(120))
@given(worlds)
def test_a_restart_finds_the_same_rewards_again(steps: list[tuple[str, int, int, str]]) -> None:
    *_, played = play(steps, ROOMY)
    # The same log read anew, without taking anything, so that every whole group is open with its rewards at the checkpoint.
    reader = Learner(played.log, ROOMY)
    reader.read_all()
    reader.checkpoint()
    ready = reader.assembler.ready
    reader.start()
    reader.read_all()
    assert reader.assembler.ready == ready
