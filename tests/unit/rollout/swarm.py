"""A run without models: feeder and workers on threads over any cluster, and a hand that plays the learner."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline, SystemClock
from echo_bus.reading.view import CompactedView
from echo_core.policy import Admission, StalenessPolicy
from echo_rollout.engines.engine import Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.feeder import Feeder
from echo_rollout.journal import CrashJournal
from echo_rollout.metrics import FeederMetrics, WorkerMetrics
from echo_rollout.run import newest_source
from echo_rollout.weights.peers.opening import open_peers
from echo_rollout.weights.sources import PublishedSource
from echo_rollout.worker import Worker
from echo_rollout.worker_parts import WorkerParts
from echo_runtime.notices import Notices
from echo_runtime.places import PlaceTimes
from echo_runtime.process import StopSignal
from echo_schemas.columns import pack_tokens
from echo_schemas.errors import UserError
from echo_schemas.records import (
    BlobRef,
    Control,
    Progress,
    Purpose,
    RolloutRequest,
    RunControl,
    RunState,
    Sampling,
    Trajectory,
    WeightFile,
    WeightKind,
    WeightManifest,
    WorkerStatus,
    group_id_of,
)
from echo_schemas.topics import CONTROL, PROGRESS, REQUESTS, TRAJECTORIES, WEIGHT_CHUNKS, WEIGHTS, WORKERS, Topic, weights_key
from echo_settings import Settings
from echo_tasks.task import Prompt, SingleTurn

WAIT_S = 60.0
RUN = "demo"


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` returns once it is true."""
    deadline = Deadline.after(WAIT_S)
    nap = threading.Event()
    while not (found := condition()):
        assert not deadline.expired(), f"waited for {what}"
        nap.wait(0.01)
    return found


@contextmanager
def closed_together(*views: CompactedView[Any]) -> Iterator[None]:
    """Close all of them at once at the end: each waits for its own poll to return."""
    try:
        yield
    finally:
        with ThreadPoolExecutor(len(views)) as pool:
            list(pool.map(CompactedView.close, views))


class LetterTask(SingleTurn):
    """Three letters."""

    name = "letters"
    rewards: Sequence[str] = ("exact",)

    def prompt(self, seed: int, seq: int) -> Prompt:
        return Prompt(text=f"{seed % 10}{seq % 10}>", entry={"seq": seq})


class LetterCodec:
    """A character is a token below 32."""

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([ord(letter) % 32 for letter in text], np.int32)

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(64 + int(token)) for token in token_ids)

    def render(self, messages: Any) -> str:
        return "".join(message.content for message in messages)

    def render_reply(self, content: str) -> str:
        return content


