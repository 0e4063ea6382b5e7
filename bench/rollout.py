"""The overhead of a whole worker over bare vLLM: tokens per second of both, in turn, in one process, with the same requests.

    python bench/rollout.py [--rounds N] [--groups N] [--tokens N] [--json FILE]

Bare: `add_request` for all groups, then `step` until none is left; the outputs are not used. Worker: `run_worker`, as `echoswarm run
worker` starts it, with intake, text, publishing, commits, journal, heartbeat and metrics; timed from the order to write the requests to the
last trajectory's acknowledgement. Both use the same engine. The embedded Kafka and the requests' writer are separate processes.

The demo's answers have some seven tokens; with `--tokens 128` each goes on to its 128th, whatever the model samples.

`worker_extra_cpu_us`: processor time of this process for a sample, all threads, less that of a bare round. `undisturbed_ratio` excludes the
time in which the engine's thread waited for a core (Linux), because machines are shared.

Threads: the worker runs on the main thread with its asyncio loop; another thread orders rounds over a pipe and measures them.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import multiprocessing as mp
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from command import parser_of, save
from payload import make_manifest

from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka
from echo_ops.supervisor.registration import make_topics
from echo_rollout.engines import vllm_inprocess
from echo_rollout.engines.engine import EngineConfig, Generation, Snapshot
from echo_rollout.engines.vllm_arguments import sampling_params
from echo_rollout.engines.vllm_inprocess import VllmInProcess
from echo_rollout.run import run_worker
from echo_runtime.opening import open_bus, open_cluster
from echo_runtime.process import RoleProcess, open_role
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Purpose, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS, WEIGHT_CHUNKS, WEIGHTS, weights_key
from echo_settings import Settings
from echo_tasks.base_models import resolve_base

RUN, NAMESPACE, BASE = "bench", "bench.rollout", "demo:tiny-qwen3"
GROUP_SIZE, GROUPS_IN_FLIGHT, RANK = 16, 32, 32
_DEMO_TOKENS, _PROMPT_TOKENS = 8, 7
_CONTEXT = mp.get_context("spawn")
_ROUND_S = 120.0
_START_S = 180.0


class MeasuredEngine(VllmInProcess):
    """The worker's engine, which this benchmark reaches: `loop` is set with the first version, `wait_for` counts groups."""

    latest: MeasuredEngine | None = None

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        type(self).latest = self
        self._counted = threading.Condition()
        self.num_groups = self.num_tokens = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    async def install(self, snapshot: Snapshot) -> None:
        await super().install(snapshot)
        with self._counted:
            self.loop = asyncio.get_running_loop()
            self._counted.notify_all()

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        generations = await super().generate(prompt, n, sampling)
        with self._counted:
            self.num_groups += 1
            self.num_tokens += sum(len(generation.token_ids) for generation in generations)
            self._counted.notify_all()
        return generations

    def waited_s(self) -> float:
        """How long its thread has waited for a core; 0 if the system does not tell."""
        file = Path(f"/proc/self/task/{self._thread.native_id}/schedstat")
        return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0

    def wait_for(self, num_groups: int) -> None:
        """Wait until it has generated so many groups, or, for 0, until a version is installed. Raises TimeoutError."""
        with self._counted:
            if not self._counted.wait_for(lambda: self.loop is not None and self.num_groups >= num_groups, _ROUND_S):
                message = f"only {self.num_groups} of {num_groups} groups were generated within {_ROUND_S:g} s"
                raise TimeoutError(message)


def settings_of(bootstrap: str, max_tokens: int) -> Settings:
    """The demo's settings, with the engine above and answers of at most `max_tokens`."""
    return Settings.model_validate(
        {
            "run": {"name": RUN},
            "kafka": {"bootstrap": bootstrap, "namespace": NAMESPACE},
            "task": {"name": "reverse-digits"},
            "policy": {
                "base": BASE, "update": "lora", "lora": {"r": RANK, "alpha": RANK}, "dtype": "float32",
                "max_length": max(64, _PROMPT_TOKENS + max_tokens),
            },
            "rollout": {
                "engine": f"{__name__}:{MeasuredEngine.__name__}",
                "group_size": GROUP_SIZE,
                "max_new_tokens": max_tokens,
                "groups_in_flight": GROUPS_IN_FLIGHT,
            },
        }
    )  # fmt: skip


def prompts_of(number: int, num_groups: int) -> list[list[int]]:
    """The prompts of one round: six digits and the sign before the answer."""
    draw = random.Random(number)
    return [[*(draw.randrange(2, 12) for _ in range(6)), 12] for _ in range(num_groups)]


