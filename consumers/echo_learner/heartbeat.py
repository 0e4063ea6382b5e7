"""`progress`: how far the learner is, at every change and at least once a second. A learner that says nothing is presumed dead.

Threads: any thread changes the state; one thread of its own repeats it. A failed delivery is raised by the learner's next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock
from echo_bus.errors import TransportError
from echo_schemas.records import Coordinates, MissingRewards, Progress
from echo_schemas.topics import PROGRESS

# Half of the second that is promised.
_EVERY_S = 0.5


class ProgressHeartbeat:
    """Publishes Progress. `start` it, and `close` it."""

    def __init__(
        self,
        publisher: Publisher,
        first: Progress,
        clock: Clock,
        *,
        closed_from: Callable[[int], bytes] = lambda base: b"",
        read: Callable[[int], Mapping[str, Any]] = lambda base: {},
    ) -> None:
        """`closed_from(next_seq)`: Progress.closed, called at each `update`, so that it matches the version. `read(next_seq)`: fields of
        Progress about the records read; called at each publication, from any thread.
        """
        self._closed_from = closed_from
        self._read = read
        self._publisher = publisher
        self._clock = clock
        self._lock = threading.RLock()
        self._state = first
        self._error: TransportError | None = None
        self._has_spoken = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._publish()
        self._thread.start()

    def update(self, **changes: Any) -> None:
        """Change fields of the state and publish it. For the learner's thread, between two steps.

        Raises the error of an earlier failed publication.
        """
        self._raise_error()
        closed = self._closed_from(changes.get("next_seq", self._state.next_seq))
        with self._lock:
            self._change({**changes, "closed": closed})
            self._publish()

    def published(self, version: int) -> None:
        """Note that a snapshot is in the log. For the publication thread, which may be ahead of the learner's `update`."""
        self._raise_error()
        with self._lock:
            self._change({"published": version})
            self._publish()

    def miss(self, rewards: Sequence[str], where: Sequence[Coordinates]) -> None:
        """Name the trajectories whose rewards are missing, so that they are scored again. Empty: none is missing any more."""
        self._raise_error()
        missing = MissingRewards(
            run_id=self._state.run_id,
            session=self._state.session,
            rewards=tuple(rewards),
            where=tuple(where),
            time_ms=self._clock.time_ms(),
        )
        self._publisher.publish(PROGRESS, missing)

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _change(self, changes: Mapping[str, Any]) -> None:
        """The lock is held. A published version is trained, so `version` is never below `published`."""
        changed = replace(self._state, **changes)
        self._state = replace(changed, version=max(changed.version, changed.published, self._state.version))

    def _publish(self) -> None:
        with self._lock:
            read, clock_s = self._read(self._state.next_seq), self._clock.monotonic_s()
            self._state = replace(self._state, **read, clock_s=clock_s, time_ms=self._clock.time_ms())
            self._publisher.publish(PROGRESS, self._state)
            self._has_spoken = True

    def _repeat(self) -> None:
        while not self._stop.wait(_EVERY_S):
            self._beat()

    def _beat(self) -> None:
        """Publish unless something was since the last call: every process of the run reads each record."""
        has_spoken, self._has_spoken = self._has_spoken, False
        if has_spoken:
            return
        try:
            self._publish()
        except TransportError as exc:
            self._error = exc
        self._has_spoken = False
