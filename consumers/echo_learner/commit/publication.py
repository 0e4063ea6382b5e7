"""From a durable checkpoint to the log: chunks, then one transaction {reports, drops, `v/<n>`, `current`}.

Threads: the learner's thread submits one publication at a time and goes on training; the publication thread does it. `wait` blocks until
it is committed, and raises its error. Every checkpoint waits first, so that it knows which records are in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from echo_bus.blobs.chunk_list import list_chunks
from echo_bus.blobs.delta import diff
from echo_bus.blobs.transfer import BlobWriter
from echo_bus.client.profiles import MAX_RECORD_BYTES
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Clock
from echo_core.bottleneck import Place, Use
from echo_learner.commit.checkpoint import Outbox
from echo_learner.commit.placement import SnapshotPlacement
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.metrics import LearnerMetrics
from echo_runtime.places import PlaceTimes
from echo_schemas.codec import Codec
from echo_schemas.records import Record, StepReport, WeightManifest
from echo_schemas.topics import STEPS, WEIGHT_CHUNKS, WEIGHTS, weights_key

logger = logging.getLogger(__name__)

# Largest delta that is written, as a share of the snapshot: a larger one saves too little.
_MOST_OF_THE_WHOLE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The content of one transaction. `version`: the learner's when the checkpoint was made. `snapshot` None: only the records of `outbox`;
    the other fields are for a manifest.
    """

    version: int
    outbox: Outbox
    snapshot: SnapshotFiles | None = None
    session: str = ""
    checkpoint: str = ""
    next_seq: int = 0
    parent: int | None = None
    parent_sha256: str | None = None
    parent_run: str | None = None


class SnapshotWriter:
    """Writes snapshots and large reports to the log or the store, before a record names them. Used from the publication thread."""

    def __init__(
        self, run_id: str, *, blobs: BlobWriter, placement: SnapshotPlacement, codec: Codec, clock: Clock, writes_deltas: bool = False
    ) -> None:
        self._run_id = run_id
        self._blobs = blobs
        self.placement = placement
        self._codec = codec
        self._clock = clock
        self._writes_deltas = writes_deltas
        self._last: SnapshotFiles | None = None

    def prune(self, snapshot: SnapshotFiles) -> None:
        """`snapshot` is public now: remove snapshots from the store that are too old."""
        store = self.placement.store_for(snapshot.num_bytes)
        if store is not None:
            store.prune(snapshot.version)

    def write(self, publication: Publication, snapshot: SnapshotFiles) -> WeightManifest:
        """Write the bytes and return their manifest, which is published later. Writing again gives the same bytes under the same name."""
        sha256 = snapshot.sha256
        where: dict[str, Any] = {}
        store = self.placement.store_for(snapshot.num_bytes)
        if store is not None:
            where["uri"] = store.write(snapshot)
        else:
            where["blob"] = self._blobs.write(
                WEIGHT_CHUNKS,
                self._run_id,
                f"v/{snapshot.version}/{sha256[:12]}",
                snapshot.pieces(),
                num_bytes=snapshot.num_bytes,
                sha256=sha256,
            )
        if self.placement.lists_chunks and (store is not None or not where["blob"].chunks):
            where["chunk_list"] = self._blobs.write(
                WEIGHT_CHUNKS, self._run_id, f"v/{snapshot.version}/{sha256[:12]}/chunks", list_chunks(snapshot.pieces())
            )
        if self._writes_deltas and (delta := self._delta(publication, snapshot)) is not None:
            where["delta"] = self._blobs.write(WEIGHT_CHUNKS, self._run_id, f"v/{snapshot.version}/{sha256[:12]}/delta", delta)
        self._last = snapshot
        return WeightManifest(
            run_id=self._run_id,
            version=snapshot.version,
            parent=publication.parent,
            parent_sha256=publication.parent_sha256,
            parent_run=publication.parent_run,
            kind=snapshot.kind,
            config=snapshot.config,
            files=snapshot.files,
            num_bytes=snapshot.num_bytes,
            sha256=sha256,
            session=publication.session,
            checkpoint=publication.checkpoint,
            next_seq=publication.next_seq,
            created_ms=self._clock.time_ms(),
            **where,
        )

    def _delta(self, publication: Publication, snapshot: SnapshotFiles) -> bytes | None:
        """The difference to the parent; None if the parent's files are gone or the delta is too large."""
        last = self._last
        if last is None or last.sha256 != publication.parent_sha256:
            return None
        try:
            return diff(last.pieces(), snapshot.pieces(), most_bytes=int(_MOST_OF_THE_WHOLE * snapshot.num_bytes))
        except FileNotFoundError:
            # Its checkpoint was pruned.
            return None

    def fitting(self, record: Record) -> Record:
        """The record; a report that is too long for one record leaves its batch in a blob, which is written now, and names the blob."""
        if not isinstance(record, StepReport) or record.batch is None:
            return record
        encoded = self._codec.encode(record)
        if len(encoded) <= MAX_RECORD_BYTES:
            return record
        # The blob is the whole report, so that one decoder reads both forms.
        blob = self._blobs.write(STEPS, self._run_id, f"report/{record.version}/{record.session}", encoded)
        return replace(record, batch=None, batch_blob=blob)


