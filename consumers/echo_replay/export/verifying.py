"""Compares an export with its manifest: every file exists and is whole, and each record of the log is there once. Imports pyarrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.compute as pc
from pyarrow import ArrowException, parquet

from echo_replay.export.layout import Table
from echo_replay.export.manifest import ExportedFile, ExportManifest
from echo_replay.export.table_file import sha256_of

_Place = tuple[Table, int, str, int]
"""Table, partition, topic, offset."""


@dataclass(slots=True, kw_only=True)
class Verified:
    """The result. `problems`: a sentence each; none: the export is sound."""

    num_files: int = 0
    num_bytes: int = 0
    rows: Counter[Table] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def verify_export(home: Path, manifest: ExportManifest) -> Verified:
    """Read every file of a run's export. Raises OSError for a disk that fails."""
    verified = Verified()
    seen: set[_Place] = set()
    for file in manifest.files:
        found = list(_problems(home, manifest, file, seen))
        verified.problems += found
        verified.num_files += 1
        if not found:
            verified.num_bytes += file.num_bytes
            verified.rows[file.slot.table] += file.rows
        if not file.slot.topic:
            continue
        # The files of a partition follow one another: forget the records of earlier partitions.
        seen = {each for each in seen if each[:2] == (file.slot.table, file.slot.partition)}
    return verified


def _problems(home: Path, manifest: ExportManifest, file: ExportedFile, seen: set[_Place]) -> Iterator[str]:
    path = home / file.path
    if not path.exists():
        yield f"{file.path} is missing."
        return
    if (size := path.stat().st_size) != file.num_bytes:
        yield f"{file.path} has {size:,} bytes; the manifest says {file.num_bytes:,}."
        return
    if sha256_of(path) != file.sha256:
        yield f"{file.path} has another checksum than the manifest says."
        return
    try:
        with parquet.ParquetFile(path) as content:
            rows = content.metadata.num_rows
            kafka = content.read(["kafka"])["kafka"] if file.slot.topic else None
    except ArrowException as exc:
        yield f"{file.path} cannot be read ({exc})."
        return
    if rows != file.rows:
        yield f"{file.path} has {rows:,} rows; the manifest says {file.rows:,}."
    if kafka is None or not rows or pc.struct_field(kafka, "offset").null_count:
        return
    offsets = pc.struct_field(kafka, "offset").to_pylist()
    begun, end = manifest.ranges.get(file.slot.topic, {}).get(file.slot.partition, (0, 0))
    first, behind = max(begun, file.slot.start), min(end, file.slot.start + manifest.stride)
    if not first <= min(offsets) <= max(offsets) < behind:
        yield f"{file.path} holds offsets {min(offsets)} to {max(offsets)}; it may hold {first} to {behind - 1}."
    places = {(file.slot.table, file.slot.partition, file.slot.topic, offset) for offset in offsets}
    if len(places) < len(offsets) or places & seen:
        yield f"{file.path} holds a record that is there twice."
    seen |= places
