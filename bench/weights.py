"""Publish → acknowledged: how long a new version takes from its first chunk to the worker's word on `workers`.

    python bench/weights.py [--json FILE]

The publisher and the watcher are processes of their own, on the embedded broker; the watcher is the worker's own, with an engine that
loads nothing: what is measured is chunks, manifest, fetch, verification, files in shared memory, and the acknowledgement.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from echo_bus import profiles
from echo_bus.bus import Bus
from echo_bus.clock import Deadline, SystemClock
from echo_bus.embedded import EmbeddedKafka
from echo_bus.kafka import KafkaCluster
from echo_bus.metrics import BusMetrics
from echo_bus.places import PlaceTimes
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.heartbeat import GenerationTime, Heartbeat, first_status
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights import LogSource, WeightWatcher, snapshot_folder
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import WeightFile, WeightKind, WeightManifest, WorkerStatus
from echo_schemas.topics import WEIGHT_CHUNKS, WEIGHTS, WORKERS, weights_key

RUN, NAMESPACE = "bench", "bench.weights"
SIZES = {"demo_adapter_s": 557_000, "adapter_66mb_s": 66_000_000}
ROUNDS = 9
_CONTEXT = mp.get_context("spawn")


def bus_of(bootstrap: str, role: str) -> Bus:
    """A bus for one process of the benchmark."""
    return Bus(
        cluster=KafkaCluster(bootstrap),
        namespace=Namespace(NAMESPACE),
        codec=lock_file_codec(),
        metrics=BusMetrics(),
        clock=SystemClock(),
        role=role,
        run_id=RUN,
    )


def watch(bootstrap: str) -> None:
    """A worker's watcher, until terminated."""
    asyncio.run(_watch(bus_of(bootstrap, "worker")))


async def _watch(bus: Bus) -> None:
    clock, registry, loop = SystemClock(), CollectorRegistry(), asyncio.get_running_loop()
    places = PlaceTimes(registry, clock)
    status = first_status(run_id=RUN, worker_id="w0", engine="scripted", price_per_hour=0.0)
    heartbeat = Heartbeat(bus.publisher(profiles.PRODUCER_LATENCY), status, GenerationTime(places, clock), clock, every_s=1.0)
    heartbeat.start()
    view = bus.view(WEIGHTS, WeightManifest)

    def acknowledge(ref: SnapshotRef) -> None:
        heartbeat.change(installed=(ref.version, ref.sha256))

    folder = snapshot_folder(1 << 28)
    watcher = WeightWatcher(
        ScriptedEngine(),
        LogSource(bus.blob_reader()),
        newest=lambda: view.get(weights_key(RUN, None)),
        folder=folder,
        on_installed=acknowledge,
        places=places,
        metrics=WorkerMetrics(registry),
        clock=clock,
    )

    def wake(key: str, manifest: WeightManifest | None) -> None:
        del key, manifest
        loop.call_soon_threadsafe(watcher.wake)

    view.on_change(wake)
    try:
        await watcher.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(bus: Bus) -> dict[str, float]:
    """Median seconds per size over `ROUNDS` versions; two more warm everything up."""
    results = {}
    version = 0
    with (
        closing(bus.publisher(profiles.PRODUCER_BLOBS)) as chunks,
        closing(bus.transactions("learner")) as writer,
        closing(bus.view(WORKERS, WorkerStatus)) as workers,
    ):
        writer.start()
        for name, num_bytes in SIZES.items():
            seconds = []
            for _ in range(ROUNDS + 2):
                data = os.urandom(num_bytes)
                sha256 = hashlib.sha256(data).hexdigest()
                started_s = time.monotonic()
                blob = bus.blob_writer(chunks).write(WEIGHT_CHUNKS, RUN, f"v/{version}/{sha256[:12]}", data)
                manifest = WeightManifest(
                    run_id=RUN,
                    version=version,
                    kind=WeightKind.LORA,
                    files=(WeightFile(name="adapter_model.safetensors", num_bytes=num_bytes, sha256=sha256),),
                    num_bytes=num_bytes,
                    sha256=sha256,
                    blob=blob,
                    session="bench",
                    checkpoint="bench",
                    next_seq=0,
                    created_ms=time.time_ns() // 1_000_000,
                )
                with writer.transaction() as transaction:
                    for key in (weights_key(RUN, version), weights_key(RUN, None)):
                        transaction.publish(WEIGHTS, manifest, key=key)
                wanted = version
                workers.wait_for("w0", lambda status, wanted=wanted: status.installed_version == wanted, Deadline.after(60))  # type: ignore[misc]
                seconds.append(time.monotonic() - started_s)
                version += 1
            results[name] = statistics.median(seconds[2:])
    return results


def create_topics(bootstrap: str) -> None:
    """The topics that are used, with one partition, or four for chunks."""
    from confluent_kafka.admin import NewTopic

    admin: Any = KafkaCluster(bootstrap).admin()
    topics = [NewTopic(f"{NAMESPACE}.{topic.name}", 4 if topic is WEIGHT_CHUNKS else 1, 1) for topic in (WEIGHTS, WEIGHT_CHUNKS, WORKERS)]
    for future in admin.create_topics(topics).values():
        future.result(20)


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the medians here")
    arguments = parser.parse_args()
    kafka = EmbeddedKafka().start()
    try:
        create_topics(kafka.bootstrap)
        watcher = _CONTEXT.Process(target=watch, args=(kafka.bootstrap,), daemon=True)
        watcher.start()
        results = measure(bus_of(kafka.bootstrap, "learner"))
        watcher.terminate()
        watcher.join(10)
    finally:
        kafka.stop()
    for name, value in results.items():
        sys.stdout.write(f"{name} {value:.3f}\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
