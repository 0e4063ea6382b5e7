"""Where a run's time goes: for each place of the pipeline, seconds busy, empty (no input) and blocked (its output is full).

    request ─▶ generation ─▶ publish ─▶ reward ─▶ assembly ─▶ queue ─▶ batch ─▶ train ─▶ publish_weights ─▶ install ─▶ generation

Each process counts its own places; `echo_core.bottleneck` finds the place that limits the run. Any thread may add.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter

from echo_bus.clock import Clock
from echo_core.bottleneck import Place, Use


class PlaceTimes:
    """The counter `echo_place_seconds_total{place, use}` of one process."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._clock = clock
        counter = Counter(
            "echo_place_seconds", "Seconds at each place of the pipeline: busy, empty or blocked.", ["place", "use"], registry=registry
        )
        self._cells = {(place, use): counter.labels(place.value, use.value) for place in Place for use in Use}

    def add(self, place: Place, use: Use, seconds: float) -> None:
        """Add `seconds`; negative ones (a clock that jumped) count as 0."""
        self._cells[place, use].inc(max(0.0, seconds))

    @contextmanager
    def spent(self, place: Place, use: Use = Use.BUSY) -> Iterator[None]:
        """Count the time inside the block, however it ends."""
        started_s = self._clock.monotonic_s()
        try:
            yield
        finally:
            self.add(place, use, self._clock.monotonic_s() - started_s)