# The process beside the worker


def write(bootstrap: str, num_groups: int, max_tokens: int, orders: Connection) -> None:
    """Publish version 0, then the requests of each ordered round, until None is received."""
    bus = open_bus(settings_of(bootstrap, max_tokens), "feeder")
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        contents = _adapter(resolve_base(BASE))
        whole = b"".join(contents.values())
        sha256 = hashlib.sha256(whole).hexdigest()
        blob = bus.blob_writer(publisher).write(WEIGHT_CHUNKS, RUN, f"v/0/{sha256[:12]}", whole)
        manifest = make_manifest(0, contents, blob=blob)
        for key in (weights_key(RUN, 0), weights_key(RUN, None)):
            publisher.publish(WEIGHTS, manifest, key=key).wait(_START_S)
        num_partitions = publisher.num_partitions(REQUESTS)
        numbers = itertools.count()
        while (order := orders.recv()) is not None:
            for prompt in prompts_of(order, num_groups):
                seq = next(numbers)
                publisher.publish(REQUESTS, _request(seq, prompt, max_tokens), partition=seq % num_partitions)


def _request(seq: int, prompt: list[int], max_tokens: int) -> RolloutRequest:
    return RolloutRequest(
        run_id=RUN,
        group_id=group_id_of(RUN, seq, Purpose.TRAIN),
        seq=seq,
        purpose=Purpose.TRAIN,
        task="reverse-digits",
        prompt_token_ids=pack_tokens(prompt),
        group_size=GROUP_SIZE,
        sampling=Sampling(max_new_tokens=max_tokens),
        required_version=0,
        learner_version=0,
        issued_ms=time.time_ns() // 1_000_000,
    )


def _adapter(base: Path) -> dict[str, bytes]:
    """A new adapter's files by name."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
        return {name: (Path(folder) / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}


# The measuring thread


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens, seconds, the seconds of these in which the engine's thread waited for a core, and the processor's seconds of all threads."""

    num_tokens: int
    seconds: float
    waited_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds

    @property
    def undisturbed_per_s(self) -> float:
        """Tokens per second with an exclusive core."""
        return self.num_tokens / (self.seconds - self.waited_s)


class Measuring:
    """Bare and worker rounds in turn, the first of each as warm-up; then it stops the worker."""

    def __init__(self, process: RoleProcess, orders: Connection, *, rounds: int, num_groups: int, max_tokens: int) -> None:
        self._process = process
        self._orders = orders
        self._rounds = rounds
        self._num_groups = num_groups
        self._max_tokens = max_tokens
        self._params = endless if max_tokens > _DEMO_TOKENS else sampling_params
        self._names = itertools.count()
        self.results: dict[str, float] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        """The thread's body."""
        try:
            self.results = self._measure()
        except BaseException as exc:  # the edge of the thread: main raises it
            self.error = exc
        finally:
            self._process.stop.set()

    def _measure(self) -> dict[str, float]:
        engine = self._engine()
        bare: list[Round] = []
        worker: list[Round] = []
        for number in range(self._rounds + 1):
            # The order alternates, so that a change of the machine's speed favours neither.
            for is_bare in (True, False) if number % 2 else (False, True):
                began_s, waited_s, num_tokens, cpu_s = time.perf_counter(), engine.waited_s(), engine.num_tokens, time.process_time()
                if is_bare:
                    num_tokens = self._bare_round(engine, prompts_of(number, self._num_groups))
                else:
                    self._worker_round(engine, number)
                    num_tokens = engine.num_tokens - num_tokens
                made = Round(num_tokens, time.perf_counter() - began_s, engine.waited_s() - waited_s, time.process_time() - cpu_s)
                (bare if is_bare else worker).append(made)
        pairs = list(zip(worker[1:], bare[1:], strict=True))
        ratios = [one.per_s / other.per_s for one, other in pairs]
        num_samples = self._num_groups * GROUP_SIZE
        return {
            "worker_tokens_per_s": statistics.median(one.per_s for one, _ in pairs),
            "bare_tokens_per_s": statistics.median(other.per_s for _, other in pairs),
            "ratio": statistics.median(ratios),
            "ratio_lowest": min(ratios),
            "ratio_highest": max(ratios),
            "undisturbed_ratio": statistics.median(one.undisturbed_per_s / other.undisturbed_per_s for one, other in pairs),
            "tokens_per_sample": statistics.median(one.num_tokens for one, _ in pairs) / num_samples,
            "worker_extra_cpu_us": statistics.median(1e6 * (one.cpu_s - other.cpu_s) / num_samples for one, other in pairs),
        }

    def _engine(self) -> MeasuredEngine:
        deadline = Deadline.after(_START_S)
        while (engine := MeasuredEngine.latest) is None:
            if deadline.expired() or self._process.stop.wait(0.05):
                message = "the worker made no engine"
                raise TimeoutError(message)
        engine.wait_for(0)
        return engine

    def _bare_round(self, engine: MeasuredEngine, prompts: list[list[int]]) -> int:
        assert engine.loop is not None
        params = self._params(GROUP_SIZE, Sampling(max_new_tokens=self._max_tokens))
        work = engine.on_thread(lambda vllm, request: _bare(vllm, request, prompts, params, self._names))
        return asyncio.run_coroutine_threadsafe(work, engine.loop).result(_ROUND_S)

    def _worker_round(self, engine: MeasuredEngine, number: int) -> None:
        deadline = Deadline.after(_ROUND_S)
        wanted = engine.num_groups + self._num_groups
        self._orders.send(number)
        engine.wait_for(wanted)
        while (done := self._acknowledged()) < wanted:
            if deadline.expired() or self._process.stop.wait(0.005):
                message = f"only {done:g} of {wanted} groups were acknowledged"
                raise TimeoutError(message)

    def _acknowledged(self) -> float:
        return self._process.registry.get_sample_value("echo_rollout_groups_total", {"outcome": "published"}) or 0.0


