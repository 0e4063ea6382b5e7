"""The viewer with a large run on a real broker: the first page, any page, a query in SQL, and any page during an export.

    python bench/viewer.py [--trajectories N] [--json FILE]

The run is invented (`echo_ops.viewer.demo`): 1,024 samples of 60 tokens per step, 100 per second by their timestamps, two rewards. The
viewer is `echoswarm view` in its own process; a page is its JSON, from the request to the last byte. `open_s`: the time until the command
serves; it first reads the books of the whole run.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from command import parser_of, save

from echo_bus.client.cluster import Cluster
from echo_embedded import EmbeddedKafka
from echo_ops.supervisor.registration import make_topics
from echo_ops.viewer.demo.episodes import Episode, Words
from echo_ops.viewer.demo.made_run import MadePlan, MadeRun, StoryClock
from echo_runtime.opening import open_bus, open_cluster
from echo_settings import Settings

RUN, NAMESPACE = "large", "bench.viewer"
GROUPS, SIZE, STEP_S = 64, 16, 10.24
PAGES = 240
_WAIT_S = 900.0
_TEXT = "Count the red and the blue balls that are in the third box from the left and say how many of them would be left"
_ANSWER = "First there are three red ones and then two blue ones which makes five of them in all so the answer must be 5"


class Backdated:
    """A cluster whose producers give each record the clock's time as its timestamp."""

    def __init__(self, cluster: Cluster, clock: StoryClock) -> None:
        self._cluster, self._clock = cluster, clock

    def producer(self, config: Mapping[str, Any]) -> Any:
        """A producer with our timestamps."""
        return _BackdatedProducer(self._cluster.producer(config), self._clock)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)


