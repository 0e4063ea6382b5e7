"""Bytes too large for one record: written to a topic in chunks, read back verified or not at all.

The chunks of a blob lie on one partition in order. Whoever writes the blob publishes its `BlobRef` afterwards, so that a reference never
names chunks that are not there. A reader checks every chunk and the whole, and leaves nothing behind when it fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from confluent_kafka import KafkaError, TopicPartition

from echo_bus import profiles
from echo_bus.clock import Clock, Deadline
from echo_bus.cluster import Cluster, RawConsumer, RawMessage
from echo_bus.errors import BlobCorrupt, DeadlineExceeded, OffsetLost, TransportError
from echo_bus.metrics import BusMetrics
from echo_bus.publisher import Publisher, wait_all
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidRecord
from echo_schemas.naming import Namespace
from echo_schemas.partitioning import partition_of
from echo_schemas.records import BlobRef, Chunk, ChunkRef, WeightFile
from echo_schemas.topics import BY_NAME, Topic

# What is left of a record's limit after the chunk's own fields.
CHUNK_BYTES = profiles.MAX_RECORD_BYTES - 1_000
# Above this many chunks the list itself no longer fits beside a manifest; it becomes a blob of its own.
MAX_INLINE_CHUNKS = 4_000
_FETCH_BATCH = 20
_FETCH_WAIT_S = 0.05


class BlobWriter:
    """Writes blobs through a publisher. Thread-safe."""

    def __init__(self, publisher: Publisher, *, metrics: BusMetrics, clock: Clock) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock

    def write(self, topic: Topic, run_id: str, blob: str, data: bytes | memoryview, *, timeout_s: float = 60.0) -> BlobRef:
        """Publish `data` in chunks of at most CHUNK_BYTES and wait until all are acknowledged.

        `blob` is the name within the run, part of every chunk's key; name it by content (`v/12/<sha12>`), so that writing it again is
        harmless. Raises DeliveryFailed or DeadlineExceeded; the chunks already written are then garbage that retention removes.
        """
        started_s = self._clock.monotonic_s()
        view = memoryview(data)
        pieces = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)] or [view]
        partition = partition_of(f"{run_id}/{blob}", self._publisher.num_partitions(topic))
        whole = hashlib.sha256()
        receipts, digests = [], []
        for index, piece in enumerate(pieces):
            whole.update(piece)
            digest = hashlib.sha256(piece).hexdigest()
            chunk = Chunk(run_id=run_id, blob=blob, index=index, num_chunks=len(pieces), sha256=digest, data=bytes(piece))
            receipts.append(self._publisher.publish(topic, chunk, partition=partition))
            digests.append(digest)
        try:
            where = wait_all(receipts, Deadline.after(timeout_s, self._clock))
        except TransportError as exc:
            self._metrics.blob_failures.labels("write", type(exc).__name__).inc()
            raise
        self._metrics.blob_bytes.labels("write").inc(len(view))
        self._metrics.blob_seconds.labels("write").observe(self._clock.monotonic_s() - started_s)
        return BlobRef(
            topic=topic.name,
            partition=partition,
            blob=blob,
            num_bytes=len(view),
            sha256=whole.hexdigest(),
            num_chunks=len(pieces),
            first_offset=min(place.offset for place in where),
            last_offset=max(place.offset for place in where),
            chunks=tuple(
                ChunkRef(index=index, offset=place.offset, num_bytes=len(piece), sha256=digest)
                for index, (place, piece, digest) in enumerate(zip(where, pieces, digests, strict=True))
            ),
        )


class BlobReader:
    """Reads blobs. Each read opens a consumer of its own, so any thread may read at any time."""

    def __init__(self, cluster: Cluster, *, namespace: Namespace, codec: Codec, metrics: BusMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._codec = codec
        self._metrics = metrics
        self._clock = clock

    def read(self, ref: BlobRef, run_id: str, *, timeout_s: float = 60.0) -> bytes:
        """The blob's bytes. Raises BlobCorrupt, OffsetLost (retention took it) or DeadlineExceeded."""
        return b"".join(self._pieces(ref, run_id, Deadline.after(timeout_s, self._clock)))

    def read_files(self, ref: BlobRef, run_id: str, files: Sequence[WeightFile], folder: Path, *, timeout_s: float = 60.0) -> Path:
        """Split the blob into `files` inside the new folder `folder`, every file verified. Atomic: `folder` is whole or absent.

        Raises as `read` does; FileExistsError if `folder` exists.
        """
        if folder.exists():
            raise FileExistsError(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the rename stays on one file system.
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            _write_files(self._pieces(ref, run_id, Deadline.after(timeout_s, self._clock)), files, staging)
            staging.rename(folder)
        except BaseException:  # whatever ends the read, an interrupt included, must leave nothing behind
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return folder

    def _pieces(self, ref: BlobRef, run_id: str, deadline: Deadline) -> Iterator[bytes]:
        """The chunks' data in order, each verified before it is handed on, the whole verified at the end."""
        started_s = self._clock.monotonic_s()
        whole = hashlib.sha256()
        expected = {chunk.index: chunk.sha256 for chunk in ref.chunks}
        try:
            for chunk in self._chunks(ref, run_id, deadline):
                digest = hashlib.sha256(chunk.data).hexdigest()
                if digest != expected.get(chunk.index, chunk.sha256):
                    raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} does not have the promised checksum.")
                whole.update(chunk.data)
                yield chunk.data
            if whole.hexdigest() != ref.sha256:
                raise BlobCorrupt(f"The blob {ref.blob} does not have the promised checksum.")
        except TransportError as exc:
            self._metrics.blob_failures.labels("read", type(exc).__name__).inc()
            raise
        self._metrics.blob_bytes.labels("read").inc(ref.num_bytes)
        self._metrics.blob_seconds.labels("read").observe(self._clock.monotonic_s() - started_s)

    def _chunks(self, ref: BlobRef, run_id: str, deadline: Deadline) -> Iterator[Chunk]:
        """The blob's chunks by index; repeated and foreign ones between them are passed over."""
        topic = BY_NAME.get(ref.topic)
        if topic is None:
            raise BlobCorrupt(f"The blob {ref.blob} names the topic {ref.topic!r}, which is not one of ours.")
        consumer = self._cluster.consumer({**profiles.BLOB_READER, "client.id": f"{self._namespace.name}.blobs"})
        try:
            consumer.assign([TopicPartition(self._namespace.topic(topic), ref.partition, ref.first_offset)])
            wanted = 0
            for message in _messages(consumer, ref, deadline):
                chunk = self._decode(message, ref)
                if chunk is None or chunk.run_id != run_id or chunk.blob != ref.blob or chunk.index != wanted:
                    continue
                if chunk.num_chunks != ref.num_chunks:
                    raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} belongs to {chunk.num_chunks} chunks, not {ref.num_chunks}.")
                yield chunk
                wanted += 1
                if wanted == ref.num_chunks:
                    return
            raise BlobCorrupt(f"Chunk {wanted} of {ref.num_chunks} of {ref.blob} is not in the log.")
        finally:
            consumer.close()

    def _decode(self, message: RawMessage, ref: BlobRef) -> Chunk | None:
        try:
            record = self._codec.decode(message.value())
        except InvalidRecord as exc:
            raise BlobCorrupt(f"Offset {message.offset()}, inside the blob {ref.blob}, is not a chunk: {exc.message}") from exc
        return record if isinstance(record, Chunk) else None


