"""Copies a run from Kafka into a folder, whole and verified, so that the run may be deleted. Imports pyarrow.

    export/        the Parquet files of `echoswarm export`: every trajectory with its rewards and its fate
    log/*.avro     every record of the run on every topic, byte for byte; chunks of weights of the newest version, or of all
    weights/v<n>/  the newest snapshot that the log still holds, as files
    archive.json   the contents with checksums; written last, so a folder without it is no archive
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import fastavro
from fastavro.write import Writer

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_bus.errors import OffsetLost
from echo_bus.message import raw_headers
from echo_replay.export.exporter import export_run
from echo_replay.export.verifying import verify_export
from echo_replay.raw_log import RawLog
from echo_rollout.weights.sources import PublishedSource
from echo_schemas.errors import UserError
from echo_schemas.headers import RUN
from echo_schemas.records import Run, WeightManifest
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import WEIGHT_CHUNKS, WEIGHTS, weights_key

NAME = "archive.json"
_DIGEST_END = 1 << 256
_SCHEMA = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Kept",
        "namespace": "echoswarm.archive",
        "doc": "A message as Kafka had it.",
        "fields": [
            {"name": "partition", "type": "int"},
            {"name": "offset", "type": "long"},
            {"name": "time_ms", "type": "long"},
            {"name": "key", "type": ["null", "bytes"]},
            {"name": "value", "type": ["null", "bytes"]},
            {
                "name": "headers",
                "type": {
                    "type": "array",
                    "items": {
                        "type": "record",
                        "name": "Header",
                        "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": ["null", "bytes"]}],
                    },
                },
            },
        ],
    }
)


@dataclass(slots=True, kw_only=True)
class ArchivedTopic:
    """`bounds`: first offset and end of each partition. `digest`: the sum of the SHA-256 of all records, in any order."""

    records: int
    bounds: list[tuple[int, int]]
    digest: str


@dataclass(slots=True, kw_only=True)
class Archive:
    """What an archive holds. `missing`: a sentence for each loss before it was made. `weights`: version of the snapshot; None: without one."""

    run_id: str
    namespace: str
    topics: dict[str, ArchivedTopic] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    weights: int | None = None
    weights_sha256: str = ""
    missing: list[str] = field(default_factory=list)


def archive_run(bus: Bus, run: Run, home: Path, *, store: str, all_weights: bool = False) -> Archive:
    """Write everything of `run` into the folder `home`, and read it back. `store`: [store] uri. `all_weights`: the chunks of every version
    that the log still holds.

    After an interruption the same call begins again. Raises UserError for a folder with an archive, a full disk, or files that differ from
    what was written; TransportError.
    """
    if (home / NAME).exists():
        raise UserError(f"{home} holds an archive already.", hint="Name another folder, or remove that one.")
    archive = Archive(run_id=run.run_id, namespace=bus.namespace.name)
    try:
        exported = export_run(bus, run.run_id, home / "export")
        archive.missing += exported.missing
        (home / "log").mkdir(parents=True, exist_ok=True)
        for spec in load_topic_specs():
            path = home / "log" / f"{spec.name}.avro"
            if spec.name == WEIGHT_CHUNKS.name:
                archive.topics[spec.name] = _keep_chunks(bus, run.run_id, path, all_versions=all_weights)
            else:
                archive.topics[spec.name] = _keep_topic(bus, run.run_id, spec.name, path, archive.missing)
        _keep_weights(bus, run.run_id, home / "weights", store, archive)
        found = verify_export(home / "export" / f"run={run.run_id}", exported.manifest)
        archive.rows = {table.value: rows for table, rows in found.rows.items()}
        _verify_log(home, archive, found.problems)
        content = {**asdict(archive), "config": run.config, "model": run.model, "software": dict(run.software)}
        (home / NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        raise UserError(f"{home} cannot be written: {exc.strerror or exc}.", hint="Make room or choose another folder; begin again.") from exc
    return archive


def read_archive(home: Path) -> Archive:
    """The archive in `home`, its records compared with their digests. Raises UserError."""
    try:
        content = json.loads((home / NAME).read_text(encoding="utf-8"))
        archive = Archive(**{each.name: content[each.name] for each in fields(Archive)})
        archive.topics = {name: ArchivedTopic(**topic) for name, topic in content["topics"].items()}
    except FileNotFoundError:
        raise UserError(f"{home} holds no archive.", hint="`echoswarm runs archive NAME --to DIR` makes one, DIR/NAME.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UserError(f"{home / NAME} cannot be read: {exc!r}.", hint="Was it made by another release?") from exc
    _verify_log(home, archive, [])
    return archive


def archived_records(home: Path, name: str) -> Iterator[dict[str, Any]]:
    """The records of one topic, each partition in order. Raises OSError, ValueError."""
    with (home / "log" / f"{name}.avro").open("rb") as file:
        yield from fastavro.reader(file)  # type: ignore[misc]  # records of our schema


def _keep_topic(bus: Bus, run_id: str, name: str, path: Path, missing: list[str]) -> ArchivedTopic:
    """Keep every record of the run on one topic, as it is. A dead letter has the header of its run, too."""
    with RawLog(bus, f"{bus.namespace.name}.{name}") as log:
        missing += [f"{name}[{number}]: retention has removed what was before offset {low}." for number, low in log.lows.items() if low]
        return _write(path, kept_of(chain.from_iterable(log.messages()), run_id), _bounds_of(log))


def _keep_chunks(bus: Bus, run_id: str, path: Path, *, all_versions: bool) -> ArchivedTopic:
    """Keep the chunks of the newest version, or of all. Offsets before the first kept chunk count as removed."""
    manifests = {key: manifest for key, manifest in bus.newest(WEIGHTS, WeightManifest).items() if manifest.run_id == run_id}
    current = manifests.get(weights_key(run_id, None))
    wanted = [manifest for manifest in manifests.values() if all_versions or (current is not None and manifest.version == current.version)]
    refs = [ref for manifest in wanted for ref in (manifest.blob, manifest.chunk_list, manifest.delta) if ref is not None]
    with RawLog(bus, bus.namespace.topic(WEIGHT_CHUNKS)) as log:
        bounds = _bounds_of(log)
        firsts = [min((ref.first_offset for ref in refs if ref.partition == number), default=end) for number, (_, end) in enumerate(bounds)]
        bounds = [(max(low, first), end) for first, (low, end) in zip(firsts, bounds, strict=True)]
        return _write(path, kept_of(chain.from_iterable(log.within(dict(enumerate(bounds)))), run_id), bounds)


def _bounds_of(log: RawLog) -> list[tuple[int, int]]:
    return [(log.lows[number], log.ends[number]) for number in range(log.num_partitions)]


def _write(path: Path, records: Iterable[dict[str, Any]], bounds: list[tuple[int, int]]) -> ArchivedTopic:
    digest = Digest()
    with path.open("wb") as file:
        writer = Writer(file, _SCHEMA, codec="deflate")
        for kept in records:
            writer.write(kept)
            digest.add(kept)
        writer.flush()
    return ArchivedTopic(records=digest.count, bounds=bounds, digest=digest.text)


def kept_of(messages: Iterable[RawMessage], run_id: str) -> Iterator[dict[str, Any]]:
    """The messages of the run, as `_SCHEMA` has them."""
    for raw in messages:
        headers = raw_headers(raw)
        if dict(headers).get(RUN) == run_id.encode():
            yield {
                "partition": raw.partition(),
                "offset": raw.offset(),
                "time_ms": raw.timestamp()[1],
                "key": raw.key(),
                "value": raw.value(),
                "headers": [{"name": name, "value": value} for name, value in headers],
            }


class Digest:
    """Digest of records in any order, since partitions are read side by side."""

    def __init__(self) -> None:
        self.count = self._sum = 0

    def add(self, kept: Mapping[str, Any]) -> None:
        buffer = BytesIO()
        fastavro.schemaless_writer(buffer, _SCHEMA, kept)
        self.count += 1
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(buffer.getvalue()).digest())) % _DIGEST_END

    @property
    def text(self) -> str:
        """As in `ArchivedTopic`."""
        return f"{self._sum:064x}"


def _keep_weights(bus: Bus, run_id: str, folder: Path, store: str, archive: Archive) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    manifest = bus.newest(WEIGHTS, WeightManifest, only=f"{run_id}/current").get(f"{run_id}/current")
    if manifest is None:
        archive.missing.append("No weights were published.")
        return
    target = folder / f"v{manifest.version}"
    with closing(replace(bus, run_id=run_id).blob_reader()) as reader:
        try:
            PublishedSource(reader, store).fetch(manifest, target)
        except (OffsetLost, FileNotFoundError):
            archive.missing.append(f"The weights of {weights_key(run_id, manifest.version)} are gone.")
            return
    archive.weights, archive.weights_sha256 = manifest.version, manifest.sha256


def _verify_log(home: Path, archive: Archive, problems: list[str]) -> None:
    """Read the files back. Raises UserError if one differs from the log."""
    for name, topic in archive.topics.items():
        digest = Digest()
        with suppress(OSError, ValueError, EOFError):
            for kept in archived_records(home, name):
                digest.add(kept)
        if (digest.count, digest.text) != (topic.records, topic.digest):
            problems.append(f"log/{name}.avro does not hold what was written.")
    if problems:
        raise UserError(f"The archive is not whole: {problems[0]} ({len(problems)} in all)", hint="Begin again in another folder.")