class _BackdatedProducer:
    def __init__(self, producer: Any, clock: StoryClock) -> None:
        self._producer, self._clock = producer, clock

    def produce(self, *args: Any, **named: Any) -> None:
        self._producer.produce(*args, **{**named, "timestamp": self._clock.time_ms()})

    def __len__(self) -> int:
        return len(self._producer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


def play(seq: int, skill: float, rng: random.Random) -> Episode:
    """About sixty tokens, right with probability `skill`."""
    value = 1.0 if rng.random() < skill else 0.0
    answer = f"{_ANSWER} {rng.randrange(9)}"
    return Episode(entry="{}", prompt=f"{_TEXT} {seq % 97}", answers=(answer,), observations=("",), rewards=(value,))


def make(bootstrap: str, num_steps: int) -> None:
    """Write the run."""
    clock = StoryClock(time.time_ns() // 1_000_000 - int(1000 * STEP_S * num_steps) - 60_000)
    settings = Settings.model_validate({"run": {"name": RUN}, "kafka": {"bootstrap": bootstrap, "namespace": NAMESPACE}})
    bus = open_bus(settings, "operator")
    make_topics(open_cluster(settings), bus.namespace)
    plan = MadePlan(
        steps=(0, num_steps), groups_per_step=GROUPS, group_size=SIZE, step_s=STEP_S, skill_per_step=0.8 / num_steps, task="balls"
    )
    bus = replace(bus, cluster=Backdated(bus.cluster, clock), clock=clock, run_id=RUN)
    MadeRun(bus, clock, plan, play, Words()).write()


@dataclass(frozen=True, slots=True)
class Viewer:
    """`echoswarm view`, serving."""

    port: int
    open_s: float

    def ask(self, path: str, **query: Any) -> tuple[float, Any]:
        """The milliseconds and the answer."""
        began_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_WAIT_S)
        connection.request("GET", f"/api/{path}{'?' if query else ''}{urlencode(query)}")
        response = connection.getresponse()
        body = response.read()
        connection.close()
        elapsed_ms = 1000 * (time.perf_counter() - began_s)
        if response.status != 200:
            sys.exit(f"/api/{path} answered {response.status}: {body.decode()}")
        return elapsed_ms, json.loads(body)


def environment(bootstrap: str) -> dict[str, str]:
    """The commands' environment."""
    return {**os.environ, "ECHO_KAFKA__BOOTSTRAP": bootstrap, "ECHO_KAFKA__NAMESPACE": NAMESPACE, "ECHO_RUN__NAME": RUN, "COLUMNS": "200"}


@contextmanager
def serving(bootstrap: str) -> Iterator[Viewer]:
    """Run the viewer until the end of the block."""
    began_s = time.perf_counter()
    command = [sys.executable, "-u", "-m", "echo_ops.cli", "view"]
    with subprocess.Popen(command, env=environment(bootstrap), stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()) as process:
        assert process.stdout is not None, "it is a pipe"
        try:
            for line in process.stdout:
                if (match := re.search(r"127\.0\.0\.1:(\d+)", line)) is not None:
                    yield Viewer(int(match[1]), time.perf_counter() - began_s)
                    return
            sys.exit("the viewer ended before it began to serve")
        finally:
            process.terminate()


def pages(viewer: Viewer, num_steps: int, rng: random.Random) -> dict[str, list[float]]:
    """The milliseconds of pages, by kind."""
    found: dict[str, list[float]] = {}

    def ask(path: str, **query: Any) -> Any:
        elapsed_ms, page = viewer.ask(path, **query)
        found.setdefault(path.partition("/")[0], []).append(elapsed_ms)
        return page

    for number in range(PAGES // 12):
        version = rng.randrange(1, num_steps + 1)
        ask("overview")
        ask("metrics", name=rng.choice(["entropy", "loss", "reward: return"]))
        ask("steps", offset=rng.randrange(num_steps))
        step = ask(f"step/{version}", sort=rng.choice(["spread", "reward"]))
        group = ask(f"group/{step['groups'][rng.randrange(len(step['groups']))]['seq']}")
        sample = group["samples"][rng.randrange(len(group["samples"]))]
        assert sample["rewards"], "a page's sample has its rewards"
        for _ in range(2):
            ask(f"trajectory/{sample['partition']}:{sample['offset']}")
        ask("timeline", step=version)
        ask(f"lineage/{version}")
        ask("dropped", offset=50 * number)
        ask("pool")
        ask("rewards")
    return found


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def measure(bootstrap: str, num_steps: int, folder: Path) -> dict[str, Any]:
    """All figures."""
    rng = random.Random(7)
    with serving(bootstrap) as viewer:
        first_ms, overview = viewer.ask("overview")
        alone = pages(viewer, num_steps, rng)
        sql = [
            viewer.ask(
                "sql", question="select worker_id, avg(reward_return) from trajectories group by 1", step=rng.randrange(1, num_steps)
            )[0]
            for _ in range(5)
        ]
        command = [sys.executable, "-m", "echo_ops.cli", "export", "--to", str(folder / "export")]
        exporting = subprocess.Popen(command, env=environment(bootstrap), stdout=subprocess.DEVNULL, cwd=folder)
        beside: dict[str, list[float]] = {}
        while not beside or (exporting.poll() is None and len(beside["overview"]) < PAGES):
            for kind, values in pages(viewer, num_steps, rng).items():
                beside.setdefault(kind, []).extend(values)
        exporting.terminate()
        exporting.wait()
    everything = [value for values in alone.values() for value in values]
    return {
        "trajectories": overview["num_trained"],
        "open_s": round(viewer.open_s, 2),
        "first_page_ms": round(first_ms, 1),
        "page_p50_ms": round(statistics.median(everything), 1),
        "page_p95_ms": round(p95(everything), 1),
        "p95_ms": {kind: round(p95(values), 1) for kind, values in sorted(alone.items())},
        "sql_ms": round(statistics.median(sql), 1),
        "page_p95_beside_export_ms": round(p95([value for values in beside.values() for value in values]), 1),
    }


def main() -> None:
    """Make the run, measure its pages, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    options = parser.parse_args()
    num_steps = max(4, options.trajectories // (GROUPS * SIZE))
    with tempfile.TemporaryDirectory() as name, EmbeddedKafka(folder=Path(name) / "kafka") as kafka:
        began_s = time.perf_counter()
        make(kafka.bootstrap, num_steps)
        print(f"{num_steps} steps written in {time.perf_counter() - began_s:.0f} s", flush=True)
        figures = measure(kafka.bootstrap, num_steps, Path(name))
    for label, value in figures.items():
        print(f"{label:<28}{value}")
    save(options.json, figures)


if __name__ == "__main__":
    main()