class PublicationThread:
    """Publishes what the learner submits. `start` after the transactional id is taken over; `close` it."""

    def __init__(
        self,
        writer: TransactionalWriter,
        snapshots: SnapshotWriter,
        *,
        places: PlaceTimes,
        metrics: LearnerMetrics,
        clock: Clock,
        on_published: Callable[[Publication], None],
    ) -> None:
        """`on_published` runs on the publication thread after each commit, and must be short."""
        self._writer = writer
        self._snapshots = snapshots
        self._places = places
        self._metrics = metrics
        self._clock = clock
        self._on_published = on_published
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._pending: Future[None] | None = None
        self._ended_s = clock.monotonic_s()
        self.last_s = 0.0

    def check(self, num_bytes: int) -> None:
        """Raise UserError unless a snapshot of this size can be published; TransportError. Called before its checkpoint is saved."""
        self._snapshots.placement.check(num_bytes)

    def submit(self, publication: Publication) -> None:
        """Begin the publication. Call `wait` first: only one is under way at a time."""
        self._pending = self._executor.submit(self._publish, publication)

    def wait(self) -> None:
        """Wait until the submitted publication is committed. Raises ProducerFenced, TransportError, UserError (store)."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def is_busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def close(self) -> None:
        """End the thread; a publication under way ends first."""
        self._executor.shutdown(wait=True)

    def _publish(self, publication: Publication) -> None:
        started_s = self._clock.monotonic_s()
        self._places.add(Place.PUBLISH_WEIGHTS, Use.EMPTY, started_s - self._ended_s)
        manifest = None if publication.snapshot is None else self._snapshots.write(publication, publication.snapshot)
        records = [(topic, self._snapshots.fitting(record)) for topic, record in publication.outbox]
        with self._writer.transaction() as transaction:
            for topic, record in records:
                transaction.publish(topic, record, partition=0 if topic is STEPS else None)
            if manifest is not None:
                transaction.publish(WEIGHTS, manifest, key=weights_key(manifest.run_id, manifest.version))
                transaction.publish(WEIGHTS, manifest, key=weights_key(manifest.run_id, None))
        self._ended_s = self._clock.monotonic_s()
        self._places.add(Place.PUBLISH_WEIGHTS, Use.BUSY, self._ended_s - started_s)
        if manifest is not None:
            self.last_s = self._ended_s - started_s
            self._metrics.publication_seconds.observe(self.last_s)
        self._on_published(publication)
        if publication.snapshot is not None:
            self._snapshots.prune(publication.snapshot)
