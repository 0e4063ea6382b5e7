"""The cost of keeping track of a thousand workers: the feeder's ledger and choice of partitions, the roster, views, the screen.

    python bench/fleet.py [--workers 1000] [--partitions 256] [--requests 1000000] [--json FILE]

Each piece gets the input of a run of this size and runs alone, with the Kafka in memory. It runs at a quarter of the size and at the full
size. `growth`: the power with which its CPU seconds grow; 1 is linear, above 1.5 it is marked. `unit_us`: CPU time of a unit of work.
`mib`: memory that the piece holds at the full size, as Python counts it.
"""

from __future__ import annotations

import gc
import io
import math
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from command import parser_of, save
from confluent_kafka.admin import NewTopic
from rich.console import Console

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import SystemClock
from echo_bus.metrics import BusMetrics
from echo_bus.requests.dispatch import LeastLagChooser, PartitionOwner, PartitionWork
from echo_bus.requests.roster import Roster
from echo_memory import MemoryCluster
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_rollout.open_seqs import Ledger
from echo_schemas.naming import Namespace
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS

RUN = "bench"
GROUP_SIZE = 8
# Heartbeats of each worker: those of a minute, in the quick pieces.
_BEATS = 60
_VIEW_BEATS = 5
_DRAWS = 4
_LOOKS = 100
_BATCH = 64
_SMALLER = 4
# 1 is linear, 2 quadratic; a busy machine and a full cache add some tenths.
_WORSE = 1.5
_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the fleet."""

    workers: int
    partitions: int
    requests: int

    def quarter(self) -> Size:
        """The same fleet, smaller."""
        return Size(max(1, self.workers // _SMALLER), max(1, self.partitions // _SMALLER), max(1, self.requests // _SMALLER))


Prepared = tuple[Callable[[], Any], int]
"""The measured function and its units of work. The function returns the objects that it holds."""


def word(number: int, size: Size, second: float = 0.0) -> WorkerStatus:
    """The heartbeat of worker `number`."""
    return WorkerStatus(
        run_id=RUN,
        worker_id=f"host-{number}-4711",
        host=f"host-{number}",
        engine="vllm",
        state=WorkerState.READY,
        installed_version=int(second) // 20,
        weights_sha256="0" * 64,
        rollouts=int(second * 8),
        rollouts_per_s=8.0 + number % 5,
        busy_s=second * 0.9,
        partitions=tuple(range(number % size.partitions, size.partitions, size.workers)) or (),
        capacity=16,
        time_ms=int(second * 1000),
    )


def ledger(size: Size) -> Prepared:
    """A day's requests: written, and finished a window later."""

    def run() -> Ledger:
        made = Ledger(size.partitions)
        for number in range(size.requests):
            partition, offset = number % size.partitions, number // size.partitions
            made.written(partition, offset)
            if not number % _BATCH:
                made.finish_below(partition, offset - _BATCH)
        return made

    return run, size.requests


