"""A run at real proportions without real machines: time 1:50, long samples, large snapshots in the store, hundreds of paced workers.

    python bench/rehearsal.py [--steps 50] [--train-s 30] [--workers 200] [--tokens 8192] [--snapshot-mib 64] [--json FILE]

Feeder, rewards and workers are the real roles, the learner is the real learner with a trainer that waits for `--train-s` a step (ECHO-2's
1,600 s at 1:50), Kafka is the embedded one. Engines make groups of random tokens at a set pace. One worker names weights that were never
published; one is killed every `--death-every-s` and another takes its place. At the end the log is read:

needless_reissues   repeated requests for a seq that another request completed: must be 0
staleness_max       of the trained samples: at most the budget
learner_growth      resident memory of the learner in the last quarter of the steps / in the second quarter: about 1 if flat
audit               the verdict of `echoswarm audit`

Each worker fetches each version, so the disk needs `--snapshot-mib` for each worker, and for each version in the store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from buses import records_of
from command import parser_of, save
from confluent_kafka.admin import NewPartitions
from guarded import logs_of, running
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.clock import Deadline, SystemClock
from echo_bus.metrics import BusMetrics
from echo_embedded import EmbeddedKafka
from echo_embedded.guard import Guard
from echo_embedded.java import Jvm
from echo_ops.report.run_view import RunView
from echo_ops.supervisor.registration import make_topics
from echo_replay.audit import audit_run
from echo_rollout.engines.engine import EngineConfig, Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_runtime.opening import open_bus, open_cluster
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal, open_role
from echo_schemas.records import FinishReason, Purpose, RolloutRequest, Sampling, Trajectory, VersionSpan, WorkerState, WorkerStatus
from echo_schemas.topics import DROPS, PROGRESS, REQUESTS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS
from echo_settings import Settings, load_settings
from echo_settings.kinds import settings_of_kind
from echo_tasks.base_models import resolve_base
from echo_tasks.prompts import PromptCodec

RUN = "rehearsal"
HONEST, LIAR = "honest", "liar"
BUDGET = 3
# Token ids are below the first number; the lowest two are padding and end.
_VOCABULARY, _FIRST_TOKEN = 32, 2
_PROMPT_TOKENS = 64
_MIB = 1 << 20
_WORKERS_A_PROCESS = 25
_NICE = 15
# One broker serves hundreds of workers with a dozen connections each.
_HEAP_MB = 2_048
_LOOK_S, _END_S, _START_S, _READ_S = 1.0, 60.0, 600.0, 120.0
# A run may be so many times slower than its pace, without its start-up.
_SLACK = 4.0
_POINTS = 60


class RehearsalEngine(ScriptedEngine):
    """Groups of random tokens, each sample of `max_new_tokens`, at a pace; options: `seconds` a group, `slots`, `lies`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        self._seconds = float(str(config.options.get("seconds", 1.0)))
        self._slots = asyncio.Semaphore(int(str(config.options.get("slots", 1))))
        self._lies = bool(config.options.get("lies", False))
        self._random = np.random.default_rng(os.getpid())

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """A group of one version, the one installed when the group begins."""
        del prompt
        async with self._slots:
            ref = self.installed
            assert ref is not None, "a worker asks once a version is installed"
            await asyncio.sleep(self._seconds)
        count = sampling.max_new_tokens
        found = []
        for _ in range(n):
            ids = self._random.integers(_FIRST_TOKEN, _VOCABULARY, count, np.int32)
            found.append(
                Generation(
                    token_ids=ids,
                    logprobs=np.full(count, -np.log(_VOCABULARY - _FIRST_TOKEN), np.float32),
                    version_spans=(VersionSpan(start=0, end=count, version=ref.version),),
                    weights_sha256="0" * 64 if self._lies else ref.sha256,
                    finish_reason=FinishReason.LENGTH,
                    text=" ".join(map(str, ids.tolist())),
                )
            )
        return found


def long_base(folder: Path, max_length: int) -> Path:
    """The demo's model with enough positions for the samples; no process computes with it."""
    base = folder / "base"
    if not base.exists():
        shutil.copytree(resolve_base("demo:tiny-qwen3"), base)
    config = base / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text(encoding="utf-8")) | {"max_position_embeddings": max_length}), encoding="utf-8"
    )
    return base