def _messages(consumer: RawConsumer, ref: BlobRef, deadline: Deadline) -> Iterator[RawMessage]:
    """Messages from the blob's first to its last offset, and no further."""
    while True:
        for message in consumer.consume(_FETCH_BATCH, min(_FETCH_WAIT_S, deadline.remaining_s())):
            error = message.error()
            if error is not None:
                if error.code() in {KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE}:  # noqa: SLF001  public in librdkafka
                    raise OffsetLost(
                        f"Retention has removed the blob {ref.blob} (offset {ref.first_offset} of partition {ref.partition}).",
                        hint="Raise bytes_per_partition of the topic, or publish the snapshot again.",
                    )
                if not error.retriable():
                    raise TransportError(f"The blob {ref.blob} could not be read: {error.str()}.")
                continue
            if (message.offset() or 0) > ref.last_offset:
                return
            yield message
            if message.offset() == ref.last_offset:
                return
        if deadline.expired():
            raise DeadlineExceeded(f"The blob {ref.blob} was not read in time.")


def _write_files(pieces: Iterator[bytes], files: Sequence[WeightFile], folder: Path) -> None:
    """Cut the stream into files by size, verify each, and make them durable."""
    rest = memoryview(b"")
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        digest, missing = hashlib.sha256(), file.num_bytes
        with path.open("xb") as out:
            while missing:
                if not rest:
                    piece = next(pieces, None)
                    if piece is None:
                        raise BlobCorrupt(f"The blob ends {missing} bytes before {file.name} does.")
                    rest = memoryview(piece)
                part, rest = rest[:missing], rest[missing:]
                digest.update(part)
                out.write(part)
                missing -= len(part)
            out.flush()
            os.fsync(out.fileno())
        if digest.hexdigest() != file.sha256:
            raise BlobCorrupt(f"The file {file.name} does not have the promised checksum.")
    # Runs the stream to its end, where the checksum of the whole is compared.
    if rest or next(pieces, None) is not None:
        raise BlobCorrupt("The blob holds more bytes than its files.")
