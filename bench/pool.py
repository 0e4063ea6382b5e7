"""A pool of one fast and one slower worker against the sum of what each does alone, in one run over a real Kafka.

    python bench/pool.py [--seconds S] [--slower N] [--rounds N] [--json FILE]

Feeder and workers are the processes of `echoswarm run`; the workers' engines make groups at a set rate, so that only the distribution of
work is measured. This process plays the learner: it publishes a version whenever a step's groups have come, so that `pace` lets the feeder
go on. Each phase (the fast worker alone, the slow one alone, both) starts its workers, lets them settle, and counts the trajectories that
arrive within `--seconds`.

`pool_per_s`, `sum_per_s`: groups per second. `slow_share`: the slow worker's share of the pool's groups. `*_age_s`: seconds from a
request's issue to its last token while both work.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

from buses import records_of
from command import parser_of, save
from guarded import logs_of, running
from payload import make_manifest

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka
from echo_embedded.guard import Guard
from echo_ops.report.offsets import OffsetWatch
from echo_ops.supervisor.registration import make_topics
from echo_runtime.opening import open_bus, open_cluster
from echo_schemas.records import Progress, Trajectory, WorkerState, WorkerStatus
from echo_schemas.topics import PROGRESS, TRAJECTORIES, WEIGHT_CHUNKS, WEIGHTS, WORKERS, weights_key
from echo_settings import load_settings
from echo_tasks.base_models import resolve_base

RUN, NAMESPACE = "bench", "bench.pool"
GROUP_SIZE, GROUPS_PER_STEP = 4, 64
SLOTS, FAST_S = 8, 0.8
_START_S, _END_S = 120.0, 30.0
_LOOK_S = 0.05
_SPEAK_S = 0.5
# Each phase settles for so long: the feeder needs some groups of the slowest worker to know the rates.
_SETTLE_S = 20.0


def run_file(folder: Path, bootstrap: str, *, slower: float) -> Path:
    """The run's settings: two kinds of workers, else the defaults."""
    content = f"""
[run]
name = "{RUN}"
[kafka]
bootstrap = "{bootstrap}"
namespace = "{NAMESPACE}"
[policy]
base = {json.dumps(str(resolve_base("demo:tiny-qwen3")))}
[rollout]
engine = "echo_rollout.engines.scripted:PacedEngine"
group_size = {GROUP_SIZE}
groups_in_flight = {2 * SLOTS}
max_new_tokens = 3
probe_size = 0
[[rollout.pool]]
name = "fast"
options = {{ seconds = {FAST_S}, slots = {SLOTS} }}
[[rollout.pool]]
name = "slow"
options = {{ seconds = {FAST_S * slower}, slots = {SLOTS} }}
[learner]
groups_per_step = {GROUPS_PER_STEP}
[staleness]
budget = 3
publication_period = 1
"""
    file = folder / "run.toml"
    file.write_text(content, encoding="utf-8")
    return file


class PlayedLearner:
    """Counts trajectories, and publishes a version for the groups of every step. Has its own thread between `start` and `close`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._publisher = bus.publisher(profiles.PRODUCER_LATENCY)
        self._offsets = OffsetWatch(bus.cluster, bus.namespace)
        self._progress = Progress(
            run_id=RUN, session="bench", version=0, published=0, groups_trained=0, groups_dropped=0, groups_ready=0, next_seq=0, time_ms=0
        )  # fmt: skip
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._follow, name="learner", daemon=True)
        self.num_groups = 0

    def start(self) -> None:
        """Publish version 0 and go on."""
        self._publish(0)
        self._thread.start()

    def check(self) -> None:
        """Raises the error that ended the thread, if any."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop publishing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._publisher.close()

    def _follow(self) -> None:
        try:
            spoken_s = 0.0
            while not self._stop.wait(_LOOK_S):
                if time.monotonic() - spoken_s >= _SPEAK_S:
                    # A heartbeat: a feeder issues no request until it has heard a learner.
                    spoken_s = time.monotonic()
                    self._publisher.publish(PROGRESS, self._progress)
                self.num_groups = self._offsets.ends(TRAJECTORIES) // GROUP_SIZE
                if self.num_groups // GROUPS_PER_STEP > self._progress.version:
                    self._publish(self._progress.version + 1)
        except BaseException as exc:  # the edge of the thread: `check` raises it
            self._error = exc

    def _publish(self, version: int) -> None:
        content, num_trained = f"weights of {version}".encode(), version * GROUPS_PER_STEP
        blob = self._bus.blob_writer(self._publisher).write(WEIGHT_CHUNKS, RUN, f"v/{version}", content)
        parent = version - 1 if version else None
        manifest = make_manifest(version, {"adapter_model.safetensors": content}, parent=parent, blob=blob)
        for key in (weights_key(RUN, version), weights_key(RUN, None)):
            self._publisher.publish(WEIGHTS, manifest, key=key).wait(_END_S)
        self._progress = replace(self._progress, version=version, published=version, groups_trained=num_trained)
        self._publisher.publish(PROGRESS, self._progress).wait(_END_S)