def run_file(folder: Path, bootstrap: str, options: argparse.Namespace) -> Path:
    """The run's settings."""
    engine = {"seconds": options.seconds, "slots": options.slots}
    pool = "".join(
        f'[[rollout.pool]]\nname = "{name}"\noptions = {{ {", ".join(f"{key} = {json.dumps(value)}" for key, value in given.items())} }}\n'
        for name, given in ((HONEST, engine), (LIAR, {**engine, "lies": True}))
    )
    max_length = options.tokens + _PROMPT_TOKENS
    content = f"""
[run]
name = "{RUN}"
[kafka]
bootstrap = "{bootstrap}"
namespace = "bench.rehearsal"
[policy]
base = {json.dumps(str(long_base(folder, max_length)))}
max_length = {max_length}
[rollout]
engine = "rehearsal:RehearsalEngine"
group_size = {options.group_size}
groups_in_flight = {options.slots}
max_new_tokens = {options.tokens}
probe_size = 0
heartbeat_s = 2.0
{pool}
[learner]
groups_per_step = {options.groups}
micro_batch_tokens = {max(16_384, max_length)}
steps = {options.steps}
[staleness]
budget = {BUDGET}
[checkpoint]
folder = {json.dumps(str(folder / "run"))}
[store]
uri = "file://{folder / "store"}"
above_mb = 0
"""
    file = folder / "run.toml"
    file.write_text(content, encoding="utf-8")
    return file


# The stand-ins for roles, each in its own process


def run_learner(settings: Settings, *, train_s: float, snapshot_mib: int) -> None:
    """The real learner with a trainer that waits instead of computing and has weights of `snapshot_mib`."""
    from echo_learner.metrics import LearnerMetrics
    from echo_learner.run import train_in_sessions
    from tests.unit.learner.numpy_trainer import NumpyTrainer

    class SlowTrainer(NumpyTrainer):
        """A step takes `train_s`; the weights are a digest and zeros."""

        def step(self, batch: Any) -> Any:
            result = super().step(batch)
            # The test's trainer keeps all batches.
            self.batches.clear()
            self.weights = self.weights[:32].ljust(snapshot_mib * _MIB, b"\0")
            time.sleep(train_s)
            return result

    with open_role(settings, "learner") as process:
        train_in_sessions(process, SlowTrainer(), LearnerMetrics(process.registry), PromptCodec(resolve_base(settings.policy.base)))


