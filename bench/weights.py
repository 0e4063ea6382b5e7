"""Publish → acknowledged: the time of a new version from its first chunk to the worker's acknowledgement on `workers`.

    python bench/weights.py [--rounds N] [--json FILE]

The publisher and the watcher are separate processes, on the embedded broker; the watcher is the worker's, with an engine that loads
nothing: it measures chunks, manifest, fetch, verification, files in shared memory, and the acknowledgement. The snapshot's checksum is
computed before the clock starts: the learner has it from its checkpoint.

In turn with the rounds, a bare loop: the same bytes in records of the same size through one partition with confluent-kafka alone, read
back, hashed once and written to shared memory.

Stages: publish (chunks acknowledged), commit (manifest), see (fetch begins), fetch (verified files), acknowledge (seen by the publisher).
It also gives processor time, which is more reliable than the clock on a shared machine.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import itertools
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

from buses import RUN, bus_of, create_topics
from command import parser_of, save
from confluent_kafka import Consumer, Producer, TopicPartition
from payload import make_manifest
from prometheus_client import CollectorRegistry

from echo_bus.blobs.transfer import CHUNK_BYTES, BlobReader
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.publisher import Publisher
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Deadline, SystemClock
from echo_bus.reading.view import CompactedView
from echo_embedded import EmbeddedKafka
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.heartbeat import GenerationTime, WorkerHeartbeat, first_status
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.snapshot_folders import snapshot_folder
from echo_rollout.weights.sources import PublishedSource
from echo_rollout.weights.watcher import WeightWatcher
from echo_runtime.notices import Notices
from echo_runtime.places import PlaceTimes
from echo_schemas.records import WeightManifest, WorkerStatus
from echo_schemas.topics import WEIGHT_CHUNKS, WEIGHTS, WORKERS, weights_key

NAMESPACE = "bench.weights"
SIZES = {"demo_adapter_s": 557_000, "adapter_66mb_s": 66_000_000}
CONFIG = b'{"r": 32}' * 100
STAGES = ("publish", "commit", "see", "fetch", "acknowledge")
CPU_STAGES = ("publish_cpu", "fetch_cpu")
_ROOM_BYTES = 1 << 28
_CONTEXT = mp.get_context("spawn")


class TimedSource(PublishedSource):
    """Sends the times at which each fetch began and ended, by the monotonic clock, which all processes of a machine share."""

    def __init__(self, reader: BlobReader, times: Connection) -> None:
        super().__init__(reader)
        self._times = times

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        super().fetch(manifest, folder)
        self._times.send((manifest.version, started_s, time.monotonic(), time.process_time() - started_cpu_s))


def watch(bootstrap: str, times: Connection, folder: Path) -> None:
    """A worker's watcher, until terminated; `folder` is for the snapshots."""
    asyncio.run(_watch(bus_of(bootstrap, NAMESPACE, "worker"), times, folder))


async def _watch(bus: Bus, times: Connection, folder: Path) -> None:
    clock, registry, loop = SystemClock(), CollectorRegistry(), asyncio.get_running_loop()
    places = PlaceTimes(registry, clock)
    status = first_status(run_id=RUN, worker_id="w0", engine="scripted", price_per_hour=0.0)
    heartbeat = WorkerHeartbeat(bus.publisher(profiles.PRODUCER_LATENCY), status, GenerationTime(places, clock), clock, every_s=1.0)
    heartbeat.start()
    view = bus.view(WEIGHTS, WeightManifest)

    def acknowledge(ref: SnapshotRef) -> None:
        heartbeat.change(installed_version=ref.version, weights_sha256=ref.sha256)

    reader = bus.blob_reader()
    reader.warm(WEIGHT_CHUNKS)
    watcher = WeightWatcher(
        ScriptedEngine(),
        TimedSource(reader, times),
        newest=lambda: view.get(weights_key(RUN, None)),
        folder=folder,
        on_installed=acknowledge,
        places=places,
        notices=Notices(),
        metrics=WorkerMetrics(registry),
        clock=clock,
    )

    def wake(key: str, manifest: WeightManifest | None) -> None:
        del key, manifest
        loop.call_soon_threadsafe(watcher.wake)

    view.on_change(wake)
    await watcher.run()


