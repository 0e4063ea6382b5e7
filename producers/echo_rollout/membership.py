"""A worker's membership in the consumer group of `requests`. The engine does not depend on it: it may run while the worker is no member.

    out ──join──▶ takes requests ──take_no_more──▶ keeps partitions and what is in hand ──leave──▶ out ──join──▶ …

A consumer loop serves from one `join` to the next `leave`; each has a thread and a client of its own. The methods are for the asyncio loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from echo_bus.group.consumer import ConsumerLoop


class Membership:
    """Joins and leaves, as often as needed."""

    def __init__(
        self, open_loop: Callable[[], ConsumerLoop], *, may_join: Callable[[], bool], on_error: Callable[[BaseException], None]
    ) -> None:
        """`may_join`: whether requests may be taken by now; may wait a moment. `on_error` gets the error that ends a loop early."""
        self._open_loop = open_loop
        self._may_join = may_join
        self._on_error = on_error
        self._loop_thread: _LoopThread | None = None
        self.takes = False
        """Whether requests are taken, or will be once the group has given partitions. From any thread."""

    @property
    def is_in(self) -> bool:
        """Whether there is something to `leave`."""
        return self._loop_thread is not None

    def join(self) -> None:
        """Take requests from now on. Does nothing for a member, or while it leaves."""
        if self._loop_thread is None:
            self.takes = True
            self._loop_thread = _LoopThread(self._open_loop(), self._may_join, self._on_error)

    def take_no_more(self) -> None:
        """Put off requests that are offered. Requests in hand stay and are committed as they end; the partitions are kept meanwhile."""
        self.takes = False

    async def leave(self) -> None:
        """Commit requests that are done, hand back the others, and leave the group. May be called again after it was cancelled."""
        self.takes = False
        if self._loop_thread is not None:
            await self._loop_thread.end()
            self._loop_thread = None

    def commit_soon(self) -> None:
        """See `ConsumerLoop.commit_soon`. From any thread."""
        if (thread := self._loop_thread) is not None:
            thread.loop.commit_soon()

    def offer_again(self) -> None:
        """See `ConsumerLoop.offer_again`. From any thread."""
        if (thread := self._loop_thread) is not None:
            thread.loop.offer_again()


class _LoopThread:
    """From joining to leaving."""

    def __init__(self, loop: ConsumerLoop, may_join: Callable[[], bool], on_error: Callable[[BaseException], None]) -> None:
        self.loop = loop
        self._may_join = may_join
        self._on_error = on_error
        self._is_over = False
        self._thread = threading.Thread(target=self._consume, name="requests", daemon=True)
        self._thread.start()

    async def end(self) -> None:
        """Returns when the group has no member of this loop any more."""
        self._is_over = True
        self.loop.stop()
        self.loop.hand_back()
        await asyncio.to_thread(self._thread.join)

    def _consume(self) -> None:
        try:
            while not self._may_join():
                if self._is_over:
                    return
            self.loop.run()
        except BaseException as exc:  # the edge of the thread: `serve` raises it
            self._on_error(exc)