class GatedEngine(ScriptedEngine):
    """Generations wait until `gate` is set; `num_running` says how many do."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.gate = threading.Event()
        self.num_running = self.most_running = 0

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.005)
            return await super().generate(prompt, n, sampling)
        finally:
            self.num_running -= 1


class Thread:
    """A role on a thread: `stop` it, or see what it raised."""

    def __init__(self, run: Callable[[StopSignal], None]) -> None:
        self.signal = StopSignal()
        self.error: BaseException | None = None
        self._run = run
        self._thread = threading.Thread(target=self._guarded, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        self.signal.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the role did not end"

    def _guarded(self) -> None:
        try:
            self._run(self.signal)
        except BaseException as exc:  # the edge of the thread
            self.error = exc


class Swarm:
    """Everything around one run. `close` ends what runs."""

    def __init__(self, bus: Bus, folder: Path, **settings: Any) -> None:
        self.bus = bus
        self.folder = folder
        rollout = {"group_size": 2, "probe_size": 0, "heartbeat_s": 0.05, "max_new_tokens": 4, "groups_in_flight": 8, "depth": 2}
        self.settings = Settings.model_validate(
            {
                "run": {"name": RUN},
                "rollout": {**rollout, **settings.pop("rollout", {})},
                "learner": {"groups_per_step": 4},
                "staleness": {"budget": 1, "publication_period": 1, "admission": "pace"},
                **settings,
            }
        )
        self.publisher = bus.publisher(profiles.PRODUCER_LATENCY)
        self.threads: list[Thread] = []
        self.worker_registry = CollectorRegistry()
        self.notices = Notices()
        self.evaluation_tasks: dict[str, Any] = {}
        self.may_join: Callable[[], bool] = lambda: True
        self.progress = Progress(
            run_id=RUN,
            session="s",
            version=0,
            published=0,
            groups_trained=0,
            groups_dropped=0,
            groups_ready=0,
            next_seq=0,
            time_ms=0,
        )

    # The learner's part

    def say(self, **changes: Any) -> None:
        """Publish progress."""
        self.progress = replace(self.progress, **changes)
        self.publisher.publish(PROGRESS, self.progress).wait(WAIT_S)

    def publish_version(
        self,
        version: int,
        *,
        next_seq: int = 0,
        content: bytes | None = None,
        promise: str | None = None,
        altered: Callable[[BlobRef], BlobRef] = lambda ref: ref,
        **changes: Any,
    ) -> WeightManifest:
        """A snapshot of one small file under `v/<n>` and `current`. `promise` overrides its checksum, `altered` says where it lies.
        `changes`: of the manifest.
        """
        data = content or f"weights of {version}".encode()
        ref = self.bus.blob_writer(self.publisher).write(WEIGHT_CHUNKS, RUN, f"v/{version}", data)
        sha256 = hashlib.sha256(data).hexdigest()
        manifest = WeightManifest(
            run_id=RUN,
            version=version,
            parent=version - 1 if version else None,
            kind=WeightKind.LORA,
            files=(WeightFile(name="adapter_model.safetensors", num_bytes=len(data), sha256=promise or sha256),),
            num_bytes=len(data),
            sha256=sha256,
            blob=altered(ref),
            session="s",
            checkpoint="c",
            next_seq=next_seq,
            created_ms=0,
        )
        manifest = replace(manifest, **changes)
        for key in (weights_key(RUN, version), weights_key(RUN, None)):
            self.publisher.publish(WEIGHTS, manifest, key=key).wait(WAIT_S)
        self.say(published=version, version=max(version, self.progress.version))
        return manifest

    def order(self, state: RunState) -> None:
        """Control of the whole run."""
        control = Control(run_id=RUN, epoch=1, run=RunControl(state=state), issued_by="test", time_ms=0)
        self.publisher.publish(CONTROL, control).wait(WAIT_S)

    # Roles

    def start_feeder(self) -> Thread:
        return self._thread(self._feed)

    def start_worker(self, engine: ScriptedEngine, worker_id: str = "w0", task: Any = None) -> Thread:
        return self._thread(lambda stop: self._work(engine, worker_id, task or LetterTask(), stop))

    def _thread(self, run: Callable[[StopSignal], None]) -> Thread:
        made = Thread(run)
        self.threads.append(made)
        return made

    def _feed(self, stop: StopSignal) -> None:
        bus, clock = self.bus, SystemClock()
        registry = CollectorRegistry()
        observer = bus.observer()
        settings = self.settings
        policy = StalenessPolicy(
            budget=settings.budget,
            publication_period=settings.publication_period,
            groups_per_step=settings.learner.groups_per_step,
            group_size=settings.rollout.group_size,
            admission=Admission(settings.staleness.admission),
        )
        progress, weights, control = bus.view(PROGRESS, Progress), bus.view(WEIGHTS, WeightManifest), bus.orders()
        workers = bus.view(WORKERS, WorkerStatus)
        with closing(observer), closed_together(progress, weights, control, workers), closing(bus.transactions("feeder")) as writer:
            feeder = Feeder(
                settings=settings,
                policy=policy,
                task=LetterTask(),
                prompts=LetterCodec(),
                bus=bus,
                writer=writer,
                observer=observer,
                progress=progress,
                weights=weights,
                workers=workers,
                control=control,
                places=PlaceTimes(registry, clock),
                notices=self.notices,
                metrics=FeederMetrics(registry),
                clock=clock,
            )
            feeder.run(stop)

    def _work(self, engine: ScriptedEngine, worker_id: str, task: Any, stop: StopSignal) -> None:
        clock, registry = SystemClock(), CollectorRegistry()
        self.worker_registry = registry
        folder = self.folder / f"weights-{worker_id}-{time.monotonic_ns()}"
        folder.mkdir(parents=True)
        reader = self.bus.blob_reader()
        journal, source, metrics = (
            CrashJournal(self.folder / f"{worker_id}.journal"),
            PublishedSource(reader),
            WorkerMetrics(registry),
        )
        with closing(journal), ExitStack() as stack:
            peers = open_peers(self.settings, self.bus, source, stack, worker_id=worker_id, metrics=metrics, clock=clock)
            worker = Worker(
                WorkerParts(
                    settings=self.settings,
                    worker_id=worker_id,
                    engine_name="scripted",
                    bus=self.bus,
                    engine=engine,
                    task=task,
                    codec=LetterCodec(),
                    vocabulary=32,
                    source=source,
                    newest_source=newest_source(source, reader, peers, self.bus, RUN, metrics),
                    peer_address=peers.address if peers else "",
                    journal=journal,
                    folder=folder,
                    places=PlaceTimes(registry, clock),
                    notices=self.notices,
                    metrics=metrics,
                    clock=clock,
                    evaluation_tasks=self.evaluation_tasks,
                    may_join=self.may_join,
                )
            )
            asyncio.run(worker.serve(stop))

    # What the log shows

    def records(self, topic: Topic) -> list[Any]:
        """All records of `topic` now, in offset order within each partition."""
        with closing(self.bus.reader([topic])) as reader:
            reader.start()
            return [message.record for batch in reader.read_to_end(Deadline.after(WAIT_S)) for message in batch]

    def requests(self, purpose: Purpose = Purpose.TRAIN) -> dict[int, RolloutRequest]:
        """By seq."""
        return {record.seq: record for record in self.records(REQUESTS) if record.purpose is purpose}

    def trajectories(self) -> list[Trajectory]:
        return self.records(TRAJECTORIES)

    def groups(self) -> dict[str, list[Trajectory]]:
        """By group id."""
        found: dict[str, list[Trajectory]] = {}
        for record in self.trajectories():
            found.setdefault(record.group_id, []).append(record)
        return found

    def statuses(self) -> list[WorkerStatus]:
        return self.records(WORKERS)

    def request(self, seq: int, **changes: Any) -> RolloutRequest:
        """A request as the feeder would make it."""
        purpose = changes.pop("purpose", Purpose.TRAIN)
        made = RolloutRequest(
            run_id=RUN,
            group_id=group_id_of(RUN, seq, purpose),
            seq=seq,
            purpose=purpose,
            task="letters",
            prompt_token_ids=pack_tokens([1, 2, 3]),
            group_size=2,
            sampling=Sampling(max_new_tokens=4),
            required_version=0,
            learner_version=0,
            issued_ms=time.time_ns() // 1_000_000,
        )
        return replace(made, **changes)

    def ask(self, *requests: RolloutRequest, partition: int = 0) -> None:
        for request in requests:
            self.publisher.publish(REQUESTS, request, partition=partition).wait(WAIT_S)

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the worker's metrics; 0 if it does not exist yet."""
        return self.worker_registry.get_sample_value(name, labels) or 0.0

    def begin_close(self) -> None:
        """Tell every role to end."""
        for thread in self.threads:
            thread.signal.set()

    def close(self) -> None:
        """Tell every role to end, and wait until it has."""
        self.begin_close()
        for thread in self.threads:
            thread.stop()
        self.publisher.close()

    @staticmethod
    def is_fenced(thread: Thread) -> bool:
        return isinstance(thread.error, UserError) and "Another feeder" in str(thread.error)
