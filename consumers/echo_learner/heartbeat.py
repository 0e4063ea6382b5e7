"""`progress`: how far the learner is, at every change and at least once a second, so that silence means trouble.

Threads: any thread changes the state; one thread of its own repeats it. A failed delivery ends up at the learner's next `update`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from echo_bus.clock import Clock
from echo_bus.errors import TransportError
from echo_bus.publisher import Publisher
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS

_EVERY_S = 0.5


class Heartbeat:
    """Publishes Progress. `start` it; `close` it, which publishes the last state once more."""

    def __init__(self, publisher: Publisher, first: Progress, clock: Clock) -> None:
        self._publisher = publisher
        self._clock = clock
        self._lock = threading.Lock()
        self._state = first
        self._error: TransportError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Publish the first state and go on."""
        self._publish()
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields of the state and publish it. Raises the error of an earlier failed publication."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        with self._lock:
            self._state = replace(self._state, **changes)
        self._publish()

    def published(self, version: int) -> None:
        """A snapshot is in the log. For the publication thread, which may be ahead of the learner's own `update`."""
        self.update(published=version, version=max(version, self._state.version))

    def close(self) -> None:
        """Stop repeating."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _publish(self) -> None:
        with self._lock:
            self._state = replace(self._state, time_ms=self._clock.time_ms())
            self._publisher.publish(PROGRESS, self._state)

    def _repeat(self) -> None:
        while not self._stop.wait(_EVERY_S):
            try:
                self._publish()
            except TransportError as exc:
                self._error = exc
