"""The processes of the rollout plane: `run_worker` samples, `run_feeder` asks.

A worker's start decides when a run begins, and the engine's import is the longest part of it. So the import begins first, on a thread, and
the rest is opened meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from echo_bus.blobs.transfer import BlobReader
from echo_bus.bus import Bus
from echo_rollout.engines.catalogue import open_engine, prefetch
from echo_rollout.engines.engine import EngineConfig
from echo_rollout.feeder import Feeder
from echo_rollout.joining import Namesake
from echo_rollout.journal import CrashJournal, journals_folder
from echo_rollout.metrics import FeederMetrics, WorkerMetrics
from echo_rollout.snapshot_folders import snapshot_folder
from echo_rollout.weights.deltas import DeltaSource
from echo_rollout.weights.peers.opening import open_peers
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.sources import PublishedSource, SnapshotSource, published_manifest
from echo_rollout.worker import Worker
from echo_rollout.worker_parts import WorkerParts
from echo_runtime.ownership import Turn
from echo_runtime.process import RoleProcess
from echo_schemas.errors import EchoError, UserError
from echo_schemas.records import Progress, WeightKind, WeightManifest, WorkerStatus
from echo_schemas.topics import PROGRESS, WEIGHT_CHUNKS, WEIGHTS, WORKERS, weights_key
from echo_settings import Settings
from echo_settings.rules import evaluation_specs, staleness_policy
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import load_evaluation_tasks, load_task
from echo_tasks.prompts import PromptCodec, check_positions, vocabulary_size

logger = logging.getLogger(__name__)

# Assumed size of an adapter; it decides only whether shared memory is used.
_ADAPTER_BYTES = 256 << 20


def run_worker(process: RoleProcess, *, worker_id: str, kind: str = "") -> None:
    """Sample until `process.stop`. `worker_id` is unique in the run, and the same again after a restart. `kind`: as in [[rollout.pool]],
    for the worker's status; the settings of `process` are those of this kind.

    Raises UserError where the settings cannot be served here, TransportError or EngineError where the worker cannot go on; then requests
    in hand are delivered again.
    """
    settings = process.settings
    importing = threading.Thread(target=_prefetch, args=(settings.rollout.engine,), name="engine import", daemon=True)
    importing.start()
    base = resolve_base(settings.policy.base)
    task = load_task(settings.task.name, settings.task.options)
    evaluation_tasks = load_evaluation_tasks(evaluation_specs(settings))
    codec = PromptCodec(base)
    vocabulary = vocabulary_size(base)
    check_positions(base, settings.policy.max_length)
    with ExitStack() as stack:
        folder = stack.enter_context(snapshot_folder(_snapshot_bytes(settings, base)))
        process.scratch.append(folder)
        journals = journals_folder(process.bus, settings.run.name)
        journal = stack.enter_context(closing(CrashJournal(journals / f"{worker_id}.journal")))
        reader = stack.enter_context(closing(process.bus.blob_reader()))
        reader.warm(WEIGHT_CHUNKS)
        importing.join()
        source, metrics = PublishedSource(reader, settings.store.uri), WorkerMetrics(process.registry)
        peers = open_peers(settings, process.bus, source, stack, worker_id=worker_id, metrics=metrics, clock=process.clock)
        worker = Worker(
            WorkerParts(
                settings=settings,
                worker_id=worker_id,
                engine_name=settings.rollout.engine,
                bus=process.bus,
                engine=open_engine(settings.rollout.engine, engine_config(settings, base)),
                task=task,
                codec=codec,
                vocabulary=vocabulary,
                source=source,
                journal=journal,
                folder=folder,
                places=process.places,
                notices=process.notices,
                metrics=metrics,
                clock=process.clock,
                newest_source=newest_source(source, reader, peers, process.bus, settings.run.name, metrics),
                peer_address=peers.address if peers else "",
                kind=kind,
                may_join=_may_join(process, worker_id, stack),
                evaluation_tasks=evaluation_tasks,
            )
        )
        process.ready_checks["worker"] = worker.problem
        asyncio.run(worker.serve(process.stop))


def newest_source(
    source: PublishedSource, reader: BlobReader, peers: PeerSource | None, bus: Bus, run_id: str, metrics: WorkerMetrics
) -> SnapshotSource:
    """The source of the newest version: a delta on the version before, else peers, else the log or the store."""
    return DeltaSource(
        peers or source,
        reader,
        manifest_of=partial(published_manifest, bus, run_id),
        on_built=peers.hold if peers is not None else lambda _manifest, _folder: None,
        metrics=metrics,
    )


def _may_join(process: RoleProcess, worker_id: str, stack: ExitStack) -> Callable[[], bool]:
    """Whether a worker may join the consumer group. One that was started together with a learner waits until the learner has accepted the
    run. Raises UserError while another worker of the same name is alive.
    """
    namesake = stack.enter_context(closing(Namesake(process.bus, worker_id, socket.gethostname())))
    has_come = stack.enter_context(closing(Turn(process, needs_learner=True))).has_come if process.start else lambda: True

    def may_join() -> bool:
        namesake.check()
        if not has_come():
            return False
        namesake.close()
        return True

    return may_join


def engine_config(settings: Settings, base: Path) -> EngineConfig:
    """How the run's engine is opened."""
    return EngineConfig(
        base=base,
        kind=WeightKind(settings.policy.update),
        dtype=settings.policy.dtype,
        max_length=settings.policy.max_length,
        lora_rank=settings.policy.lora.r,
        concurrency=settings.rollout.groups_in_flight * settings.rollout.group_size,
        options=dict(settings.rollout.options),
        devices=tuple(each.device() for each in settings.rollout.devices),
        notes_experts=settings.policy.replay_experts,
    )


def _snapshot_bytes(settings: Settings, base: Path) -> int:
    """About the size of the run's snapshots: that of the base model, or of an adapter."""
    if settings.policy.update != "full":
        return _ADAPTER_BYTES
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))


def run_feeder(process: RoleProcess) -> None:
    """Issue the run's requests until `process.stop`, or until the run is told to stop.

    Raises UserError in sequential mode, and when another feeder has taken the run over.
    """
    settings = process.settings
    if settings.run.mode != "asynchronous":
        raise UserError("A feeder has nothing to do in sequential mode, where the learner asks.", hint="Start no feeder for this run.")
    bus = process.bus
    with ExitStack() as stack:
        feeder = Feeder(
            settings=settings,
            policy=staleness_policy(settings),
            task=load_task(settings.task.name, settings.task.options),
            prompts=PromptCodec(resolve_base(settings.policy.base)),
            bus=bus,
            writer=stack.enter_context(closing(bus.transactions("feeder"))),
            observer=stack.enter_context(closing(bus.observer())),
            progress=stack.enter_context(closing(bus.view(PROGRESS, Progress))),
            weights=stack.enter_context(closing(bus.view(WEIGHTS, WeightManifest, only=weights_key(settings.run.name, None)))),
            workers=stack.enter_context(closing(bus.view(WORKERS, WorkerStatus))),
            control=stack.enter_context(closing(bus.orders())),
            places=process.places,
            notices=process.notices,
            metrics=FeederMetrics(process.registry),
            clock=process.clock,
        )
        feeder.run(process.stop)


def _prefetch(name: str) -> None:
    """Import the engine's library ahead of time. An error comes again, and is reported, when the engine is opened."""
    try:
        prefetch(name)
    except (EchoError, ImportError) as exc:
        logger.debug("The engine %s could not be imported ahead of time: %s", name, exc)
