"""Limits the bytes that a worker sends or receives per second: a token bucket, shared by all its connections."""

from __future__ import annotations

import asyncio
import math
import threading
import time

# Bytes of so many seconds may pass at once after a pause.
_BURST_S = 0.02
_PIECE_BYTES = 64 << 10


class Line:
    """`bytes_per_s`: infinite for no limit. Thread-safe."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.piece_bytes = 1 << 30 if math.isinf(bytes_per_s) else _PIECE_BYTES
        """Most bytes to pass at once: connections that share a limited line take turns by pieces."""

    def reserve(self, num_bytes: int) -> float:
        """Count `num_bytes`; returns the seconds until they may pass."""
        if math.isinf(self._bytes_per_s):
            return 0.0
        with self._lock:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s
            return max(0.0, self._free_s - now_s)

    async def pass_on(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may pass."""
        if wait_s := self.reserve(num_bytes):
            await asyncio.sleep(wait_s)