def run_workers(settings: Settings, names: Sequence[str], kind: str) -> None:
    """Real workers, one thread each, until this process is told to end."""
    import echo_rollout.run as rollout

    # In a real run they have their own machines; here they leave the processor to the other roles.
    os.nice(_NICE)
    chosen = settings_of_kind(settings, kind)
    stop = StopSignal()
    failed: list[str] = []

    def work(name: str) -> None:
        clock, registry = SystemClock(), CollectorRegistry()
        bus = open_bus(chosen, f"worker.{name}", metrics=BusMetrics(registry), clock=clock)
        places = PlaceTimes(registry, clock)
        process = RoleProcess(settings=chosen, bus=bus, registry=registry, places=places, clock=clock, stop=stop)
        try:
            rollout.run_worker(process, worker_id=name, kind=kind)
        except Exception:  # the edge of a worker: the process ends with its traceback in the log
            logging.getLogger(__name__).exception("Worker %s has ended", name)
            failed.append(name)
            stop.set()

    with open_role(settings, "worker", name="rehearsal") as process:
        process.stop.on_set(stop.set)
        threads = [threading.Thread(target=work, args=(name,), name=name, daemon=True) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failed:
        sys.exit(1)


# The stage


class Stage:
    """Starts and ends the roles, with their logs in one folder."""

    def __init__(self, guard: Guard, folder: Path, config: Path) -> None:
        self._guard = guard
        self._folder = folder
        self._config = config

    def process(self, name: str, *arguments: str) -> Any:
        """Run `python ARGUMENTS --config FILE`."""
        cache = {"XDG_CACHE_HOME": str(self._folder / "cache")}
        return running(self._guard, self._folder, name, *arguments, "--config", str(self._config), environ=cache)

    def role(self, role: str) -> Any:
        """Run a role as the command line does."""
        return self.process(role, "-m", "echo_ops.cli", "run", role)

    def stand_in(self, name: str, *arguments: str) -> Any:
        """Run a stand-in of this module."""
        return self.process(name, "-m", "rehearsal", *arguments)

    def workers(self, name: str, names: Sequence[str], kind: str = HONEST) -> Any:
        """Run a process with these workers."""
        return self.stand_in(name, "--role", "workers", "--names", ",".join(names), "--kind", kind)

    def logs(self) -> str:
        """The ends of all logs."""
        return logs_of(self._folder)


class Mortal:
    """A worker that is killed every `every_s` and replaced by another."""

    def __init__(self, stage: Stage, every_s: float) -> None:
        self._stage = stage
        self._every_s = every_s
        self._open: ExitStack | None = None
        self._due_s = 0.0
        self.num_deaths = 0

    def look(self) -> None:
        """Kill and replace it if it is time."""
        if time.monotonic() < self._due_s or not self._every_s:
            return
        if self._open is not None:
            self._process.kill()
            self._open.close()
            self.num_deaths += 1
        self._open = ExitStack()
        name = f"mortal-{self.num_deaths}"
        self._process: subprocess.Popen[bytes] = self._open.enter_context(self._stage.workers("mortal", [name]))
        self._due_s = time.monotonic() + self._every_s

    def close(self) -> None:
        """Ask it to end."""
        if self._open is not None:
            self._open.close()


def rehearse(stage: Stage, bus: Bus, options: argparse.Namespace) -> dict[str, Any]:
    """Run to the last step. Returns the figures of the processes. Worker processes start one after another, as a pool grows: hundreds that
    start at once would leave the broker no processor time."""
    limit = Deadline.after(_START_S + _SLACK * options.steps * options.train_s)
    names = [f"worker-{number}" for number in range(options.workers - 2)]
    memory: list[tuple[float, float]] = []
    started_s = time.monotonic()
    with ExitStack() as stack:
        learner = stack.enter_context(
            stage.stand_in("learner", "--role", "learner", "--train-s", str(options.train_s), "--snapshot-mib", str(options.snapshot_mib))
        )
        others = [stack.enter_context(stage.role(role)) for role in ("feeder", "reward")]
        workers = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
        others.append(stack.enter_context(stage.workers("liar", ["liar"], LIAR)))
        for first in range(0, len(names), _WORKERS_A_PROCESS):
            chosen = names[first : first + _WORKERS_A_PROCESS]
            others.append(stack.enter_context(stage.workers(f"workers-{first}", chosen)))
            ready = first + len(chosen)
            while sum(status.state is WorkerState.READY for status in workers.items().values()) < ready:
                check(stage, limit, others)
                time.sleep(_LOOK_S)
        mortal = stack.enter_context(closing(Mortal(stage, options.death_every_s)))
        while learner.poll() is None:
            mortal.look()
            memory.append((round(time.monotonic() - started_s, 1), _resident_mib(learner.pid)))
            check(stage, limit, others)
            time.sleep(_LOOK_S)
        if learner.returncode:
            message = f"The learner ended with {learner.returncode}.{stage.logs()}"
            raise RuntimeError(message)
    return {
        "seconds": round(time.monotonic() - started_s, 1),
        "deaths": mortal.num_deaths,
        "learner_growth": _growth([mib for _, mib in memory if mib]),
        "learner_rss_mib": memory[:: max(1, len(memory) // _POINTS)],
    }


def check(stage: Stage, limit: Deadline, roles: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise RuntimeError, with the ends of the logs, if the time is up or a role has ended."""
    ended = [f"{role.args!r} has ended early with {role.returncode}." for role in roles if role.poll() is not None]
    if limit.expired() or ended:
        why = " ".join(ended) or "The last step did not come in time."
        message = f"{why} All logs are kept with --folder; their ends:{stage.logs()}"
        raise RuntimeError(message)


def _resident_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return round(int(line.split()[1]) / 1024, 1)
    except OSError:
        pass
    return 0.0


def _growth(sizes: Sequence[float]) -> float:
    """The mean of the last quarter / that of the second; the first quarter is the start-up."""
    quarter = len(sizes) // 4
    if not quarter:
        return 1.0
    return round(statistics.mean(sizes[-quarter:]) / statistics.mean(sizes[quarter : 2 * quarter]), 3)


# The figures from the log


def read_log(bus: Bus) -> dict[str, Any]:
    """The figures of the run from its records."""
    view = RunView(RUN, started_ms=0, steps_wanted=0, budget=BUDGET)
    for record in records_of(bus, [STEPS, DROPS, PROGRESS, WORKERS, WEIGHTS], _READ_S):
        view.apply(record)
    histogram = view.staleness()
    return {
        "steps": view.num_steps,
        "s_per_step": view.s_per_step(),
        "bubble_ratio": view.bubble_ratio(),
        "staleness": list(histogram),
        "staleness_max": max((age for age, count in enumerate(histogram) if count), default=0),
        "drops": dict(view.drops),
        "disbelieved": dict(view.disbelieved),
        **count_requests(bus),
    }


def count_requests(bus: Bus) -> dict[str, int]:
    """Requests, repeated requests of a seq, and the needless ones of these."""
    issued: Counter[int] = Counter()
    members: Counter[tuple[int, str]] = Counter()
    complete: Counter[int] = Counter()
    for record in records_of(bus, [REQUESTS, TRAJECTORIES], _READ_S):
        match record:
            case RolloutRequest(purpose=Purpose.TRAIN, seq=seq):
                issued[seq] += 1
            case Trajectory(purpose=Purpose.TRAIN, seq=seq, attempt=attempt, group_size=size):
                members[seq, attempt] += 1
                complete[seq] += members[seq, attempt] == size
    return {
        "requests": issued.total(),
        "reissues": issued.total() - len(issued),
        "needless_reissues": sum(min(count, complete[seq]) - 1 for seq, count in issued.items() if count > 1 and complete[seq] > 1),
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rehearse and read the log."""
    with EmbeddedKafka(folder=folder / "kafka", jvm=Jvm(heap_mb=_HEAP_MB)) as kafka, closing(Guard()) as guard:
        config = run_file(folder, kafka.bootstrap, options)
        settings = load_settings(config, {})
        bus = open_bus(settings, "operator")
        make_topics(open_cluster(settings), bus.namespace)
        spread_requests(bus, options.partitions)
        seen = rehearse(Stage(guard, folder, config), bus, options)
        report = audit_run(bus, RUN)
        return {**read_log(bus), **seen, "audit": report.verdict.value, "conditions": {**_plain(options), "cores": os.cpu_count()}}


def spread_requests(bus: Bus, num_partitions: int) -> None:
    """Give `requests` at least so many partitions: a worker without one gets no work."""
    admin, physical = bus.cluster.admin(), bus.namespace.topic(REQUESTS)
    if len(admin.list_topics(physical, timeout=_END_S).topics[physical].partitions) < num_partitions:
        admin.create_partitions([NewPartitions(physical, num_partitions)])[physical].result(_END_S)


def _plain(options: argparse.Namespace) -> Mapping[str, Any]:
    return {name: value for name, value in vars(options).items() if isinstance(value, (int, float)) and not isinstance(value, bool)}


def is_good(results: Mapping[str, Any], *, steps: int) -> bool:
    """Whether the run kept all promises."""
    is_fresh = bool(results["staleness_max"] <= BUDGET)
    return is_fresh and (results["steps"], results["needless_reissues"], results["audit"]) == (steps, 0, "proved")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, of the bench and of its stand-ins."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--train-s", type=float, default=30.0, help="seconds a training step takes")
    parser.add_argument("--groups", type=int, default=128, help="groups a step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a sample")
    parser.add_argument("--workers", type=int, default=200, help="workers, the one that lies and the one that dies included")
    parser.add_argument("--partitions", type=int, default=256, help="of requests, more than workers")
    parser.add_argument("--seconds", type=float, default=20.0, help="a worker needs for a group")
    parser.add_argument("--slots", type=int, default=1, help="groups that a worker makes at once")
    parser.add_argument("--death-every-s", type=float, default=60.0, help="0: nobody dies")
    parser.add_argument("--snapshot-mib", type=int, default=64, help="size of the weights; a real one of 12 GiB needs a disk to match")
    parser.add_argument("--folder", type=Path, help="keep data and logs here")
    for name in ("--role", "--config", "--names", "--kind"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> int:
    """Rehearse, print, and exit 1 if a promise was not kept."""
    options = parse(sys.argv[1:])
    if options.role:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
        settings = load_settings(Path(options.config), os.environ)
        if options.role == "learner":
            run_learner(settings, train_s=options.train_s, snapshot_mib=options.snapshot_mib)
        else:
            run_workers(settings, options.names.split(","), options.kind)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        results = measure(folder, options)
    sys.stdout.write("".join(f"{name:18} {value}\n" for name, value in results.items() if name != "learner_rss_mib"))
    save(options.json, results)
    return 0 if is_good(results, steps=options.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
