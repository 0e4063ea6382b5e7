"""A worker's status on `workers`: alive, installed version, measured speed. Every `heartbeat_s`, and at once when something changes.

Threads: one of its own repeats; any thread may call `change`, `has`, `count` and `publish`.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterable
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

    Thread-safe: groups enter and leave on the asyncio loop; the heartbeat's thread reads.
    """

    def __init__(self, places: PlaceTimes, clock: Clock) -> None:
        self._places = places
        self._clock = clock
        self._lock = threading.Lock()
        self._since_s = clock.monotonic_s()
        self._generating = self._publishing = 0
        self._busy_s = 0.0

    def move(self, *, generating: int = 0, publishing: int = 0) -> None:
        """Change the number of groups in the engine, and of those that are being published."""
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
    """Publishes WorkerStatus. `start` it; `close` publishes GONE. `generation` measures the speed that the status tells."""

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
        """`price`: what the worker costs an hour now; None: the price in `first`."""
        self.publisher = publisher
        self._status = first
        self.generation = generation
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
        """Publish the first status, and go on."""
        self.publish()
        self._thread.start()

    def count(self, *, samples: int, tokens: int, in_flight: int) -> None:
        """Add samples and tokens that were acknowledged; `in_flight`: groups in flight now."""
        with self._lock:
            is_first = not self._status.rollouts
            self._samples += samples
            self._tokens += tokens
            self._status = replace(self._status, in_flight=in_flight, rollouts=self._status.rollouts + samples)
        if is_first and samples:
            # The feeder gives few requests to a worker of unknown speed.
            self._wake.set()

    def has(self, partitions: Iterable[int]) -> None:
        """Set the worker's partitions of `requests`; the heartbeat's own thread publishes them at once."""
        with self._lock:
            self._status = replace(self._status, partitions=tuple(sorted(partitions)))
        self._wake.set()

    def change(self, **changes: object) -> None:
        """Change fields of the status, and publish it at once."""
        with self._lock:
            self._status = replace(self._status, **changes)  # type: ignore[arg-type]  # names are checked by `replace`
        self.publish()

    def publish(self) -> None:
        """Publish the status. Raises TransportError once for an earlier one that was lost."""
        busy_s = self.generation.busy_s()
        with self._lock:
            self._speed.add(busy_s=busy_s - self._seen_busy_s, samples=self._samples, tokens=self._tokens)
            self._seen_busy_s, self._samples, self._tokens = busy_s, 0, 0
            self._status = replace(
                self._status,
                rollouts_per_s=self._speed.samples_per_s,
                tokens_per_s=self._speed.tokens_per_s,
                busy_s=busy_s,
                price_per_hour=self._price(),
                time_ms=self._clock.time_ms(),
            )
            self._last = self.publisher.publish(WORKERS, self._status)

    def close(self) -> None:
        """Stop repeating, and publish that this worker is gone."""
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
                # Kafka does not answer at the moment; one waiting status is enough.
                continue
            try:
                self.publish()
            except TransportError as exc:
                # The next status holds all that this one would; a worker that cannot reach Kafka is found out by its trajectories.
                logger.warning("A heartbeat was lost: %s", exc)


def first_status(*, run_id: str, worker_id: str, engine: str, price_per_hour: float, kind: str = "", capacity: int = 0) -> WorkerStatus:
    """A worker's status before its engine is up. `capacity`: groups that it takes in hand at most."""
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
