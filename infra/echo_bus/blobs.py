"""Bytes too large for one record: written to a topic in chunks, read back verified or not at all.

The chunks of a blob lie on one partition in order. Whoever writes the blob publishes its `BlobRef` afterwards, so that a reference never
names chunks that are not there. A reader checks the whole and every file, and leaves nothing behind when it fails.

    write   digests of chunks (two threads) ──▶ encoded and published by the caller, in order ──▶ all acknowledged
    read    fetched, decoded and written to files by the caller ──▶ digests of the whole and of files, on threads beside it

The bytes are hashed once for each digest that does not follow from another: the first file's is that of the whole up to its end, and a
blob whose whole is right has no wrong chunk. Chunks are hashed by a reader only to name the one that is wrong.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NoReturn, cast

from echo_bus import profiles
from echo_bus.blob_cursor import BlobCursor, lost
from echo_bus.blob_digests import StreamDigest, sha256_of
from echo_bus.clock import Clock, Deadline
from echo_bus.cluster import Cluster, RawConsumer, RawMessage
from echo_bus.consumer_queries import num_partitions, watermarks
from echo_bus.errors import BlobCorrupt, TransportError
from echo_bus.metrics import BusMetrics
from echo_bus.publisher import Publisher, Receipt, wait_all
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
_HASHING_THREADS = 2
_FETCH_BYTES = 8 << 20
_READING = {
    "enable.partition.eof": True,
    # A fetch that waits at the end of one partition holds up the next blob, on another: a client that is kept must not wait there long.
    "fetch.wait.max.ms": 5,
    # A fetch is handed on when all of it is there. In pieces, the next one travels while this one is hashed, and its memory is used again.
    "fetch.max.bytes": _FETCH_BYTES,
    "max.partition.fetch.bytes": _FETCH_BYTES,
}


class BlobWriter:
    """Writes blobs through a publisher. Thread-safe."""

    def __init__(self, publisher: Publisher, *, metrics: BusMetrics, clock: Clock) -> None:
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._known: set[tuple[str, int]] = set()
        """(topic, partition) whose leader knows the producer."""

    def write(
        self, topic: Topic, run_id: str, blob: str, data: bytes | memoryview, *, sha256: str | None = None, timeout_s: float = 60.0
    ) -> BlobRef:
        """Publish `data` in chunks of at most CHUNK_BYTES and wait until all are acknowledged.

        `blob` is the name within the run, part of every chunk's key; name it by content (`v/12/<sha12>`), so that writing it again is
        harmless. `sha256`: that of `data`, from a caller that knows it; readers compare it. Raises DeliveryFailed or DeadlineExceeded; the
        chunks already written are then garbage that retention removes.
        """
        started_s = self._clock.monotonic_s()
        view = memoryview(data)
        pieces = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)] or [view]
        partition = partition_of(f"{run_id}/{blob}", self._publisher.num_partitions(topic))
        receipts: list[Receipt] = []
        digests: list[str] = []
        deadline = Deadline.after(timeout_s, self._clock)
        with ExitStack() as stack:
            pool = ThreadPoolExecutor(_HASHING_THREADS + 1, thread_name_prefix="blob digests")
            stack.callback(pool.shutdown, cancel_futures=True)
            whole = None if sha256 is not None else pool.submit(sha256_of, view)
            try:
                for index, (piece, digest) in enumerate(zip(pieces, pool.map(sha256_of, pieces), strict=True)):
                    # The codec copies any buffer into the record; a `bytes` of it would be one copy more.
                    chunk = Chunk(run_id=run_id, blob=blob, index=index, num_chunks=len(pieces), sha256=digest, data=cast("bytes", piece))
                    receipts.append(self._publisher.publish(topic, chunk, partition=partition))
                    digests.append(digest)
                    if (topic.name, partition) not in self._known:
                        # Several at once are safe only behind one that the leader has taken: see `profiles`.
                        wait_all(receipts, deadline)
                        self._known.add((topic.name, partition))
                where = wait_all(receipts, deadline)
            except TransportError as exc:
                self._metrics.blob_failures.labels("write", type(exc).__name__).inc()
                raise
            promised = sha256 if whole is None else whole.result()
        self._metrics.blob_bytes.labels("write").inc(len(view))
        self._metrics.blob_seconds.labels("write").observe(self._clock.monotonic_s() - started_s)
        return BlobRef(
            topic=topic.name,
            partition=partition,
            blob=blob,
            num_bytes=len(view),
            sha256=promised or "",
            num_chunks=len(pieces),
            first_offset=min(place.offset for place in where),
            last_offset=max(place.offset for place in where),
            chunks=tuple(
                ChunkRef(index=index, offset=place.offset, num_bytes=len(piece), sha256=digest)
                for index, (place, piece, digest) in enumerate(zip(where, pieces, digests, strict=True))
            ),
        )


class BlobReader:
    """Reads blobs, from any thread. Each read opens a client of its own, unless `warm` opened one to keep; then `close` the reader."""

    def __init__(self, cluster: Cluster, *, client_id: str, namespace: Namespace, codec: Codec, metrics: BusMetrics, clock: Clock) -> None:
        self._cluster = cluster
        self._client_id = client_id
        self._namespace = namespace
        self._codec = codec
        self._metrics = metrics
        self._clock = clock
        self._lock = threading.Lock()
        self._keeps = False
        self._idle: RawConsumer | None = None

    def warm(self, topic: Topic) -> None:
        """Connect now, and keep the client from read to read: opening one takes longer than fetching a small adapter.

        Raises TopicMissing, NotAuthorized or ClusterUnreachable.
        """
        with self._client() as consumer:
            num_partitions(consumer, self._namespace.topic(topic))
            self._keeps = True

    def close(self) -> None:
        """Close the client that is kept. Idempotent; later reads work, each with a client of its own."""
        with self._lock:
            self._keeps = False
            consumer, self._idle = self._idle, None
        if consumer is not None:
            consumer.close()

    def read(self, ref: BlobRef, run_id: str, *, timeout_s: float = 60.0) -> bytes:
        """The blob's bytes. Raises BlobCorrupt, OffsetLost (retention took it) or DeadlineExceeded."""
        deadline = Deadline.after(timeout_s, self._clock)
        with self._counted(ref), closing(StreamDigest()) as whole, closing(self._pieces(ref, run_id, deadline)) as pieces:
            read = []
            for piece in pieces:
                whole.update(piece)
                read.append(piece)
            self._verify(whole, ref, run_id, deadline)
            return b"".join(read)

    def read_each(self, refs: Sequence[BlobRef], run_id: str, *, timeout_s: float = 60.0) -> Iterator[tuple[int, bytes | TransportError]]:
        """Many blobs by their number in `refs`: the bytes of each, or what `read` would have raised. In the order of the log.

        One fetch holds many small blobs; reading them one by one would fetch the same megabytes again for each. `timeout_s`: for each.
        """
        lows = self._lows(refs)
        cursor: BlobCursor | None = None
        try:
            for number, ref in sorted(enumerate(refs), key=lambda each: (each[1].topic, each[1].partition, each[1].first_offset)):
                found: bytes | TransportError
                if ref.first_offset < lows.get((ref.topic, ref.partition), 0):
                    yield number, lost(ref)
                    continue
                cursor = cursor or BlobCursor(self._borrow())
                try:
                    with self._counted(ref):
                        found = self._whole(cursor, ref, run_id, Deadline.after(timeout_s, self._clock))
                except TransportError as exc:
                    found = exc
                    cursor.consumer.close()
                    cursor = None
                yield number, found
        finally:
            if cursor is not None:
                self._give_back(cursor.consumer)

    def read_files(self, ref: BlobRef, run_id: str, files: Sequence[WeightFile], folder: Path, *, timeout_s: float = 60.0) -> Path:
        """Split the blob into `files` inside the new folder `folder`, every file verified. Atomic: `folder` is whole or absent.

        Nothing is forced onto the disk: the folder survives the end of the process, not of the machine. Raises as `read` does;
        FileExistsError if `folder` exists.
        """
        if folder.exists():
            raise FileExistsError(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        deadline = Deadline.after(timeout_s, self._clock)
        # Beside the target, so that the rename stays on one file system.
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            with ExitStack() as stack:
                stack.enter_context(self._counted(ref))
                whole = stack.enter_context(closing(StreamDigest()))
                pieces = stack.enter_context(closing(self._pieces(ref, run_id, deadline)))
                others = _write_files(pieces, files, staging, whole, stack)
                self._verify(whole, ref, run_id, deadline)
                _verify_files(files, [*whole.noted, *(digest.finish() for digest in others)])
            staging.rename(folder)
        except BaseException:  # whatever ends the read, an interrupt included, must leave nothing behind
            shutil.rmtree(staging, ignore_errors=True)
            raise
        return folder

    @contextmanager
    def _counted(self, ref: BlobRef) -> Iterator[None]:
        started_s = self._clock.monotonic_s()
        try:
            yield
        except TransportError as exc:
            self._metrics.blob_failures.labels("read", type(exc).__name__).inc()
            raise
        self._metrics.blob_bytes.labels("read").inc(ref.num_bytes)
        self._metrics.blob_seconds.labels("read").observe(self._clock.monotonic_s() - started_s)

    def _verify(self, whole: StreamDigest, ref: BlobRef, run_id: str, deadline: Deadline) -> None:
        """Raise BlobCorrupt unless all bytes together are the promised ones. Reads once more to say which chunk is not."""
        if whole.finish() == ref.sha256:
            return
        with closing(self._chunks(ref, run_id, deadline)) as chunks:
            _refuse_altered(chunks, ref)

    def _whole(self, cursor: BlobCursor, ref: BlobRef, run_id: str, deadline: Deadline) -> bytes:
        chunks = list(self._chunks_at(cursor, ref, run_id, deadline))
        data = b"".join(chunk.data for chunk in chunks)
        if sha256_of(data) != ref.sha256:
            _refuse_altered(chunks, ref)
        return data

    def _lows(self, refs: Sequence[BlobRef]) -> dict[tuple[str, int], int]:
        """The first offset that each partition holds, of those that `refs` name and that exist."""
        places = sorted({(ref.topic, ref.partition) for ref in refs if ref.topic in BY_NAME})
        physical = {place: (self._namespace.topic(BY_NAME[place[0]]), place[1]) for place in places}
        if not places:
            return {}
        with self._client() as consumer:
            found = watermarks(consumer, list(physical.values()))
        return {place: found[physical[place]][0] for place in places}

    def _pieces(self, ref: BlobRef, run_id: str, deadline: Deadline) -> Generator[bytes, None, None]:
        """The chunks' data in order, not verified."""
        with closing(self._chunks(ref, run_id, deadline)) as chunks:
            for chunk in chunks:
                yield chunk.data

    def _chunks(self, ref: BlobRef, run_id: str, deadline: Deadline) -> Generator[Chunk, None, None]:
        """The blob's chunks, by a client that is given back if it has read them all."""
        with self._client() as consumer:
            yield from self._chunks_at(BlobCursor(consumer), ref, run_id, deadline)

    def _chunks_at(self, cursor: BlobCursor, ref: BlobRef, run_id: str, deadline: Deadline) -> Generator[Chunk, None, None]:
        """The blob's chunks by index; repeated and foreign ones between them are passed over."""
        topic = BY_NAME.get(ref.topic)
        if topic is None:
            raise BlobCorrupt(f"The blob {ref.blob} names the topic {ref.topic!r}, which is not one of ours.")
        promised, wanted = {chunk.index: chunk.sha256 for chunk in ref.chunks}, 0
        cursor.go_to(self._namespace.topic(topic), ref)
        for message in cursor.messages(ref, deadline):
            chunk = self._decode(message, ref)
            if chunk is None or chunk.run_id != run_id or chunk.blob != ref.blob or chunk.index != wanted:
                continue
            if chunk.num_chunks != ref.num_chunks:
                raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} belongs to {chunk.num_chunks} chunks, not {ref.num_chunks}.")
            if chunk.sha256 != promised.get(chunk.index, chunk.sha256):
                raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} does not have the promised checksum.")
            yield chunk
            wanted += 1
            if wanted == ref.num_chunks:
                return
        raise BlobCorrupt(f"Chunk {wanted} of {ref.num_chunks} of {ref.blob} is not in the log.")

    @contextmanager
    def _client(self) -> Iterator[RawConsumer]:
        """A client, given back if the block ends well. Otherwise closed: nobody knows where it stands."""
        consumer = self._borrow()
        try:
            yield consumer
        except BaseException:  # whatever ends the block, an interrupt or an abandoned generator included
            consumer.close()
            raise
        self._give_back(consumer)

    def _borrow(self) -> RawConsumer:
        with self._lock:
            consumer, self._idle = self._idle, None
        if consumer is not None:
            return consumer
        return self._cluster.consumer({**profiles.BLOB_READER, **_READING, "client.id": self._client_id})

    def _give_back(self, consumer: RawConsumer) -> None:
        """Keep the client for the next read, or close it."""
        consumer.unassign()
        with self._lock:
            if self._keeps and self._idle is None:
                self._idle = consumer
                return
        consumer.close()

    def _decode(self, message: RawMessage, ref: BlobRef) -> Chunk | None:
        try:
            record = self._codec.decode(message.value())
        except InvalidRecord as exc:
            raise BlobCorrupt(f"Offset {message.offset()}, inside the blob {ref.blob}, is not a chunk: {exc.message}") from exc
        return record if isinstance(record, Chunk) else None


