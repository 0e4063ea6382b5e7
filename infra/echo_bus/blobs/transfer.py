"""Blobs: bytes too large for one record, written to a topic in chunks and verified when they are read.

The chunks of a blob lie on one partition in order. The writer publishes the blob's `BlobRef` after the chunks, so a reference never names
missing chunks. A reader checks the whole and every file, and deletes everything if a check fails.

    write   digests of chunks (two threads) ──▶ encoded and published on the caller's thread, in order ──▶ all acknowledged
    read    fetched, decoded and written to files on the caller's thread ──▶ digests of the whole and of files, on other threads

No byte is hashed twice without need: the first file's digest is the whole's digest up to its end, and if the whole is right, so is every
chunk. A reader hashes chunks only to name a wrong one.

Blobs may have any size: both sides hold only some chunks in memory, except `read` and `read_each`, which return the bytes. The
duration of a transfer is not limited, only the time without progress.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

from echo_bus.blobs.cursor import BlobCursor, lost
from echo_bus.blobs.digests import StreamDigest, sha256_of
from echo_bus.blobs.files import ArrivingFiles
from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster, RawConsumer, RawMessage
from echo_bus.client.consumer_queries import num_partitions, watermarks
from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.errors import BlobCorrupt, TransportError
from echo_bus.wire import Wire
from echo_schemas.errors import InvalidRecord
from echo_schemas.partitioning import partition_of
from echo_schemas.records import BlobRef, Chunk, ChunkRef, Coordinates, WeightFile
from echo_schemas.topics import BY_NAME, Topic

# The limit of a record less the chunk's own fields.
CHUNK_BYTES = profiles.MAX_RECORD_BYTES - 1_000
# A longer list is left out of the reference: above some 10,000 entries it would exceed a record. The chunks repeat their checksums, and the
# whole has one too.
MAX_INLINE_CHUNKS = 1_000
# Seconds without a chunk after which a transfer has failed. A chunk is less than a MiB.
_STALL_S = 60.0
_HASHING_THREADS = 2
# Chunks on their way at once. The client gives up a chunk that is not acknowledged within two minutes, so all of these must fit into two
# minutes: 1 Mbit/s suffices.
_MOST_UNACKNOWLEDGED = 16
_FETCH_BYTES = 8 << 20
_READING = {
    "enable.partition.eof": True,
    # Short, because a fetch that waits at the end of one partition delays the next blob on another partition.
    "fetch.wait.max.ms": 5,
    # The client returns a fetch when it is complete. With small fetches the next one travels while this one is hashed.
    "fetch.max.bytes": _FETCH_BYTES,
    "max.partition.fetch.bytes": _FETCH_BYTES,
    # A fetch that takes longer is requested again: 2 Mbit/s suffices.
    "socket.timeout.ms": 30_000,
}


class BlobWriter:
    """Writes blobs through a publisher. Thread-safe."""

    def __init__(self, publisher: Publisher, wire: Wire) -> None:
        self._publisher = publisher
        self._metrics, self._clock = wire.metrics, wire.clock
        self._known: set[tuple[str, int]] = set()
        """(topic, partition)s whose leader knows the producer."""

    def write(
        self,
        topic: Topic,
        run_id: str,
        blob: str,
        data: bytes | memoryview | Iterable[bytes | memoryview],
        *,
        num_bytes: int | None = None,
        sha256: str | None = None,
    ) -> BlobRef:
        """Publish `data` in chunks of at most CHUNK_BYTES and wait until all are acknowledged.

        `data` may be an iterable of pieces of any size, consumed while they are sent; then `num_bytes` is their total size. `blob` is the
        name within the run, part of every chunk's key; name it by content (`v/12/<sha12>`), so that a second write is harmless. `sha256`:
        of `data`, if the caller knows it; readers compare it. Raises DeliveryFailed, DeadlineExceeded if no chunk is acknowledged for
        60 s, and BlobCorrupt if `data` has not `num_bytes`; retention later removes the chunks already written.
        """
        started_s = self._clock.monotonic_s()
        if isinstance(data, bytes | memoryview):
            data, num_bytes = (data,), len(data)
        assert num_bytes is not None, "pieces come with their size"
        num_chunks = max(1, -(-num_bytes // CHUNK_BYTES))
        partition = partition_of(f"{run_id}/{blob}", self._publisher.num_partitions(topic))
        # Several at once are safe only after the leader has accepted one: see `profiles`.
        most = _MOST_UNACKNOWLEDGED if (topic.name, partition) in self._known else 1
        written: list[tuple[Coordinates, int, str]] = []
        on_their_way: deque[tuple[Receipt, int, str]] = deque()

        def settle(left: int) -> None:
            while len(on_their_way) > left:
                receipt, size, digest = on_their_way.popleft()
                written.append((receipt.wait(_STALL_S), size, digest))
                self._known.add((topic.name, partition))

        with ExitStack() as stack:
            pool = ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="blob digests")
            stack.callback(pool.shutdown, cancel_futures=True)
            whole = None if sha256 is not None else stack.enter_context(closing(StreamDigest()))
            try:
                for index, (piece, digest) in enumerate(_with_digests(cut(data, CHUNK_BYTES), pool)):
                    if index == num_chunks:
                        raise BlobCorrupt(f"What was to become {blob} holds more than the {num_bytes} bytes that were said.")
                    if whole is not None:
                        whole.update(piece)
                    # The codec copies any buffer into the record; a `bytes` of it would be one copy more.
                    chunk = Chunk(run_id=run_id, blob=blob, index=index, num_chunks=num_chunks, sha256=digest, data=cast("bytes", piece))
                    on_their_way.append((self._publisher.publish(topic, chunk, partition=partition), len(piece), digest))
                    settle(most - 1)
                    most = _MOST_UNACKNOWLEDGED
                settle(0)
                if sum(size for _, size, _ in written) != num_bytes:
                    raise BlobCorrupt(f"What was to become {blob} does not hold the {num_bytes} bytes that were said.")
            except TransportError as exc:
                self._metrics.blob_failures.labels("write", type(exc).__name__).inc()
                raise
            promised = sha256 if whole is None else whole.finish()
        self._metrics.blob_bytes.labels("write").inc(num_bytes)
        self._metrics.blob_seconds.labels("write").observe(self._clock.monotonic_s() - started_s)
        chunks = (
            ChunkRef(index=index, offset=place.offset, num_bytes=size, sha256=digest)
            for index, (place, size, digest) in enumerate(written if num_chunks <= MAX_INLINE_CHUNKS else ())
        )
        return BlobRef(
            topic=topic.name,
            partition=partition,
            blob=blob,
            num_bytes=num_bytes,
            sha256=promised or "",
            num_chunks=num_chunks,
            first_offset=min(place.offset for place, _, _ in written),
            last_offset=max(place.offset for place, _, _ in written),
            chunks=tuple(chunks),
        )


class BlobReader:
    """Reads blobs, from any thread. Each read opens its own client, unless `warm` opened one to keep; then `close` the reader."""

    def __init__(self, cluster: Cluster, wire: Wire) -> None:
        self._cluster = cluster
        self._wire = wire
        self._metrics, self._clock = wire.metrics, wire.clock
        self._lock = threading.Lock()
        self._keeps = False
        self._idle: RawConsumer | None = None

    def warm(self, topic: Topic) -> None:
        """Connect now, and keep the client from read to read: opening one takes longer than fetching a small adapter.

        Raises TopicMissing, NotAuthorized or ClusterUnreachable.
        """
        with self._client() as consumer:
            num_partitions(consumer, self._wire.namespace.topic(topic))
            self._keeps = True

    def close(self) -> None:
        """Close the kept client. Idempotent; later reads open their own clients."""
        with self._lock:
            self._keeps = False
            consumer, self._idle = self._idle, None
        if consumer is not None:
            consumer.close()

    def read(self, ref: BlobRef, run_id: str) -> bytes:
        """The blob's bytes. Raises BlobCorrupt, OffsetLost (retention deleted it) or DeadlineExceeded (nothing came for 60 s)."""
        with self._counted(ref), closing(StreamDigest()) as whole, closing(self._chunks(ref, run_id)) as chunks:
            read = []
            for chunk in chunks:
                whole.update(chunk.data)
                read.append(chunk.data)
            if whole.finish() != ref.sha256:
                self._refuse(ref, run_id)
            return b"".join(read)

    def read_each(self, refs: Sequence[BlobRef], run_id: str) -> Iterator[tuple[int, bytes | TransportError]]:
        """Many blobs, in the order of the log: each one's index in `refs` and its bytes, or the error that `read` would raise.

        One fetch holds many small blobs; reading them one by one would repeat that fetch for each.
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
                        found = self._whole(cursor, ref, run_id)
                except TransportError as exc:
                    found = exc
                    cursor.consumer.close()
                    cursor = None
                yield number, found
        finally:
            if cursor is not None:
                self._give_back(cursor.consumer)

    def read_files(self, ref: BlobRef, run_id: str, files: Sequence[WeightFile], folder: Path) -> Path:
        """Split the blob into `files` inside the new folder `folder`, every file verified. `folder` is complete or absent.

        After a transport error the arrived bytes stay beside it, and the next call for the same folder goes on there (`ArrivingFiles`).
        Raises as `read` does; FileExistsError if `folder` exists.
        """
        with self._counted(ref), ArrivingFiles(folder, files, ref.sha256) as arriving:
            with closing(self._chunks(ref, run_id, first=arriving.num_pieces)) as chunks:
                for chunk in chunks:
                    arriving.add(chunk.data)
            if arriving.num_bytes == ref.num_bytes and not arriving.is_whole:
                self._refuse(ref, run_id)
            return arriving.complete()

    def read_chunks(self, ref: BlobRef, run_id: str, first: int, end: int) -> Generator[bytes, None, None]:
        """The chunks of index `first` to `end` - 1, not verified: the caller knows their checksums. Raises as `read` does."""
        with closing(self._chunks(ref, run_id, first=first, end=end)) as chunks:
            for chunk in chunks:
                self._metrics.blob_bytes.labels("read").inc(len(chunk.data))
                yield chunk.data

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

    def _refuse(self, ref: BlobRef, run_id: str) -> NoReturn:
        """Raise BlobCorrupt; reads the blob once more to name the wrong chunk."""
        with closing(self._chunks(ref, run_id)) as chunks:
            _refuse_altered(chunks, ref)

    def _whole(self, cursor: BlobCursor, ref: BlobRef, run_id: str) -> bytes:
        chunks = list(self._chunks_at(cursor, ref, run_id))
        data = b"".join(chunk.data for chunk in chunks)
        if sha256_of(data) != ref.sha256:
            _refuse_altered(chunks, ref)
        return data

    def _lows(self, refs: Sequence[BlobRef]) -> dict[tuple[str, int], int]:
        """The first offset of each partition in `refs` whose topic is known."""
        places = sorted({(ref.topic, ref.partition) for ref in refs if ref.topic in BY_NAME})
        physical = {place: (self._wire.namespace.topic(BY_NAME[place[0]]), place[1]) for place in places}
        if not places:
            return {}
        with self._client() as consumer:
            found = watermarks(consumer, list(physical.values()))
        return {place: found[physical[place]][0] for place in places}

    def _chunks(self, ref: BlobRef, run_id: str, *, first: int = 0, end: int | None = None) -> Generator[Chunk, None, None]:
        """The blob's chunks, read with a borrowed client."""
        with self._client() as consumer:
            yield from self._chunks_at(BlobCursor(consumer), ref, run_id, first=first, end=end)

    def _chunks_at(
        self, cursor: BlobCursor, ref: BlobRef, run_id: str, *, first: int = 0, end: int | None = None
    ) -> Generator[Chunk, None, None]:
        """The blob's chunks of index `first` to `end` - 1, not verified; skips repeated chunks and those of other blobs."""
        topic = BY_NAME.get(ref.topic)
        if topic is None:
            raise BlobCorrupt(f"The blob {ref.blob} names the topic {ref.topic!r}, which is not one of ours.")
        promised, wanted = {chunk.index: chunk.sha256 for chunk in ref.chunks}, first
        end = ref.num_chunks if end is None else end
        if wanted == end:
            return
        # Each chunk takes at least one offset, so the wanted chunks begin here or later.
        rest = replace(ref, first_offset=min(ref.first_offset + first, ref.last_offset))
        cursor.go_to(self._wire.namespace.topic(topic), rest)
        for message in cursor.messages(rest, _STALL_S, self._clock):
            chunk = self._decode(message, ref)
            if chunk is None or chunk.run_id != run_id or chunk.blob != ref.blob or chunk.index != wanted:
                continue
            if chunk.num_chunks != ref.num_chunks:
                raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} belongs to {chunk.num_chunks} chunks, not {ref.num_chunks}.")
            if chunk.sha256 != promised.get(chunk.index, chunk.sha256):
                raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} does not have the promised checksum.")
            yield chunk
            wanted += 1
            if wanted == end:
                return
        raise BlobCorrupt(f"Chunk {wanted} of {ref.num_chunks} of {ref.blob} is not in the log.")

    @contextmanager
    def _client(self) -> Iterator[RawConsumer]:
        """A client; closed if the block raises, because its position is then unknown, else given back."""
        consumer = self._borrow()
        try:
            yield consumer
        except BaseException:  # also an interrupt or an abandoned generator
            consumer.close()
            raise
        self._give_back(consumer)

    def _borrow(self) -> RawConsumer:
        with self._lock:
            consumer, self._idle = self._idle, None
        if consumer is not None:
            return consumer
        return self._cluster.consumer({**profiles.BLOB_READER, **_READING, "client.id": self._wire.client_id})

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
            record = self._wire.codec.decode(message.value())
        except InvalidRecord as exc:
            raise BlobCorrupt(f"Offset {message.offset()}, inside the blob {ref.blob}, is not a chunk: {exc.message}") from exc
        return record if isinstance(record, Chunk) else None


