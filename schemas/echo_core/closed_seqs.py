"""The closed seqs of a run: a floor below which all are closed, and the closed ones above it. Also the resume point of an allocator."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from dataclasses import dataclass

from echo_schemas.columns import MOST_SEQS

logger = logging.getLogger(__name__)

# No more seqs are missing between two seqs of a run: a seq further above the others was not issued by this run's allocator.
_MOST_MISSING = 10_000


class ClosedSeqs:
    """A set of seqs that only grows. Its memory is the number of closed seqs above the oldest open one."""

    __slots__ = ("_above", "floor")

    def __init__(self, floor: int = 0, above: Iterable[int] = ()) -> None:
        self.floor = floor
        """Every seq below is closed."""
        self._above = {seq for seq in above if seq >= floor}
        self._raise_floor()

    @property
    def above(self) -> frozenset[int]:
        """The closed seqs at or above the floor."""
        return frozenset(self._above)

    def from_seq(self, base: int) -> Iterable[int]:
        """The closed seqs at or above `base`, where `base` is not far below the floor; in no order."""
        yield from range(base, self.floor)
        yield from (seq for seq in self._above if seq >= base)

    @property
    def num_closed(self) -> int:
        """Number of closed seqs. A seq that another thread is closing may not be counted yet."""
        return self.floor + len(self._above)

    def __contains__(self, seq: int) -> bool:
        return seq < self.floor or seq in self._above

    def close(self, seq: int) -> bool:
        """Close `seq`; False if it was closed before."""
        if seq in self:
            return False
        self._above.add(seq)
        self._raise_floor()
        return True

    def _raise_floor(self) -> None:
        while self.floor in self._above:
            self._above.remove(self.floor)
            self.floor += 1


@dataclass(frozen=True, slots=True)
class Resume:
    """The resume point of an allocator: `missing` seqs were never written, or the log has lost them; `next_seq` was never issued."""

    missing: tuple[int, ...]
    next_seq: int


def plan_resume(floor: int, known: Set[int]) -> Resume:
    """Every seq from `floor` on is in `known`, or missing, or new; none is skipped. `floor`: every lower seq is trained or dropped.
    `known`: the training seqs that are in the log, or closed. A seq far above the others is ignored: this run did not issue it."""
    next_seq = floor
    missing: list[int] = []
    for seq in sorted(seq for seq in known if seq >= floor):
        if seq - next_seq > _MOST_MISSING or len(missing) > MOST_SEQS:
            logger.warning("The log names seq %d, and this run has issued none from %d on: it is ignored", seq, next_seq)
            break
        missing.extend(range(next_seq, seq))
        next_seq = seq + 1
    return Resume(missing=tuple(missing), next_seq=next_seq)
