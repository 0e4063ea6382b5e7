"""Which offset of a partition may be committed: the first one whose work is not done.

One tracker per assigned partition. The loop's worker thread calls `advance` and `hold`, in offset order. The thread that finished the work
calls `release`. The poll thread calls `committable` and `close`. No call blocks for longer than a few instructions.

    offsets   3   4   5   6   7   8          9 = position (next to be offered)
    state     ✓   ✓   …   ✓   …   ✓          … = held
    commit           ▲5: everything below is done
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable


class OffsetTracker:
    """The contiguous watermark of one partition.

    Offsets may have gaps (compaction, transaction markers). Memory is one integer per offset held since the oldest one that is not done;
    the loop's limit on messages in flight bounds it.
    """

    __slots__ = ("_lock", "_on_release", "_open", "_order", "position")

    def __init__(self, on_release: Callable[[], None] | None = None) -> None:
        self.position: int | None = None
        """The offset after the last one offered; None before the first. Written by the worker thread alone."""
        self._order: deque[int] = deque()
        self._open: set[int] = set()
        self._lock = threading.Lock()
        self._on_release = on_release

    def advance(self, offset: int) -> None:
        """`offset` was offered and is done. Takes no lock: it stores one int, and `committable` reads the held offsets first."""
        self.position = offset + 1

    def hold(self, offset: int) -> None:
        """`offset` was offered and is done when `release(offset)` is called.

        Raises ValueError if it is not above all offsets offered before.
        """
        with self._lock:
            if self.position is not None and offset < self.position:
                raise ValueError(f"Offset {offset} was offered after position {self.position}; offsets only grow.")
            self._order.append(offset)
            self._open.add(offset)
            self.position = offset + 1

    def release(self, offset: int) -> None:
        """The work of a held offset is done. Releasing twice, or an offset that is not held, changes nothing."""
        with self._lock:
            if offset not in self._open:
                return
            self._open.discard(offset)
            while self._order and self._order[0] not in self._open:
                self._order.popleft()
        if self._on_release is not None:
            self._on_release()

    def close(self) -> int:
        """The partition was taken away: later releases change nothing. Returns how many offsets were still held."""
        with self._lock:
            num_held = len(self._open)
            self._open.clear()
            return num_held

    def committable(self) -> int | None:
        """The offset to commit, that of the next message to read after a restart; None while nothing was offered."""
        with self._lock:
            return self._order[0] if self._order else self.position

    @property
    def num_held(self) -> int:
        """Offsets whose work is not done."""
        with self._lock:
            return len(self._open)