def _refuse_altered(chunks: Iterable[Chunk], ref: BlobRef) -> NoReturn:
    """Raise BlobCorrupt for an altered blob; names the first chunk with a wrong checksum."""
    for chunk in chunks:
        if sha256_of(chunk.data) != chunk.sha256:
            raise BlobCorrupt(f"Chunk {chunk.index} of {ref.blob} does not have the promised checksum.")
    raise BlobCorrupt(f"The blob {ref.blob} does not have the promised checksum.")


def cut(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes | memoryview]:
    """The same bytes in pieces of `size`, the last one shorter; no bytes give one empty piece. Copies only where two pieces meet."""
    begun: list[bytes | memoryview] = []
    missing, is_empty = size, True
    for piece in pieces:
        rest = memoryview(piece)
        while len(rest):
            is_empty = False
            part, rest = rest[:missing], rest[missing:]
            begun.append(part)
            missing -= len(part)
            if not missing:
                yield begun[0] if len(begun) == 1 else b"".join(begun)
                begun, missing = [], size
    if begun or is_empty:
        yield b"".join(begun)


def _with_digests(pieces: Iterable[bytes | memoryview], pool: ThreadPoolExecutor) -> Iterator[tuple[bytes | memoryview, str]]:
    """Each piece with its SHA-256; the pool hashes the next pieces meanwhile."""
    ahead: deque[tuple[bytes | memoryview, Future[str]]] = deque()
    for piece in pieces:
        ahead.append((piece, pool.submit(sha256_of, piece)))
        if len(ahead) > _HASHING_THREADS:
            first, digest = ahead.popleft()
            yield first, digest.result()
    for first, digest in ahead:
        yield first, digest.result()
