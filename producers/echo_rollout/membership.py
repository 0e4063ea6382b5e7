"""A worker's place in the group that shares the requests. Its engine has a life of its own: it may be up while the worker takes nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from echo_bus.group.consumer import ConsumerLoop


class Membership:
    """Joins once, leaves once. On the asyncio loop; the consumer loop has a thread of its own."""

    def __init__(self, loop: ConsumerLoop, *, may_join: Callable[[], bool], on_error: Callable[[BaseException], None]) -> None:
        """`may_join`: whether requests may be taken by now; may wait a moment. `on_error` gets what ends the consumer loop early."""
        self._loop = loop
        self._may_join = may_join
        self._on_error = on_error
        self._is_over = False
        self._thread = threading.Thread(target=self._consume, name="requests", daemon=True)

    def join(self) -> None:
        """Take requests from now on. Whoever has joined already, or is leaving, stays as it is."""
        if self._thread.ident is None and not self._is_over:
            self._thread.start()

    def take_no_more(self) -> None:
        """What is in hand stays so."""
        self._is_over = True
        self._loop.stop()

    async def leave(self) -> None:
        """Commit what is done, hand back what is not, and leave the group."""
        self._loop.hand_back()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    def _consume(self) -> None:
        try:
            while not self._may_join():
                if self._is_over:
                    return
            self._loop.run()
        except BaseException as exc:  # the edge of the thread: `serve` raises it
            self._on_error(exc)
