"""A run out of Kafka into a folder, whole and verified, so that the run may be deleted. Imports pyarrow.

    export/        the Parquet files of `echoswarm export`: every trajectory with its rewards and its fate
    log/*.avro     every record of the run on every topic, byte for byte, but the chunks of weights
    weights/v<n>/  the newest snapshot that the log still holds
    archive.json   what is there, with checksums; written last, so that a folder without it is no archive
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
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
                        "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": "bytes"}],
                    },
                },
            },
        ],
    }
)


@dataclass(slots=True, kw_only=True)
class ArchivedTopic:
    """`sha256`: of the records one after another, as they were read from the log."""

    records: int
    sha256: str


@dataclass(slots=True, kw_only=True)
class Archive:
    """What an archive holds. `missing`: what was gone before, a sentence each. `weights`: version of the snapshot; None: none was left."""

    run_id: str
    namespace: str
    topics: dict[str, ArchivedTopic] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    weights: int | None = None
    weights_sha256: str = ""
    missing: list[str] = field(default_factory=list)


def archive_run(bus: Bus, run: Run, home: Path, *, store: str) -> Archive:
    """Write everything of `run` into the folder `home`, and read it back. `store`: [store] uri.

    An interrupted one is begun again by the same call. Raises UserError for a folder of something else, a full disk, or an archive that is
    not what was written; TransportError.
    """
    if (home / NAME).exists():
        raise UserError(f"{home} holds an archive already.", hint="Name another folder, or remove that one.")
    archive = Archive(run_id=run.run_id, namespace=bus.namespace.name)
    try:
        exported = export_run(bus, run.run_id, home / "export")
        archive.missing += exported.missing
        (home / "log").mkdir(parents=True, exist_ok=True)
        for spec in load_topic_specs():
            if not spec.name.startswith(WEIGHT_CHUNKS.name):
                archive.topics[spec.name] = _keep_topic(bus, run.run_id, spec.name, home / "log" / f"{spec.name}.avro", archive.missing)
        _keep_weights(bus, run.run_id, home / "weights", store, archive)
        found = verify_export(home / "export" / f"run={run.run_id}", exported.manifest)
        archive.rows = {table.value: rows for table, rows in found.rows.items()}
        _verify_log(home, archive, found.problems)
        content = {**asdict(archive), "config": run.config, "model": run.model, "software": dict(run.software)}
        (home / NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as exc:
        raise UserError(f"{home} cannot be written: {exc.strerror or exc}.", hint="Make room or choose another folder; begin again.") from exc
    return archive


def _keep_topic(bus: Bus, run_id: str, name: str, path: Path, missing: list[str]) -> ArchivedTopic:
    """Every record of the run on one topic, as it is; a dead letter keeps the header of the run that it was of."""
    digest, count = hashlib.sha256(), 0
    with RawLog(bus, f"{bus.namespace.name}.{name}") as log, path.open("wb") as file:
        missing += [f"{name}[{number}]: retention has removed what was before offset {low}." for number, low in log.lows.items() if low]
        writer = Writer(file, _SCHEMA, codec="deflate")
        for kept in _kept(chain.from_iterable(log.messages()), run_id):
            writer.write(kept)
            _digest(digest, kept)
            count += 1
        writer.flush()
    return ArchivedTopic(records=count, sha256=digest.hexdigest())


def _kept(messages: Iterable[RawMessage], run_id: str) -> Iterator[dict[str, Any]]:
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


def _digest(digest: Any, kept: Mapping[str, Any]) -> None:
    buffer = BytesIO()
    fastavro.schemaless_writer(buffer, _SCHEMA, kept)
    digest.update(buffer.getvalue())


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
    """Read the files back. Raises UserError if one is not what was read from the log."""
    for name, topic in archive.topics.items():
        digest, count = hashlib.sha256(), 0
        with (home / "log" / f"{name}.avro").open("rb") as file:
            for kept in fastavro.reader(file):
                _digest(digest, kept)  # type: ignore[arg-type]  # a record of our schema
                count += 1
        if (count, digest.hexdigest()) != (topic.records, topic.sha256):
            problems.append(f"log/{name}.avro does not hold what was written.")
    if problems:
        raise UserError(f"The archive is not whole: {problems[0]} ({len(problems)} in all)", hint="Begin again in another folder.")