def role(guard: Guard, config: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    """Run a role; it is asked to end at the end of the block."""
    name, cache = "-".join(arguments).replace("--", ""), {"XDG_CACHE_HOME": str(config.parent / "cache")}
    return running(guard, config.parent, name, "-m", "echo_ops.cli", "run", *arguments, "--config", str(config), environ=cache)


@dataclass(frozen=True, slots=True)
class Phase:
    """The rate while these kinds worked, and the time of counting (Unix milliseconds)."""

    per_s: float
    start_ms: int
    end_ms: int


class Bench:
    """One run, one phase after the other."""

    def __init__(self, guard: Guard, config: Path, bus: Bus, learner: PlayedLearner, feeder: subprocess.Popen[bytes]) -> None:
        self._guard = guard
        self._config = config
        self._bus = bus
        self._learner = learner
        self._feeder = feeder

    def phase(self, kinds: Sequence[str], number: int, seconds: float) -> Phase:
        """Start a worker of each of `kinds`, let them settle, and count. Raises RuntimeError if one ends, TimeoutError if one is idle."""
        names = [f"{kind}-{number}-{len(kinds)}" for kind in kinds]
        with ExitStack() as stack:
            processes = [
                stack.enter_context(role(self._guard, self._config, "worker", "--kind", kind, "--name", name))
                for kind, name in zip(kinds, names, strict=True)
            ]
            self._until_working(names, processes)
            self._wait(_SETTLE_S, processes)
            start_ms, start_s, before = time.time_ns() // 1_000_000, time.monotonic(), self._learner.num_groups
            self._wait(seconds, processes)
            num_groups, elapsed_s = self._learner.num_groups - before, time.monotonic() - start_s
        return Phase(num_groups / elapsed_s, start_ms, time.time_ns() // 1_000_000)

    def ages(self, phase: Phase) -> dict[str, list[float]]:
        """By kind: for each trajectory finished within `phase`, seconds from its request's issue to its last token. Without trajectories of
        requests that the workers of the previous phase handed back: these waited for the new workers."""
        since_ms = phase.start_ms - int(_SETTLE_S * 1000)
        found: dict[str, list[float]] = {}
        for record in records_of(self._bus, [TRAJECTORIES], _START_S):
            if not isinstance(record, Trajectory) or record.requested_ms < since_ms:
                continue
            if phase.start_ms <= record.finished_ms <= phase.end_ms:
                found.setdefault(record.worker_id.partition("-")[0], []).append((record.finished_ms - record.requested_ms) / 1000)
        return found

    def _until_working(self, names: Sequence[str], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline = Deadline.after(_START_S)
        with closing(self._bus.view(WORKERS, WorkerStatus)) as view:
            while True:
                statuses = [view.get(name) for name in names]
                if all(status is not None and status.state is WorkerState.READY and status.rollouts for status in statuses):
                    return
                if deadline.expired():
                    message = f"waited for a first group of each of {', '.join(names)}.{logs_of(self._config.parent)}"
                    raise TimeoutError(message)
                self._wait(_LOOK_S, processes)

    def _wait(self, seconds: float, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        deadline, nap = Deadline.after(seconds), threading.Event()
        while not deadline.expired():
            self._learner.check()
            if any(process.poll() is not None for process in (*processes, self._feeder)):
                message = f"a role ended early.{logs_of(self._config.parent)}"
                raise RuntimeError(message)
            nap.wait(min(_LOOK_S, seconds))


def measure(folder: Path, bootstrap: str, *, seconds: float, slower: float, rounds: int) -> dict[str, float]:
    """Medians over `rounds`, each of them three phases."""
    config = run_file(folder, bootstrap, slower=slower)
    settings = load_settings(config, {})
    bus = open_bus(settings, "learner")
    make_topics(open_cluster(settings), bus.namespace)
    fast, slow, both = [], [], []
    with closing(Guard()) as guard, closing(PlayedLearner(bus)) as learner, role(guard, config, "feeder") as feeder:
        learner.start()
        bench = Bench(guard, config, bus, learner, feeder)
        for number in range(rounds):
            fast.append(bench.phase(["fast"], number, seconds))
            slow.append(bench.phase(["slow"], number, seconds))
            both.append(bench.phase(["fast", "slow"], number, seconds))
        ages: dict[str, list[float]] = {"fast": [], "slow": []}
        for phase in both:
            for kind, values in bench.ages(phase).items():
                ages[kind] += values
    sums = [one.per_s + other.per_s for one, other in zip(fast, slow, strict=True)]
    num_slow, num_fast = len(ages["slow"]), len(ages["fast"])
    return {
        "pool_per_s": statistics.median(phase.per_s for phase in both),
        "sum_per_s": statistics.median(sums),
        "ratio": statistics.median(phase.per_s / total for phase, total in zip(both, sums, strict=True)),
        "fast_per_s": statistics.median(phase.per_s for phase in fast),
        "slow_per_s": statistics.median(phase.per_s for phase in slow),
        "slow_share": num_slow / max(1, num_slow + num_fast),
        "fast_age_s": statistics.median(ages["fast"] or [0.0]),
        "slow_age_s": statistics.median(ages["slow"] or [0.0]),
        "slow_oldest_s": max(ages["slow"], default=0.0),
    }


def main() -> int:
    """Measure and print one line."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each phase that count")
    parser.add_argument("--slower", type=float, default=5.0, help="how many times as long the slow worker takes")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of three phases")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, EmbeddedKafka() as kafka:
        results = measure(
            Path(folder), kafka.bootstrap, seconds=arguments.seconds, slower=arguments.slower, rounds=arguments.rounds
        )  # fmt: skip
    sys.stdout.write("  ".join(f"{name} {value:.3f}" for name, value in results.items()) + "\n")
    save(arguments.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
