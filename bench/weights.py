"""Publish → acknowledged: how long a new version takes from its first chunk to the worker's word on `workers`.

    python bench/weights.py [--json FILE]

The publisher and the watcher are processes of their own, on the embedded broker; the watcher is the worker's own, with an engine that
loads nothing: what is measured is chunks, manifest, fetch, verification, files in shared memory, and the acknowledgement. The snapshot's
checksum is made before the clock starts: the learner has it from its checkpoint.

Beside it a bare loop, in turn with the rounds: the same bytes in records of the same size through one partition with
confluent-kafka alone, read back, hashed once and written to shared memory.

Stages: publish (chunks acknowledged), commit (manifest), see (fetch begins), fetch (verified files), acknowledge (seen by the publisher).
Processor time is given beside them, because on a machine that others use it says more than the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import itertools
import json
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from prometheus_client import CollectorRegistry

from echo_bus.blobs.transfer import CHUNK_BYTES, BlobReader
from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.kafka import KafkaCluster
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
from echo_schemas.naming import Namespace
from echo_schemas.records import BlobRef, WeightFile, WeightKind, WeightManifest, WorkerStatus
from echo_schemas.topics import WEIGHT_CHUNKS, WEIGHTS, WORKERS, weights_key

RUN, NAMESPACE = "bench", "bench.weights"
SIZES = {"demo_adapter_s": 557_000, "adapter_66mb_s": 66_000_000}
CONFIG = b'{"r": 32}' * 100
STAGES = ("publish", "commit", "see", "fetch", "acknowledge")
CPU_STAGES = ("publish_cpu", "fetch_cpu")
ROUNDS = 9
# The files' checksums are made before the clock starts; where the blob lies is known only after.
_NOWHERE = BlobRef(topic="", partition=0, blob="", num_bytes=0, sha256="", num_chunks=0, first_offset=0, last_offset=0)
_CONTEXT = mp.get_context("spawn")


def bus_of(bootstrap: str, role: str) -> Bus:
    """A bus for one process of the benchmark."""
    return Bus(
        cluster=KafkaCluster(bootstrap),
        namespace=Namespace(NAMESPACE),
        role=role,
        run_id=RUN,
    )


class TimedSource(PublishedSource):
    """Tells when each fetch began and ended; the monotonic clock is the machine's, so that other processes understand it."""

    def __init__(self, reader: BlobReader, times: Connection) -> None:
        super().__init__(reader)
        self._times = times

    def fetch(self, manifest: WeightManifest, folder: Path) -> None:
        started_s, started_cpu_s = time.monotonic(), time.process_time()
        super().fetch(manifest, folder)
        self._times.send((manifest.version, started_s, time.monotonic(), time.process_time() - started_cpu_s))


def watch(bootstrap: str, times: Connection) -> None:
    """A worker's watcher, until terminated."""
    asyncio.run(_watch(bus_of(bootstrap, "worker"), times))


async def _watch(bus: Bus, times: Connection) -> None:
    clock, registry, loop = SystemClock(), CollectorRegistry(), asyncio.get_running_loop()
    places = PlaceTimes(registry, clock)
    status = first_status(run_id=RUN, worker_id="w0", engine="scripted", price_per_hour=0.0)
    heartbeat = WorkerHeartbeat(bus.publisher(profiles.PRODUCER_LATENCY), status, GenerationTime(places, clock), clock, every_s=1.0)
    heartbeat.start()
    view = bus.view(WEIGHTS, WeightManifest)

    def acknowledge(ref: SnapshotRef) -> None:
        heartbeat.change(installed_version=ref.version, weights_sha256=ref.sha256)

    with snapshot_folder(1 << 28) as folder:
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
    """Seconds for `data` through one partition of the chunks' topic: produced, fetched, hashed once, written."""
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


def manifest_of(version: int, files: dict[str, bytes], blob: BlobRef) -> WeightManifest:
    """What the learner would publish."""
    return WeightManifest(
        run_id=RUN,
        version=version,
        kind=WeightKind.LORA,
        files=tuple(
            WeightFile(name=name, num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()) for name, content in files.items()
        ),
        num_bytes=blob.num_bytes,
        sha256=blob.sha256,
        blob=blob,
        session="bench",
        checkpoint="bench",
        next_seq=0,
        created_ms=time.time_ns() // 1_000_000,
    )


def measure(bootstrap: str, times: Connection) -> dict[str, float]:
    """Median seconds per size over `ROUNDS` versions, all and by stage; two more warm everything up."""
    bus, results = bus_of(bootstrap, "learner"), {}
    versions = itertools.count()
    with (
        closing(bus.publisher(profiles.PRODUCER_BLOBS)) as chunks,
        closing(bus.transactions("learner")) as writer,
        closing(bus.view(WORKERS, WorkerStatus)) as workers,
    ):
        writer.start()
        for name, num_bytes in SIZES.items():
            rounds, bare = [], []
            for _ in range(ROUNDS + 2):
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
    """Seconds of each stage for one version, then processor seconds of the two processes while they publish and fetch."""
    files = files_of(num_bytes)
    data = b"".join(files.values())
    sha256 = hashlib.sha256(data).hexdigest()
    template = manifest_of(version, files, _NOWHERE)
    started_s, started_cpu_s = time.monotonic(), time.process_time()
    blob = bus.blob_writer(chunks).write(WEIGHT_CHUNKS, RUN, f"v/{version}/{sha256[:12]}", data, sha256=sha256)
    published_s, publish_cpu_s = time.monotonic(), time.process_time() - started_cpu_s
    manifest = dataclasses.replace(template, num_bytes=num_bytes, sha256=sha256, blob=blob)
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
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        watcher = _CONTEXT.Process(target=watch, args=(kafka.bootstrap, theirs), daemon=True)
        watcher.start()
        results = measure(kafka.bootstrap, ours)
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
