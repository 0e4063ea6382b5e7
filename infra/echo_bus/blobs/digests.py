"""SHA-256 on a thread beside the transfer: hashing releases the interpreter's lock, so it runs at the same time."""

from __future__ import annotations

import hashlib
import queue
import threading

# Pieces that may wait to be hashed: with chunks of 900 KB some fourteen megabytes, enough for a pause of the thread.
_AHEAD = 16


class StreamDigest:
    """The SHA-256 of a stream, on a thread of its own. One thread uses it; `update` blocks while hashing is far behind; `close` it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[bytes | memoryview | None] = queue.Queue(_AHEAD)
        self._digest = hashlib.sha256()
        self._noted: list[str] = []
        self._thread = threading.Thread(target=self._run, name="digest", daemon=True)
        self._thread.start()

    def update(self, data: bytes | memoryview) -> None:
        """Add `data`, which must not change afterwards. Empty data adds nothing."""
        if len(data):
            self._queue.put(data)

    def note(self) -> None:
        """Note the digest of all data so far; `noted` has it after `finish`."""
        self._queue.put(b"")

    def finish(self) -> str:
        """The digest of all data, in hexadecimal. Blocks until it is known."""
        self.close()
        return self._digest.hexdigest()

    @property
    def noted(self) -> list[str]:
        """One digest for each call of `note`; complete after `finish`."""
        return list(self._noted)

    def close(self) -> None:
        """Wait until all data is hashed, and end the thread. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (data := self._queue.get()) is not None:
            if len(data):
                self._digest.update(data)
            else:
                self._noted.append(self._digest.copy().hexdigest())


def sha256_of(data: bytes | memoryview) -> str:
    """The SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()
