"""A worker's word on `workers`: alive, installed version, measured speed. Every `heartbeat_s`, and at once when something changes.

Threads: one of its own repeats; any thread may call `change`, `has`, `count` and `publish`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.clock import Clock
from echo_bus.errors import TransportError
from echo_core.bottleneck import Place, Use
from echo_core.capacity.estimates import Speed
from echo_runtime.places import PlaceTimes
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS

logger = logging.getLogger(__name__)


class GenerationTime:
    """Counts the time of Place.GENERATION: busy with a group in the engine, blocked while publishing holds all groups, else empty.

    Thread-safe: groups enter and leave on the asyncio loop and on the publisher's thread, the heartbeat looks in between.
    """

    def __init__(self, places: PlaceTimes, clock: Clock) -> None:
        self._places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = clock.monotonic_s()
        self._generating = self._publishing = 0
        self._busy_s = 0.0

    def move(self, *, generating: int = 0, publishing: int = 0) -> None:
        """So many groups more (or fewer, if negative) are with the engine, and on their way into the log."""
        with self._lock:
            self._settle()
            self._generating += generating
            self._publishing += publishing

    def busy_s(self) -> float:
        """Seconds with at least one group in the engine."""
        with self._lock:
            self._settle()
            return self._busy_s

    def _settle(self) -> None:
        now_s = self._clock.monotonic_s()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        use = Use.BUSY if self._generating else Use.BLOCKED if self._publishing else Use.EMPTY
        if use is Use.BUSY:
            self._busy_s += elapsed_s
        self._places.add(Place.GENERATION, use, elapsed_s)


class WorkerHeartbeat:
    """Publishes WorkerStatus. `start` it; `close` says GONE."""

    def __init__(
        self,
        publisher: Publisher,
        first: WorkerStatus,
        generation: GenerationTime,
        clock: Clock,
        *,
        every_s: float,
        price: Callable[[], float] | None = None,
    ) -> None:
        """`price`: what the worker costs an hour now; None: what `first` says."""
        self._publisher = publisher
        self._status = first
        self._generation = generation
        self._clock = clock
        self._every_s = every_s
        self._price: Callable[[], float] = price or (lambda: first.price_per_hour)
        self._lock = threading.Lock()
        self._speed = Speed()
        self._samples = self._tokens = 0
        self._seen_busy_s = 0.0
        self._stop = False
        self._last: Receipt | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Say the first state and go on."""
        self.publish()
        self._thread.start()

    def count(self, *, samples: int, tokens: int, in_flight: int) -> None:
        """Samples and tokens that were acknowledged since; groups in flight now."""
        with self._lock:
            is_first = not self._status.rollouts
            self._samples += samples
            self._tokens += tokens
            self._status = _changed(self._status, in_flight=in_flight, rollouts=self._status.rollouts + samples)
        if is_first and samples:
            # Whoever hands out work gives little to a worker of which nothing is known.
            self._wake.set()

    def has(self, partitions: Iterable[int]) -> None:
        """These are the worker's partitions of `requests` from now on; said at once, by the heartbeat's own thread."""
        with self._lock:
            self._status = _changed(self._status, partitions=tuple(sorted(partitions)))
        self._wake.set()

    def change(
        self,
        *,
        state: WorkerState | None = None,
        installed: tuple[int, str] | None = None,
        capabilities: Mapping[str, str] | None = None,
        peer_address: str | None = None,
    ) -> None:
        """Change what is said, and say it at once. `installed`: version and SHA-256, which acknowledges them."""
        with self._lock:
            changes: dict[str, object] = {}
            if state is not None:
                changes["state"] = state
            if installed is not None:
                changes["installed_version"], changes["weights_sha256"] = installed
            if capabilities is not None:
                changes["capabilities"] = dict(capabilities)
            if peer_address is not None:
                changes["peer_address"] = peer_address
            self._status = _changed(self._status, **changes)
        self.publish()

    def publish(self) -> None:
        """Say where things stand. Raises TransportError once for an earlier word that was lost."""
        busy_s = self._generation.busy_s()
        with self._lock:
            self._speed.add(busy_s=busy_s - self._seen_busy_s, samples=self._samples, tokens=self._tokens)
            self._seen_busy_s, self._samples, self._tokens = busy_s, 0, 0
            self._status = _changed(
                self._status,
                rollouts_per_s=self._speed.samples_per_s,
                tokens_per_s=self._speed.tokens_per_s,
                busy_s=busy_s,
                price_per_hour=self._price(),
                time_ms=self._clock.time_ms(),
            )
            self._last = self._publisher.publish(WORKERS, self._status)

    def close(self) -> None:
        """Stop repeating, and say that this worker is gone."""
        self._stop = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self.change(state=WorkerState.GONE)

    def _repeat(self) -> None:
        while True:
            self._wake.wait(self._every_s)
            self._wake.clear()
            if self._stop:
                return
            if self._last is not None and not self._last.done:
                # Nobody hears us at the moment; one word that waits is enough.
                continue
            try:
                self.publish()
            except TransportError as exc:
                # The next word says all that this one would have; a worker that cannot publish trajectories ends by those.
                logger.warning("A heartbeat was lost: %s", exc)


def _changed(status: WorkerStatus, **changes: object) -> WorkerStatus:
    return replace(status, **changes)  # type: ignore[arg-type]  # names are checked by `replace`


def first_status(*, run_id: str, worker_id: str, engine: str, price_per_hour: float, kind: str = "", capacity: int = 0) -> WorkerStatus:
    """What a worker says before its engine is up. `capacity`: groups that it takes in hand at most."""
    return WorkerStatus(
        run_id=run_id,
        worker_id=worker_id,
        host=socket.gethostname(),
        engine=engine,
        state=WorkerState.STARTING,
        price_per_hour=price_per_hour,
        kind=kind,
        capacity=capacity,
        time_ms=0,
    )
