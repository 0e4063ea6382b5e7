"""Which seqs to issue, and how much of what was issued is still open: the feeder's rules, without Kafka and without a clock.

    Ledger        requests by partition → how many the workers have finished
    OpenSeqs      the seqs that were issued: how many are undecided
    OpenRequests  their requests: which are lost

Used from the feeder's thread alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from echo_core.dispatch import DispatchState
from echo_schemas.columns import seqs_of
from echo_schemas.records import Progress

# A committed request counts as lost only if the learner has read so much further: twenty of its progress records. It covers the delays of
# these records to the feeder, and of the trajectories to the learner.
_READ_BEHIND_S = 10.0


def dispatch_state(progress: Progress | None, undecided: int) -> DispatchState:
    """The learner's newest progress and our own count. Before its first progress it is at version 0."""
    if progress is None:
        return DispatchState(version=0, published=0, undecided=undecided)
    return DispatchState(version=progress.version, published=progress.published, undecided=undecided)


class Ledger:
    """The offsets of a run's requests by partition. It turns offsets into counts of requests.

    Counts and not offsets, because the end marker of a transaction takes an offset that no worker ever finishes: by offsets a partition
    would look busy for ever.
    """

    def __init__(self, num_partitions: int) -> None:
        self._open: list[list[int]] = [[] for _ in range(num_partitions)]
        self._num_done = [0] * num_partitions

    def grow(self, num_partitions: int) -> None:
        """From now on there are so many partitions; fewer change nothing."""
        self._open.extend([] for _ in range(num_partitions - len(self._open)))
        self._num_done.extend([0] * (num_partitions - len(self._num_done)))

    def written(self, partition: int, offset: int) -> int:
        """Note a request; returns its ordinal within the partition. Offsets of a partition come in ascending order."""
        self._open[partition].append(offset)
        return self._num_done[partition] + len(self._open[partition]) - 1

    def finish_below(self, partition: int, committed: int) -> int:
        """Requests below the offset `committed` are done. Returns how many of the partition are done so far."""
        still_open = self._open[partition]
        num_done = bisect_left(still_open, committed)
        if num_done:
            del still_open[:num_done]
            self._num_done[partition] += num_done
        return self._num_done[partition]

    def num_written(self, partition: int) -> int:
        """Requests ever noted in `partition`."""
        return self._num_done[partition] + len(self._open[partition])


class Moment(NamedTuple):
    """A moment of the monotonic clock of one of the learner's sessions."""

    session: str
    clock_s: float


@dataclass(slots=True, eq=False)
class _Asked:
    """The newest request of a seq. `done_at`: the time of the learner's newest progress when the request was first seen committed."""

    seq: int
    partition: int
    asked_s: float
    resends: int
    is_ours: bool
    is_done: bool = False
    done_at: Moment | None = None


class Lost(NamedTuple):
    """A seq whose request was lost, and how often it was issued again before."""

    seq: int
    resends: int
    why: str


class OpenSeqs:
    """The issued seqs from the learner's floor on, by its newest progress: which are seen, and how many undecided."""

    def __init__(self) -> None:
        self._issued: set[int] = set()
        self._progress: Progress | None = None
        self._closed: frozenset[int] = frozenset()
        self.seen: frozenset[int] = frozenset()
        """The seqs, not below the floor, of which the learner has seen a record, or that it has decided."""
        self._num_closed = self._num_only_seen = 0

    def issued(self, seq: int) -> None:
        """`seq` is in the log, written by this allocator or an earlier one."""
        if seq in self._issued or (self._progress is not None and seq < self._progress.next_seq):
            return
        self._issued.add(seq)
        self._num_closed += seq in self._closed
        self._num_only_seen -= seq in self.seen and seq not in self._closed

    def hear(self, progress: Progress) -> None:
        """Take over the learner's newest progress."""
        if progress is self._progress:
            return
        self._progress = progress
        self._issued = {seq for seq in self._issued if seq >= progress.next_seq}
        self._closed = frozenset(seqs_of(progress.next_seq, progress.closed or b""))
        self.seen = frozenset(seqs_of(progress.next_seq, progress.seen or b"")) | self._closed
        self._num_closed = len(self._closed & self._issued)
        self._num_only_seen = len(self.seen - self._closed - self._issued)

    @property
    def undecided(self) -> int:
        """Seqs that are in the log and are neither trained nor dropped."""
        progress = self._progress
        if progress is not None and progress.closed is None:
            # A learner of an older release tells how many seqs it has decided, but not which.
            return max(0, len(self._issued) - max(0, progress.groups_trained + progress.groups_dropped - progress.next_seq))
        return len(self._issued) - self._num_closed + self._num_only_seen

    def is_answered(self, seq: int) -> bool:
        """Whether the learner has decided `seq`, or seen a record of it."""
        return seq in self.seen or (self._progress is not None and seq < self._progress.next_seq)

    def is_missed(self, seq: int) -> bool:
        """Whether `seq` was issued, and the learner has neither decided it nor seen a record of it."""
        return seq in self._issued and seq not in self.seen