def _refuse_altered(chunks: Iterable[Chunk], ref: BlobRef) -> NoReturn:
    """Raise BlobCorrupt for a blob whose bytes are not the promised ones, with the chunk that is not, if one of them tells."""
    for chunk in chunks:
        if sha256_of(chunk.data) != chunk.sha256:
            raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} does not have the promised checksum.")
    raise BlobCorrupt(f"The blob {ref.blob} does not have the promised checksum.")


def _write_files(
    pieces: Iterator[bytes], files: Sequence[WeightFile], folder: Path, whole: StreamDigest, stack: ExitStack
) -> list[StreamDigest]:
    """Cut the stream into files by size. `whole` notes the first file's digest; the others' are returned, and closed by `stack`."""
    digests: list[StreamDigest] = []
    rest = memoryview(b"")
    for file in files:
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        own = stack.enter_context(closing(StreamDigest())) if file is not files[0] else None
        missing = file.num_bytes
        with path.open("xb") as out:
            while missing:
                if not rest:
                    piece = next(pieces, None)
                    if piece is None:
                        raise BlobCorrupt(f"The blob ends {missing} bytes before {file.name} does.")
                    rest = memoryview(piece)
                part, rest = rest[:missing], rest[missing:]
                whole.update(part)
                if own is not None:
                    own.update(part)
                out.write(part)
                missing -= len(part)
        if own is None:
            whole.note()
        else:
            digests.append(own)
    if rest or any(pieces):
        raise BlobCorrupt("The blob holds more bytes than its files.")
    return digests


def _verify_files(files: Sequence[WeightFile], digests: Sequence[str]) -> None:
    for file, digest in zip(files, digests, strict=True):
        if digest != file.sha256:
            raise BlobCorrupt(f"The file {file.name} does not have the promised checksum.")
