"""How much a worker may send or take per second: a token bucket, shared by all its connections."""

from __future__ import annotations

import asyncio
import math

# What may pass at once after a pause.
_BURST_S = 0.02
_PIECE_BYTES = 64 << 10


class Line:
    """`bytes_per_s`: infinite for no limit. On one loop."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    async def pass_on(self, num_bytes: int) -> None:
        """Until so many bytes may pass. Several callers take turns by pieces, so each gets its share."""
        if math.isinf(self._bytes_per_s):
            return
        loop = asyncio.get_running_loop()
        while num_bytes > 0:
            piece = min(num_bytes, _PIECE_BYTES)
            num_bytes -= piece
            now_s = loop.time()
            self._free_s = max(self._free_s, now_s - _BURST_S) + piece / self._bytes_per_s
            if self._free_s > now_s:
                await asyncio.sleep(self._free_s - now_s)