def _bare(vllm: Any, request: Any, prompts: list[list[int]], params: Any, names: Any) -> int:
    """Returns the number of generated tokens."""
    from vllm.inputs import TokensPrompt

    num_tokens = 0
    for prompt in prompts:
        tokens = TokensPrompt(prompt_token_ids=prompt)
        vllm.add_request(f"bare-{next(names)}", tokens, params, lora_request=request)
    while vllm.has_unfinished_requests():
        for output in vllm.step():
            num_tokens += sum(len(each.token_ids) for each in output.outputs) if output.finished else 0
    return num_tokens


def endless(n: int, sampling: Sampling) -> Any:
    """As `sampling_params`, for answers that end only at their limit."""
    made = sampling_params(n, sampling)
    made.ignore_eos = True
    return made


def measure(bootstrap: str, *, rounds: int, num_groups: int, max_tokens: int) -> dict[str, float]:
    """The medians over `rounds` pairs, and the median of the pairs' ratios."""
    ours, theirs = _CONTEXT.Pipe()
    writer = _CONTEXT.Process(target=write, args=(bootstrap, num_groups, max_tokens, theirs), daemon=True)
    writer.start()
    with open_role(settings_of(bootstrap, max_tokens), "worker", name="w0") as process:
        measuring = Measuring(process, ours, rounds=rounds, num_groups=num_groups, max_tokens=max_tokens)
        thread = threading.Thread(target=measuring.run, name="measuring", daemon=True)
        thread.start()
        try:
            run_worker(process, worker_id=f"bench-{os.getpid()}")
        finally:
            process.stop.set()
            ours.send(None)
            thread.join(_ROUND_S)
            writer.join(10)
            writer.kill()
    if measuring.error is not None:
        raise measuring.error
    return measuring.results


def main() -> None:
    """Measure, print one line and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="counted pairs")
    parser.add_argument("--groups", type=int, default=512, help=f"groups of {GROUP_SIZE} samples in a round")
    parser.add_argument("--tokens", type=int, help="tokens of every answer; without it some seven, as the demo's model ends them")
    arguments = parser.parse_args()
    if arguments.tokens:
        # The engine looks the function up in its own module.
        setattr(vllm_inprocess, sampling_params.__name__, endless)
    # As the supervisor places one worker on two cores.
    for name, value in (("OMP_NUM_THREADS", "1"), ("MALLOC_ARENA_MAX", "2"), ("VLLM_CPU_OMP_THREADS_BIND", "0")):
        os.environ.setdefault(name, value)
    with EmbeddedKafka() as kafka:
        max_tokens = arguments.tokens or _DEMO_TOKENS
        settings = settings_of(kafka.bootstrap, max_tokens)
        make_topics(open_cluster(settings), open_bus(settings, "operator").namespace)
        results = measure(kafka.bootstrap, rounds=arguments.rounds, num_groups=arguments.groups, max_tokens=max_tokens)
    sys.stdout.write("".join(f"{name} {value:.3f}  " for name, value in results.items()).rstrip() + "\n")
    save(arguments.json, results)


if __name__ == "__main__":
    main()