def backlog(size: Size) -> Prepared:
    """Requests, first without any finished, then all finished one after another."""

    def run() -> Ledger:
        made = Ledger(size.partitions)
        for number in range(size.requests):
            made.written(number % size.partitions, number // size.partitions)
        each = -(-size.requests // size.partitions)
        for offset in range(0, each, max(1, each // 200)):
            for partition in range(size.partitions):
                made.finish_below(partition, offset)
        return made

    return run, size.requests


def dispatch(size: Size) -> Prepared:
    """A partition for every request of some steps, in `_LOOKS` looks at shares and committed offsets: the feeder looks at most every 20 ms,
    for any number of workers."""
    owners = [
        PartitionOwner(partitions=frozenset(status.partitions), groups_per_s=status.rollouts_per_s / GROUP_SIZE, capacity=16)
        for status in (word(number, size) for number in range(size.workers))
        if status.partitions
    ]
    count = 8 * size.workers

    def run() -> LeastLagChooser:
        chooser = LeastLagChooser(size.partitions, depth=4)
        ends = [0] * size.partitions
        for look in range(_LOOKS):
            chooser.share(owners, horizon_s=60.0)
            chooser.observe({partition: PartitionWork(first_open=max(0, end - 1), end=end) for partition, end in enumerate(ends)})
            for _ in range(count * look // _LOOKS, count * (look + 1) // _LOOKS):
                partition = chooser.choose()
                if partition is not None:
                    chooser.acknowledged(partition, ends[partition])
                    ends[partition] += 1
        return chooser

    return run, count


def roster(size: Size) -> Prepared:
    """All workers' heartbeats of a minute, and the shares once a second."""
    words = [word(number, size) for number in range(size.workers)]

    def run() -> Roster:
        made = Roster(heartbeat_s=1.0, group_size=GROUP_SIZE)
        for beat in range(_BEATS):
            for status in words:
                made.heard(status, float(beat))
            made.shares(float(beat))
        return made

    return run, _BEATS * size.workers


def view(size: Size) -> Prepared:
    """All workers' heartbeats through the log into a view, decoding included."""
    cluster = MemoryCluster()
    space, metrics, clock = Namespace("bench"), BusMetrics(), SystemClock()
    bus = Bus(cluster=cluster, namespace=space, metrics=metrics, clock=clock, role="view", run_id=RUN)
    for future in cluster.admin().create_topics([NewTopic(bus.namespace.topic(WORKERS), 1, 1)]).values():
        future.result(_WAIT_S)
    publisher = bus.publisher(profiles.PRODUCER_THROUGHPUT)
    for beat in range(_VIEW_BEATS):
        for number in range(size.workers):
            publisher.publish(WORKERS, word(number, size, float(beat)))
    publisher.close()
    return lambda: bus.newest(WORKERS, WorkerStatus, _WAIT_S), _VIEW_BEATS * size.workers


def pool(size: Size) -> Prepared:
    """All workers' heartbeats of a minute into the model of the screen."""
    words = [word(number, size) for number in range(size.workers)]

    def run() -> RunView:
        made = RunView(RUN, started_ms=0, steps_wanted=0, budget=3)
        for beat in range(_BEATS):
            for status in words:
                made.apply(replace(status, time_ms=1000 * beat, busy_s=0.9 * beat, installed_version=beat // 20))
        return made

    return run, _BEATS * size.workers


def screen(size: Size) -> Prepared:
    """The screen, drawn a few times."""
    made, _ = pool(size)
    model = made()
    console = Console(file=io.StringIO(), width=160, height=50, force_terminal=True)

    def run() -> Console:
        for _ in range(_DRAWS):
            console.print(render(model, 60.0, 160, 50, "logs", []))
        return console

    return run, _DRAWS * size.workers


PIECES: tuple[Callable[[Size], Prepared], ...] = (ledger, backlog, dispatch, roster, view, pool, screen)


def cpu_s(prepared: Prepared) -> float:
    """CPU seconds of one run of the piece."""
    run, _ = prepared
    gc.collect()
    started_s = time.process_time()
    run()
    return time.process_time() - started_s


def held_mib(prepared: Prepared) -> float:
    """Memory that one run of the piece has allocated and still holds."""
    run, _ = prepared
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = run()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        del kept
        return (after - before) / (1 << 20)
    finally:
        tracemalloc.stop()


def measure(size: Size) -> dict[str, dict[str, float]]:
    """Measure every piece at a quarter of the size and at the full size."""
    found: dict[str, dict[str, float]] = {}
    for piece in PIECES:
        small_s, whole = cpu_s(piece(size.quarter())), piece(size)
        whole_s = cpu_s(whole)
        found[piece.__name__] = {
            "cpu_s": round(whole_s, 3),
            "unit_us": round(1e6 * whole_s / whole[1], 2),
            "growth": round(math.log(whole_s / max(small_s, 1e-6)) / math.log(_SMALLER), 2),
            "mib": round(held_mib(whole), 1),
        }
        show(piece.__name__, found[piece.__name__])
    return found


def show(name: str, figures: Mapping[str, float]) -> None:
    """One line."""
    mark = "  grows faster than the fleet" if figures["growth"] > _WORSE else ""
    sys.stdout.write(f"{name:10}" + "".join(f"{key} {value:<12g}" for key, value in figures.items()) + mark + "\n")
    sys.stdout.flush()


def main() -> int:
    """Measure, print, and exit 1 if a piece grows faster than the fleet."""
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--partitions", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1_000_000)
    options = parser.parse_args()
    size = Size(options.workers, options.partitions, options.requests)
    found = measure(size)
    conditions = {"workers": size.workers, "partitions": size.partitions, "requests": size.requests, "cores": os.cpu_count()}
    save(options.json, {**found, "conditions": conditions})
    return int(any(figures["growth"] > _WORSE for figures in found.values()))


if __name__ == "__main__":
    sys.exit(main())
