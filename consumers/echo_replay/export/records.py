"""The messages of other topics that an export keeps beside trajectories and rewards, each with the bytes of its record.

Records are encoded again with this release's schemas, so that an export is read without a registry. A batch in chunks is put inline into
its report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_bus.errors import BlobCorrupt, DeadlineExceeded, OffsetLost
from echo_bus.message import raw_headers
from echo_replay.steps import batch_of
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import run_of
from echo_schemas.naming import DEAD_LETTER_SUFFIX, Namespace
from echo_schemas.records import Chunk, Progress, Record, Run, StepReport, WorkerStatus
from echo_schemas.topics import CONTROL, DROPS, PROGRESS, RUNS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS

_KEPT = (STEPS, DROPS, WEIGHTS, CONTROL)


def kept_topics(namespace: Namespace) -> dict[str, str]:
    """Logical name → physical name of the topics whose messages of the run are all kept, in the order of reading."""
    names = {topic.name: namespace.topic(topic) for topic in _KEPT}
    return {**names, f"{TRAJECTORIES.name}{DEAD_LETTER_SUFFIX}": namespace.dead_letters(TRAJECTORIES)}


def own_records(bus: Bus, batches: Iterable[list[RawMessage]]) -> Iterator[tuple[RawMessage, bytes | None]]:
    """The run's messages with their kept values: None for a tombstone or a dead letter, whose headers suffice. Raises RegistryError."""
    run_id = str(bus.run_id)
    letters = bus.namespace.dead_letters(TRAJECTORIES)
    keys = run_id.encode(), f"{run_id}/".encode()
    for raw in (raw for batch in batches for raw in batch):
        key = raw.key()
        is_ours = key is not None and (key == keys[0] or key.startswith(keys[1]))
        if not is_ours and run_of(raw_headers(raw)) not in (None, run_id):
            continue
        if raw.topic() == letters or (raw.value() is None and is_ours):
            yield raw, None
            continue
        try:
            record = bus.codec.decode(raw.value())
        except InvalidRecord:
            continue
        if record.run_id == run_id and not isinstance(record, Chunk):
            yield raw, lock_file_codec().encode(_with_batch(bus, record))


def newest_records(bus: Bus, workers: Mapping[str, WorkerStatus]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Logical name → keys and bytes, for the topics whose newest record of each key is kept. Raises TransportError."""
    found: dict[str, Mapping[str, Record]] = {
        RUNS.name: bus.newest(RUNS, Run, only=bus.run_id),
        PROGRESS.name: bus.newest(PROGRESS, Progress, only=bus.run_id),
        WORKERS.name: workers,
    }
    for name, records in found.items():
        yield name, [(key, lock_file_codec().encode(record)) for key, record in records.items()]


def _with_batch(bus: Bus, record: Record) -> Record:
    if not isinstance(record, StepReport) or record.batch_blob is None:
        return record
    try:
        return replace(record, batch=batch_of(bus, record), batch_blob=None)
    except (BlobCorrupt, OffsetLost, DeadlineExceeded):
        return record
