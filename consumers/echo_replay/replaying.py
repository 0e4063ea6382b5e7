"""Replays trajectories of the past at a pace: as fast as possible, so many a second, or with their original gaps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from echo_bus.clock import Clock
from echo_replay.history import Told
from echo_replay.sinks import Sink

Sleep = Callable[[float], None]


def at_rate(told: Iterable[Told], rate: float, clock: Clock, sleep: Sleep = time.sleep) -> Iterator[Told]:
    """At most `rate` a second. After a pause of the source there is no burst."""
    due_s = clock.monotonic_s()
    for each in told:
        now_s = clock.monotonic_s()
        if due_s > now_s:
            sleep(due_s - now_s)
        due_s = max(due_s, now_s) + 1.0 / rate
        yield each


def at_original_pace(told: Iterable[Told], clock: Clock, sleep: Sleep = time.sleep) -> Iterator[Told]:
    """Each at its original distance in time from the first one. `told` is in the order of time."""
    begun_s = clock.monotonic_s()
    first_ms: int | None = None
    for each in told:
        first_ms = each.time_ms if first_ms is None else first_ms
        early_s = (each.time_ms - first_ms) / 1000 - (clock.monotonic_s() - begun_s)
        if early_s > 0:
            sleep(early_s)
        yield each


def replay(told: Iterable[Told], sink: Sink) -> int:
    """Write all; return how many. After any failure, an interrupt included, the sink abandons what is half-written. Raises as the sink."""
    count = 0
    try:
        for each in told:
            sink.write(each)
            count += 1
    except BaseException:  # see above
        sink.abandon()
        raise
    sink.finish()
    return count
