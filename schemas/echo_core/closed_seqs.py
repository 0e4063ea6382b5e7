"""Which seqs are settled for ever: a floor below which all are, and the closed ones above it."""

from __future__ import annotations

from collections.abc import Iterable


class ClosedSeqs:
    """A set of seqs that only grows. Its memory is the number of closed seqs above the oldest open one."""

    __slots__ = ("_above", "_floor")

    def __init__(self, floor: int = 0, above: Iterable[int] = ()) -> None:
        self._floor = floor
        self._above = {seq for seq in above if seq >= floor}
        self._raise_floor()

    @property
    def floor(self) -> int:
        """Every seq below is closed."""
        return self._floor

    @property
    def above(self) -> frozenset[int]:
        """The closed seqs at or above the floor."""
        return frozenset(self._above)

    @property
    def num_closed(self) -> int:
        """How many are closed. While another thread closes one, it may be missing from the number."""
        return self._floor + len(self._above)

    def __contains__(self, seq: int) -> bool:
        return seq < self._floor or seq in self._above

    def close(self, seq: int) -> bool:
        """Close `seq`; False if it was closed before."""
        if seq in self:
            return False
        self._above.add(seq)
        self._raise_floor()
        return True

    def _raise_floor(self) -> None:
        while self._floor in self._above:
            self._above.remove(self._floor)
            self._floor += 1