def bare_loop(bootstrap: str, data: bytes) -> float:
    """The seconds of `data` through one partition of the chunks' topic: produced, fetched, hashed once, written."""
    topic, view = f"{NAMESPACE}.{WEIGHT_CHUNKS.name}", memoryview(data)
    pieces = [bytes(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES)]
    common = {"bootstrap.servers": bootstrap}
    producer = Producer({**common, "acks": "all", "enable.idempotence": True, "linger.ms": 0, "message.max.bytes": 1_000_000})
    producer.list_topics(topic, timeout=10)
    consumer = Consumer({**common, "group.id": "bare", "enable.auto.commit": False, "fetch.wait.max.ms": 5})
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)
        started_s = time.monotonic()
        for piece in pieces:
            producer.produce(topic, piece, partition=0)
        producer.flush()
        consumer.assign([TopicPartition(topic, 0, end)])
        digest, num_read = hashlib.sha256(), 0
        with tempfile.NamedTemporaryFile(dir="/dev/shm") as out:
            while num_read < len(pieces):
                for message in consumer.consume(20, 0.005):
                    value = message.value() or b""
                    digest.update(value)
                    out.write(value)
                    num_read += 1
        return time.monotonic() - started_s
    finally:
        consumer.close()


def files_of(num_bytes: int) -> dict[str, bytes]:
    """An adapter of `num_bytes`, as the learner writes it."""
    return {"adapter_model.safetensors": os.urandom(num_bytes - len(CONFIG)), "adapter_config.json": CONFIG}


def measure(bootstrap: str, times: Connection, num_rounds: int) -> dict[str, float]:
    """Median seconds per size over `num_rounds` versions, in all and by stage, after two as warm-up."""
    bus, results = bus_of(bootstrap, NAMESPACE, "learner"), {}
    versions = itertools.count()
    with (
        closing(bus.publisher(profiles.PRODUCER_BLOBS)) as chunks,
        closing(bus.transactions("learner")) as writer,
        closing(bus.view(WORKERS, WorkerStatus)) as workers,
    ):
        writer.start()
        for name, num_bytes in SIZES.items():
            rounds, bare = [], []
            for _ in range(num_rounds + 2):
                rounds.append(_round(bus, chunks, writer, workers, next(versions), num_bytes, times))
                bare.append(bare_loop(bootstrap, os.urandom(num_bytes)))
            del rounds[:2], bare[:2]
            results[name] = statistics.median(sum(stages[: len(STAGES)]) for stages in rounds)
            for number, stage in enumerate(STAGES + CPU_STAGES):
                results[name.removesuffix("_s") + f"_{stage}_s"] = statistics.median(stages[number] for stages in rounds)
            results[name.removesuffix("_s") + "_bare_s"] = statistics.median(bare)
    return results


def _round(
    bus: Bus,
    chunks: Publisher,
    writer: TransactionalWriter,
    workers: CompactedView[WorkerStatus],
    version: int,
    num_bytes: int,
    times: Connection,
) -> tuple[float, ...]:
    """The seconds of each stage for one version, then the processor seconds of publishing and fetching."""
    files = files_of(num_bytes)
    data = b"".join(files.values())
    # All checksums are computed before the clock starts.
    template = make_manifest(version, files)
    sha256 = template.sha256
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    blob = bus.blob_writer(chunks).write(WEIGHT_CHUNKS, RUN, f"v/{version}/{sha256[:12]}", data, sha256=sha256)
    published_s, publish_cpu_s = time.monotonic(), time.process_time() - started_cpu_s
    manifest = dataclasses.replace(template, blob=blob)
    with writer.transaction() as transaction:
        for key in (weights_key(RUN, version), weights_key(RUN, None)):
            transaction.publish(WEIGHTS, manifest, key=key)
    committed_s = time.monotonic()
    workers.wait_for("w0", lambda status: status.installed_version == version, Deadline.after(60))
    ended_s = time.monotonic()
    fetched, fetch_started_s, fetch_ended_s, fetch_cpu_s = times.recv()
    if fetched != version:
        raise RuntimeError(f"Version {fetched} was fetched while {version} was published.")
    moments = (started_s, published_s, committed_s, fetch_started_s, fetch_ended_s, ended_s)
    return (*(after - before for before, after in itertools.pairwise(moments)), publish_cpu_s, fetch_cpu_s)


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="versions of each size; two more are not counted")
    arguments = parser.parse_args()
    # The folder belongs to this process: the watcher is terminated, and would leave its snapshots in shared memory.
    with EmbeddedKafka() as kafka, snapshot_folder(_ROOM_BYTES) as folder:
        topics = {WEIGHTS: 1, WEIGHT_CHUNKS: 4, WORKERS: 1}
        create_topics(bus_of(kafka.bootstrap, NAMESPACE), {f"{NAMESPACE}.{topic.name}": count for topic, count in topics.items()})
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        watcher = _CONTEXT.Process(target=watch, args=(kafka.bootstrap, theirs, folder), daemon=True)
        watcher.start()
        results = measure(kafka.bootstrap, ours, arguments.rounds)
        watcher.terminate()
        watcher.join(10)
    for name, value in results.items():
        print(f"{name} {value:.3f}")
    save(arguments.json, results)


if __name__ == "__main__":
    main()
