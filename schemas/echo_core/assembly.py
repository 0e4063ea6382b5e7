"""Assembles trajectories and rewards, in any order and any number of times, into groups. Each group is yielded at most once.

    trajectories ──▶ open group ── one attempt whole ──▶ chosen ── required rewards ──▶ ready ── take ──▶ closed
    rewards ───────▶ joined on (partition, offset, name)             late, repeated, foreign: ignored

Rules (docs/decisions/0001-group-assembly.md): a group takes its members from the first whole attempt. A reward judges only the record at
its coordinates; of several rewards the scored one with the lowest offset counts. A record of a closed seq is always a duplicate. Every
record read is exactly one of yielded, dropped or open. Deterministic; the caller owns clock, log and thread.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import chain

from echo_core.closed_seqs import ClosedSeqs
from echo_core.groups import AssemblyLimits, AssemblyState, DropDecision, Member, ReadyGroup, Score
from echo_schemas.columns import pack_seqs
from echo_schemas.records import Coordinates, DropReason, Purpose, Reward, RewardOutcome, RewardTerm, Trajectory

# Memory of a record beside its arrays and texts.
_RECORD_BYTES = 2_048
# Of the limit in bytes, what eviction leaves.
_EVICT_TO = 0.95


@dataclass(slots=True)
class _Sample:
    """An open record and the rewards that judge it: (lowest offset, reward) of each name, scored ones first."""

    where: Coordinates
    trajectory: Trajectory
    rewards: dict[str, tuple[int, Reward]] = field(default_factory=dict)


@dataclass(slots=True)
class _Open:
    """A group under assembly."""

    seq: int
    num_bytes: int = 0
    attempts: dict[str, dict[int, _Sample]] = field(default_factory=dict)
    chosen: str | None = None
    waited_s: float = 0.0
    ready: ReadyGroup | None = None
    lacking: _Sample | None = None
    """Of a whole group: a sample whose rewards are missing, so that one of the others needs no look at them all."""

    def samples(self) -> Iterable[_Sample]:
        return (sample for members in self.attempts.values() for sample in members.values())

    def partitions(self) -> set[int]:
        return {sample.where.partition for sample in self.samples()}

    @property
    def partition(self) -> int:
        """Of a whole group: where its records lie. They have one key."""
        assert self.chosen is not None
        return next(iter(self.attempts[self.chosen].values())).where.partition


class GroupAssembler:
    """Assembles the training groups of one run. One thread uses it."""

    def __init__(self, run_id: str, terms: tuple[RewardTerm, ...], limits: AssemblyLimits, *, state: AssemblyState | None = None) -> None:
        """`terms`: the reward specification in force. `state`: continue from a checkpoint; the caller then reads from its lows."""
        self._run_id = run_id
        self._terms = terms
        self._limits = limits
        self._closed = ClosedSeqs(state.floor, state.closed) if state else ClosedSeqs()
        self._open: dict[int, _Open] = {}
        self._by_place: dict[Coordinates, tuple[int, _Sample]] = {}
        self._early: dict[Coordinates, list[tuple[Coordinates, Reward]]] = {}
        self._num_early: Counter[int] = Counter()
        # By partition, of the rewards that had no room: the lowest place of a record that they judge, and the lowest of their own.
        self._forgotten: dict[int, tuple[int, int]] = {}
        # A heap of (minus the distance to the read position of its partition, minus the offset, partition): the reward needed last comes
        # first. Joined ones stay for a while.
        self._far: list[tuple[int, int, int]] = []
        # By partition a heap of the offsets that they judge.
        self._early_offsets: defaultdict[int, list[int]] = defaultdict(list)
        self.open_bytes = 0
        """Approximate memory of the records of open groups."""
        self.num_whole = 0
        """Groups with a whole attempt, which wait for rewards or to be taken: what back-pressure counts."""
        self._settled: dict[Coordinates, int] = {}
        self._restored_settled = state.settled if state else frozenset()
        self._restored_read_to = dict(state.trajectory_read_to) if state else {}
        self._read_to: dict[int, int] = dict(state.trajectory_lows) if state else {}
        self._rewards_read_to: dict[int, int] = dict(state.reward_lows) if state else {}
        self._drops: list[DropDecision] = []
        self._ticked_s: float | None = None

    # What is read

    def add_trajectory(self, where: Coordinates, trajectory: Trajectory) -> None:
        """Take a record of `trajectories`. Offsets of a partition come in order."""
        self._read_to[where.partition] = max(self._read_to.get(where.partition, 0), where.offset + 1)
        early = self._take_early(where)
        if trajectory.run_id != self._run_id or trajectory.purpose is not Purpose.TRAIN or where in self._by_place:
            return
        if trajectory.seq in self._closed:
            # A record that was read before the checkpoint has its fate already.
            if where.offset >= self._restored_read_to.get(where.partition, 0):
                self._drop_record(where, trajectory, DropReason.DUPLICATE)
        elif where in self._restored_settled:
            # Dropped before the checkpoint; its seq was and is open.
            self._settled[where] = trajectory.seq
        else:
            self._open_record(where, trajectory, early)

    def add_reward(self, at: Coordinates, reward: Reward) -> None:
        """Take a record of `rewards`, which lies at `at`: join it with its trajectory, or keep it for a while if that was not read yet.

        Ignored: a reward of a closed seq, one whose record was read and is not open (dropped, of another run, no trajectory), and one of a
        record in another partition.
        """
        self._rewards_read_to[at.partition] = max(self._rewards_read_to.get(at.partition, 0), at.offset + 1)
        # A reward lies in the partition of its trajectory: what is read again, and from where a restart reads, is told by partition.
        if reward.run_id != self._run_id or reward.of.partition != at.partition:
            return
        found = self._by_place.get(reward.of)
        if found is not None:
            # Else it judges a record at these coordinates of an earlier topic of this name.
            if _judges(reward, found[1].trajectory):
                self._join(found[0], found[1], at, reward)
        elif reward.seq not in self._closed and reward.of.offset >= self._read_to.get(reward.of.partition, 0):
            self._keep_early(at, reward)

    def skip_to(self, partition: int, offset: int) -> None:
        """Note that the offsets of `trajectories` below `offset` were read, and hold no further trajectory (invalid, markers, compacted).

        Early rewards of such places are let go.
        """
        read_to = self._read_to[partition] = max(self._read_to.get(partition, 0), offset)
        offsets = self._early_offsets[partition]
        while offsets and offsets[0] < read_to:
            self._take_early(Coordinates(partition=partition, offset=heappop(offsets)))

    def skip_rewards_to(self, partition: int, offset: int) -> None:
        """The same for `rewards`."""
        self._rewards_read_to[partition] = max(self._rewards_read_to.get(partition, 0), offset)

    def tick(self, now_s: float, at_end: Collection[int], rewards_at_end: Collection[int]) -> None:
        """Let time pass for groups whose records are all read: a group without a whole attempt that waited too long is dropped, a missing
        reward of a whole one gets its default or is left out.

        `at_end`, `rewards_at_end`: partitions of `trajectories` and `rewards` whose ends were reached since the last tick. A whole group
        waits for nothing but `rewards`, so its time runs also while the caller does not read `trajectories`.
        """
        elapsed_s = 0.0 if self._ticked_s is None else min(max(0.0, now_s - self._ticked_s), self._limits.longest_tick_s)
        self._ticked_s = now_s
        ends, reward_ends = frozenset(at_end), frozenset(rewards_at_end)
        for group in list(self._open.values()):
            if group.ready is not None or not group.partitions() <= (ends if group.chosen is None else reward_ends):
                continue
            group.waited_s += elapsed_s
            if group.chosen is None:
                if group.waited_s > self._limits.group_timeout_s:
                    self._drop_group(group, DropReason.INCOMPLETE, f"No whole attempt within {self._limits.group_timeout_s:g} s.")
            else:
                self._make_ready(group)

    @property
    def waiting_in(self) -> frozenset[int]:
        """Partitions of the groups that are not ready: the next tick needs their ends."""
        return frozenset(partition for group in self._open.values() if group.ready is None for partition in group.partitions())

    # What comes out

    @property
    def ready(self) -> tuple[ReadyGroup, ...]:
        """Groups that may be trained, oldest first by (oldest version, seq)."""
        found = [group.ready for group in self._open.values() if group.ready is not None]
        return tuple(sorted(found, key=lambda group: (group.min_version, group.seq)))

    @property
    def num_open(self) -> int:
        """Groups under assembly, ready ones included."""
        return len(self._open)

    @property
    def num_ready(self) -> int:
        """Groups that wait to be taken."""
        return sum(group.ready is not None for group in self._open.values())

    @property
    def whole_in(self) -> Counter[int]:
        """`num_whole` for each partition."""
        return Counter(group.partition for group in self._open.values() if group.chosen is not None)

    @property
    def lacking_in(self) -> frozenset[int]:
        """Partitions of whole groups that lack a reward."""
        return frozenset(group.partition for group in self._open.values() if group.chosen is not None and group.ready is None)

    def early_shares(self) -> dict[int, float]:
        """By partition, the rewards that are kept until their trajectory is read, as a share of the limit for all partitions."""
        return {partition: count / self._limits.max_early_rewards for partition, count in self._num_early.items()}

    def take_forgotten(self) -> dict[int, int]:
        """By partition, from where `rewards` must be read again: a trajectory was read whose reward had no room before. Each is said once;
        until it is read again, the partition counts as read up to there."""
        needed = {partition: at for partition, (of, at) in self._forgotten.items() if of < self._read_to.get(partition, 0)}
        for partition in needed:
            del self._forgotten[partition]
        # What lies further on is read anyway: the partition is being read again already.
        found = {partition: at for partition, at in needed.items() if at < self._rewards_read_to[partition]}
        self._rewards_read_to |= found
        return found

    @property
    def floor(self) -> int:
        """Every lower seq is closed; a new allocator starts from here."""
        return self._closed.floor

    def closed_from(self, base: int) -> bytes:
        """The closed seqs from `base` on, packed by `pack_seqs`."""
        return pack_seqs(base, self._closed.from_seq(base))

    def seen_from(self, base: int) -> bytes:
        """The same, with the seqs of open records."""
        return pack_seqs(base, chain(self._closed.from_seq(base), self._open))

    @property
    def num_closed(self) -> int:
        """Seqs that are trained or dropped. Any thread may ask."""
        return self._closed.num_closed

    def is_closed(self, seq: int) -> bool:
        """Whether the seq is trained or dropped."""
        return seq in self._closed

    def is_whole(self, seq: int) -> bool:
        """Whether an attempt of the open seq has all its members; rewards may still be missing."""
        group = self._open.get(seq)
        return group is not None and group.chosen is not None

    def missing_rewards(self, least_wait_s: float = 0.0) -> dict[str, list[Coordinates]]:
        """By reward name, the records of whole groups that lack an awaited value; oldest seq first. Only of groups that have been whole for
        `least_wait_s`."""
        missing: dict[str, list[Coordinates]] = {}
        for _, group in sorted(self._open.items()):
            if group.chosen is None or group.ready is not None or group.waited_s < least_wait_s:
                continue
            for sample in group.attempts[group.chosen].values():
                for term in self._terms:
                    known = sample.rewards.get(term.name)
                    if term.is_awaited and (known is None or known[1].value is None):
                        missing.setdefault(term.name, []).append(sample.where)
        return missing

    def take(self, seq: int, dropped: Iterable[tuple[Coordinates, DropReason]] = ()) -> ReadyGroup:
        """Yield a ready group and close its seq. `dropped`: members not to be trained, and why; the other members are yielded. The records
        of other attempts become drops. Raises KeyError if no such group is ready."""
        group = self._open.get(seq)
        if group is None or group.ready is None:
            raise KeyError(seq)
        reasons = dict(dropped)
        yielded = {member.where for member in group.ready.members} - set(reasons)
        self._close(group, yielded, DropReason.OTHER_ATTEMPT, reasons)
        return group.ready

    def drop_group(self, seq: int, why: DropReason, detail: str = "") -> None:
        """Close a seq, open or never seen, without training it. Does nothing for a closed one."""
        group = self._open.get(seq)
        if group is not None:
            self._drop_group(group, why, detail)
        elif self._closed.close(seq):
            self._drops.append(DropDecision(seq=seq, why=why, detail=detail or None))

    @property
    def has_drops(self) -> bool:
        """Whether drops were decided since the last `drain_drops`."""
        return bool(self._drops)

    def drain_drops(self) -> list[DropDecision]:
        """The drops decided since the last call, in order."""
        drops, self._drops = self._drops, []
        return drops

    def set_terms(self, terms: tuple[RewardTerm, ...]) -> None:
        """Use another reward specification from now on; groups that lack one of its required rewards wait again."""
        self._terms = terms
        for group in self._open.values():
            group.ready = None
            if group.chosen is not None:
                self._make_ready(group)

    def state(self) -> AssemblyState:
        """The state for a checkpoint. Undrained drops are not part of it: drain them into the same checkpoint."""
        lows = dict(self._read_to)
        reward_lows = dict(self._rewards_read_to)
        open_lows: dict[tuple[int, int], Coordinates] = {}
        for where, (seq, sample) in self._by_place.items():
            lows[where.partition] = min(lows[where.partition], where.offset)
            known = open_lows.setdefault((seq, where.partition), where)
            if where.offset < known.offset:
                open_lows[seq, where.partition] = where
            for offset, _ in sample.rewards.values():
                reward_lows[where.partition] = min(reward_lows.get(where.partition, offset), offset)
        for kept in self._early.values():
            for at, _ in kept:
                reward_lows[at.partition] = min(reward_lows[at.partition], at.offset)
        for partition, (_, at_offset) in self._forgotten.items():
            reward_lows[partition] = min(reward_lows[partition], at_offset)
        settled = {where for where, seq in self._settled.items() if seq not in self._closed}
        settled |= {where for where in self._restored_settled if where.offset >= self._read_to.get(where.partition, 0)}
        for where in settled:
            lows[where.partition] = min(lows.get(where.partition, where.offset), where.offset)
        read_to = {
            partition: max(self._read_to.get(partition, 0), self._restored_read_to.get(partition, 0))
            for partition in {*self._read_to, *self._restored_read_to}
        }
        opened: dict[int, list[Coordinates]] = {}
        for (seq, _), where in sorted(open_lows.items()):
            opened.setdefault(seq, []).append(where)
        return AssemblyState(
            floor=self._closed.floor,
            closed=self._closed.above,
            trajectory_lows=lows,
            trajectory_read_to=read_to,
            reward_lows=reward_lows,
            settled=frozenset(settled),
            open={seq: tuple(lows_of) for seq, lows_of in opened.items()},
        )

    # Private

    def _open_record(self, where: Coordinates, trajectory: Trajectory, early: list[tuple[Coordinates, Reward]]) -> None:
        group = self._open.get(trajectory.seq)
        if group is None:
            group = self._open[trajectory.seq] = _Open(trajectory.seq)
        members = group.attempts.setdefault(trajectory.attempt, {})
        if trajectory.index in members:
            self._drop_record(where, trajectory, DropReason.DUPLICATE)
            self._settled[where] = trajectory.seq
        else:
            sample = members[trajectory.index] = _Sample(where, trajectory)
            self._by_place[where] = (trajectory.seq, sample)
            num_bytes = _bytes_of(trajectory)
            group.num_bytes += num_bytes
            self.open_bytes += num_bytes
            for at, reward in early:
                if _judges(reward, trajectory):
                    self._join(trajectory.seq, sample, at, reward)
            if group.chosen is None and len(members) == trajectory.group_size:
                group.chosen = trajectory.attempt
                group.waited_s = 0.0
                self.num_whole += 1
                self._make_ready(group)
        if len(self._open) - self.num_whole > self._limits.max_open_groups:
            oldest = min(seq for seq, group in self._open.items() if group.chosen is None)
            detail = f"More than {self._limits.max_open_groups} groups without a whole attempt were open."
            self._drop_group(self._open[oldest], DropReason.EVICTED, detail)
        if self.open_bytes > self._limits.max_open_bytes:
            self._evict_largest()

    def _evict_largest(self) -> None:
        """Let the largest groups go until some room is left: a look at all groups for each record would cost more than the record."""
        for group in sorted(self._open.values(), key=lambda each: (-each.num_bytes, each.seq)):
            if self.open_bytes <= _EVICT_TO * self._limits.max_open_bytes:
                return
            self._drop_group(group, DropReason.EVICTED, f"Open groups held more than {self._limits.max_open_bytes} bytes.")

    def _join(self, seq: int, sample: _Sample, at: Coordinates, reward: Reward) -> None:
        """Keep the scored reward with the lowest offset, in any order of arrival; an unscored one only until a scored one comes."""
        known = sample.rewards.get(reward.name)
        if known is not None and (reward.value is None, at.offset) >= (known[1].value is None, known[0]):
            return
        sample.rewards[reward.name] = (at.offset, reward)
        group = self._open[seq]
        if group.chosen == sample.trajectory.attempt and (group.lacking is None or group.lacking is sample):
            self._make_ready(group)

    def _make_ready(self, group: _Open) -> None:
        """Build the ready group if every required reward is there, or past its deadline."""
        assert group.chosen is not None
        members = []
        group.lacking = None
        # Rewards mostly come in the members' order, so the last one tells most.
        for _, sample in sorted(group.attempts[group.chosen].items(), reverse=True):
            scores = self._scores_of(sample, group.waited_s)
            if scores is None:
                group.lacking = sample
                return
            members.append(Member(where=sample.where, trajectory=sample.trajectory, scores=scores))
        group.ready = ReadyGroup(seq=group.seq, attempt=group.chosen, members=tuple(reversed(members)))

    def _scores_of(self, sample: _Sample, waited_s: float) -> dict[str, Score] | None:
        """The sample's scores, or None while a required one may still come. A reward that will not come and has no default is left out."""
        scores = {
            name: Score(value=reward.value, offset=offset, code_version=reward.code_version)
            for name, (offset, reward) in sample.rewards.items()
            if reward.value is not None
        }
        for term in self._terms:
            if not term.is_awaited or term.name in scores:
                continue
            known = sample.rewards.get(term.name)
            is_stale = known is not None and known[1].outcome is RewardOutcome.STALE
            deadline_s = self._limits.reward_timeout_s if term.deadline_s is None else term.deadline_s
            if not is_stale and waited_s <= deadline_s:
                return None
            if term.default is not None and not is_stale:
                scores[term.name] = Score(value=term.default, defaulted=True)
        return scores

    def _drop_group(self, group: _Open, why: DropReason, detail: str) -> None:
        self._drops.append(DropDecision(seq=group.seq, why=why, detail=detail or None))
        self._close(group, set(), why, {})

    def _close(self, group: _Open, yielded: set[Coordinates], why: DropReason, reasons: dict[Coordinates, DropReason]) -> None:
        """Close the seq; each of its open records that is not yielded becomes a drop."""
        del self._open[group.seq]
        self.open_bytes -= group.num_bytes
        self.num_whole -= group.chosen is not None
        self._closed.close(group.seq)
        for sample in group.samples():
            del self._by_place[sample.where]
            if sample.where not in yielded:
                self._drop_record(sample.where, sample.trajectory, reasons.get(sample.where, why))
        self._settled = {where: seq for where, seq in self._settled.items() if seq != group.seq} if self._settled else self._settled

    def _drop_record(self, where: Coordinates, trajectory: Trajectory, why: DropReason) -> None:
        self._drops.append(
            DropDecision(
                seq=trajectory.seq,
                why=why,
                where=where,
                attempt=trajectory.attempt,
                version=trajectory.min_version,
                num_tokens=trajectory.num_generated,
                worker_id=trajectory.worker_id if why is DropReason.WRONG_VERSION else None,
            )
        )

    def _keep_early(self, at: Coordinates, reward: Reward) -> None:
        """Keep a reward until its trajectory is read. Over the limit, forget the reward whose place lies furthest ahead until then."""
        kept = self._early.get(reward.of)
        if kept is None:
            kept = self._early[reward.of] = []
            distance = reward.of.offset - self._read_to.get(reward.of.partition, 0)
            heappush(self._far, (-distance, -reward.of.offset, reward.of.partition))
            heappush(self._early_offsets[reward.of.partition], reward.of.offset)
        elif any(known == at for known, _ in kept):
            # Read again, because of others that were forgotten.
            return
        # The assembler does not use components and errors.
        kept.append((at, replace(reward, components={}, error=None)))
        self._num_early[at.partition] += 1
        while self._num_early.total() > self._limits.max_early_rewards:
            _, offset, partition = heappop(self._far)
            offset = -offset
            for far, _ in self._take_early(Coordinates(partition=partition, offset=offset)):
                lowest_of, lowest_at = self._forgotten.get(partition, (offset, far.offset))
                self._forgotten[partition] = (min(lowest_of, offset), min(lowest_at, far.offset))
        if len(self._far) > 2 * (len(self._early) + self._limits.max_early_rewards):
            self._far = [far for far in self._far if Coordinates(partition=far[2], offset=-far[1]) in self._early]
            heapify(self._far)
        offsets = self._early_offsets[at.partition]
        if len(offsets) > 2 * (len(self._early) + self._limits.max_early_rewards):
            # Each reading again has added those that had no room. A sorted list is a heap.
            offsets[:] = sorted(where.offset for where in self._early if where.partition == at.partition)

    def _take_early(self, where: Coordinates) -> list[tuple[Coordinates, Reward]]:
        kept = self._early.pop(where, [])
        if kept:
            self._num_early[where.partition] -= len(kept)
        return kept


def _bytes_of(trajectory: Trajectory) -> int:
    texts = len(trajectory.prompt) + len(trajectory.completion) + len(trajectory.entry)
    experts = 0 if trajectory.experts is None else len(trajectory.experts.ids)
    return _RECORD_BYTES + len(trajectory.token_ids) + len(trajectory.logprobs) + experts + texts


def _judges(reward: Reward, trajectory: Trajectory) -> bool:
    """Whether the reward is of this record, and not only of its coordinates."""
    return (reward.seq, reward.attempt) == (trajectory.seq, trajectory.attempt)
