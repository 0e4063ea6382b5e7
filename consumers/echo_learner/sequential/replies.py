"""Reads the learner's partition of `replies`, from before its first request, so that no receipt is missed.

Threads: one thread of its own reads; `take` belongs to the learner's. If reading fails, the next `take` raises the cause.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from echo_bus.reading.reader import From, LogReader
from echo_bus.requests.request_reply import CORRELATION_ID
from echo_schemas.records import RolloutReply
from echo_schemas.topics import REPLIES

logger = logging.getLogger(__name__)

PARTITION = 0
"""The learner's; other requesters of a namespace use the others."""

# Receipts before the end that are read at the start, to have those of an earlier session's last requests.
_BACK = 2048
_READ_S = 0.1


class ReplyInbox:
    """Receipts in the order of the log. `start` it, and `close` it, which closes the reader."""

    def __init__(self, reader: LogReader, on_reply: Callable[[RolloutReply], None]) -> None:
        """`reader` reads only `replies`. `on_reply` gets each receipt on the reading thread and must be short; `take` returns it, too."""
        self._reader = reader
        self._on_reply = on_reply
        self._found: deque[tuple[str, RolloutReply]] = deque()
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replies", daemon=True)

    def start(self) -> None:
        """Start reading; requests may be sent after this. Raises TransportError."""
        place = (REPLIES.name, PARTITION)
        ends = self._reader.start()
        low = self._reader.positions[place]
        self._reader.start({place: max(low, ends[place] - _BACK)}, otherwise=From.END)
        self._thread.start()

    def take(self) -> list[tuple[str, RolloutReply]]:
        """Correlation ids with their receipts, since the last call. Raises the error that ended the reading."""
        if self._error is not None:
            raise self._error
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        self._reader.close()

    def _run(self) -> None:
        try:
            while not self._closed.is_set():
                for message in self._reader.read(timeout_s=_READ_S):
                    if message.partition == PARTITION and isinstance(message.record, RolloutReply):
                        correlation = message.headers.get(CORRELATION_ID, b"").decode(errors="replace") or message.record.correlation
                        self._found.append((correlation, message.record))
                        self._on_reply(message.record)
        except BaseException as exc:  # the edge of the thread: the learner's thread gets it
            logger.exception("Reading replies has failed")
            self._error = exc