class OpenRequests:
    """The newest request of each open seq, and which of them are lost.

    A request is lost if a worker has committed it and the learner, which has read on since, has seen no record of it; or if no living
    worker holds it. A request that waits, is generated, or whose group waits for rewards or for its batch is not lost, however long.
    """

    def __init__(self, seqs: OpenSeqs) -> None:
        self._seqs = seqs
        self._asked: dict[int, _Asked] = {}
        self._waiting: dict[int, deque[tuple[int, _Asked]]] = {}
        self._progress: Progress | None = None

    def issued(self, seq: int, partition: int, ordinal: int, now_s: float, *, resends: int = 0, is_ours: bool = True) -> None:
        """A request for `seq` is number `ordinal` of `partition`. `is_ours`: written now, and not found in the log."""
        asked = _Asked(seq, partition, now_s, resends, is_ours)
        self._waiting.setdefault(partition, deque()).append((ordinal, asked))
        self._asked[seq] = asked
        self._seqs.issued(seq)

    def finished(self, partition: int, num_done: int, now_s: float) -> list[float]:
        """The first `num_done` requests of `partition` are committed. Returns the seconds that our requests among the new ones took."""
        waiting, took_s = self._waiting.get(partition), []
        while waiting and waiting[0][0] < num_done:
            asked = waiting.popleft()[1]
            asked.is_done, asked.done_at = True, self._moment()
            if asked.is_ours:
                took_s.append(now_s - asked.asked_s)
        return took_s

    def hear(self, progress: Progress) -> None:
        """Take over the learner's newest progress."""
        self._seqs.hear(progress)
        self._progress = progress

    def lost(self, now_s: float, patience_s: float | None, active_s: Mapping[int, float], *, alone: bool = False) -> list[Lost]:
        """The open seqs whose newest request is lost, in the order of their issue.

        `patience_s`: how long a request may take, None while nothing was measured. `active_s`: when the living worker that holds a
        partition last finished something. `alone`: there is only one worker, so no other could do the requests that it holds.
        """
        progress = self._progress
        if progress is not None:
            self._asked = {seq: asked for seq, asked in self._asked.items() if seq >= progress.next_seq}
        found = []
        for asked in self._asked.values():
            if not self._seqs.is_missed(asked.seq):
                continue
            if asked.is_done:
                why = "a worker has committed it, and no record of it came" if self._is_read_past(asked) else None
            elif patience_s is None or not active_s or now_s - asked.asked_s <= patience_s:
                why = None
            elif asked.partition not in active_s:
                why = "no living worker holds it"
            else:
                idle_s = now_s - max(asked.asked_s, active_s[asked.partition])
                why = f"the worker that holds it has finished nothing for {idle_s:.0f} s" if idle_s > patience_s and not alone else None
            if why is not None:
                found.append(Lost(asked.seq, asked.resends, why))
        return found

    def _moment(self) -> Moment | None:
        progress = self._progress
        return None if progress is None or progress.clock_s is None else Moment(progress.session, progress.clock_s)

    def _is_read_past(self, asked: _Asked) -> bool:
        """Whether the learner has read everything that was in the log when the request was seen committed."""
        progress = self._progress
        if asked.done_at is None or progress is None or asked.done_at.session != progress.session:
            # Another session of the learner has another clock.
            asked.done_at = self._moment()
            return False
        return progress.read_s is not None and progress.read_s >= asked.done_at.clock_s + _READ_BEHIND_S
