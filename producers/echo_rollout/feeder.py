"""Which seqs to issue, and how much of what was issued is still open: the feeder's rules, without Kafka and without a clock.

    plan_resume   what `requests` shows of a run → the seqs to write again and the next new one
    Ledger        requests by partition → how many the workers have finished
    OpenSeqs      the oldest open seq, and whether it was lost on its way

Used from the feeder's thread alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Set
from dataclasses import dataclass

from echo_core.dispatch import Standing
from echo_schemas.records import Progress


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a feeder goes on: `missing` are written again first, in order; `next_seq` was never issued."""

    missing: tuple[int, ...]
    next_seq: int


def plan_resume(floor: int, shown: Set[int]) -> Resume:
    """Every seq from `floor` on is in `shown`, or written again, or new; none is skipped.

    `floor`: every seq below it is trained or dropped. `shown`: the training seqs that the log of requests still holds.
    """
    next_seq = max((seq for seq in shown if seq >= floor), default=floor - 1) + 1
    return Resume(missing=tuple(seq for seq in range(floor, next_seq) if seq not in shown), next_seq=next_seq)


def standing_of(progress: Progress | None, issued: int) -> Standing:
    """The learner's last word and our own count. Before its first word nothing is trained."""
    if progress is None:
        return Standing(version=0, published=0, issued=issued, trained=0, dropped=0)
    decided = progress.groups_trained + progress.groups_dropped
    return Standing(
        version=progress.version,
        published=progress.published,
        # A seq whose request retention has taken may be decided before we have counted it again.
        issued=max(issued, decided),
        trained=progress.groups_trained,
        dropped=progress.groups_dropped,
    )


class Ledger:
    """The offsets of a run's requests by partition. It turns offsets into counts of requests.

    Counts and not offsets, because the end marker of a transaction takes an offset that no worker ever finishes: lag by offsets would
    call a partition busy for ever.
    """

    def __init__(self, num_partitions: int) -> None:
        self._open: list[list[int]] = [[] for _ in range(num_partitions)]
        self._num_done = [0] * num_partitions

    def written(self, partition: int, offset: int) -> int:
        """Note a request; its ordinal within the partition. Offsets of a partition come in ascending order."""
        self._open[partition].append(offset)
        return self._num_done[partition] + len(self._open[partition]) - 1

    def finish_below(self, partition: int, committed: int) -> int:
        """Everything below the offset `committed` is done; the number of requests done in that partition so far."""
        still_open = self._open[partition]
        num_done = bisect_left(still_open, committed)
        if num_done:
            del still_open[:num_done]
            self._num_done[partition] += num_done
        return self._num_done[partition]

    def num_written(self, partition: int) -> int:
        """Requests ever noted in `partition`."""
        return self._num_done[partition] + len(self._open[partition])


class OpenSeqs:
    """The seqs that nobody has decided, with the time after which each counts as lost.

    A group that fails or expires at a worker leaves no trace that the learner could close, and its seq would hold the floor for ever. So
    the oldest open seq is issued again once its deadline has passed; the learner trains whichever attempt is complete first. If it is open
    still after another one, it may be complete and wait for others that are lost too: then all whose time is over are issued again. Not the
    first time, because those above the floor may long be decided, which only the learner knows.
    """

    def __init__(self) -> None:
        self._deadlines_ms: dict[int, int] = {}
        self._floor = 0
        self._last_lost: int | None = None

    def issued(self, seq: int, deadline_ms: int) -> None:
        """`seq` is on its way until `deadline_ms` at least."""
        if seq >= self._floor:
            self._deadlines_ms[seq] = deadline_ms

    def decided_below(self, floor: int) -> None:
        """Every seq below `floor` is trained or dropped."""
        for seq in range(self._floor, floor):
            self._deadlines_ms.pop(seq, None)
        self._floor = max(self._floor, floor)

    def lost(self, now_ms: int) -> tuple[int, ...]:
        """What is to be issued again now, and `issued` is then told of; see the class."""
        deadline_ms = self._deadlines_ms.get(self._floor)
        if deadline_ms is None or now_ms <= deadline_ms:
            return ()
        if self._last_lost != self._floor:
            self._last_lost = self._floor
            return (self._floor,)
        return tuple(seq for seq, overdue_ms in sorted(self._deadlines_ms.items()) if now_ms > overdue_ms)
