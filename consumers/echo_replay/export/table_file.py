"""One Parquet file: written beside its place, hashed, and renamed to the name that its content gives it. Imports pyarrow."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from echo_replay.export.layout import STAGED, Slot
from echo_replay.export.manifest import ExportedFile, sync_folder

# Every reader of Parquet knows it, and texts become smaller than with the default (snappy).
_COMPRESSION = "zstd"
# Of every token its own numbers: a dictionary of them, and the least and the largest, cost more than all other columns and help nobody.
_PER_TOKEN = ("tokens", "logprobs")
# Bytes of floats that are alike lie together (Parquet format, "BYTE_STREAM_SPLIT"), which makes them a quarter smaller.
_SPLIT = ("logprobs",)
# What is read at once of a file, and kept of one that is written.
_GROUP_BYTES = 32 << 20
_PIECE_BYTES = 1 << 20


class StagedFile:
    """The new file of a slot. Exactly one of `finish` and `abandon` ends it; both may follow a failed `write`. One thread."""

    def __init__(self, home: Path, slot: Slot, schema: Any) -> None:
        """Raises OSError."""
        self._home, self._slot = home, slot
        folder = home / slot.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{STAGED}{slot.partition}-{slot.start}.parquet"
        self._rows = self._num_unsettled = 0
        self._writer = parquet.ParquetWriter(self._path, schema, compression=_COMPRESSION, **_encodings(schema))
        self._waiting: list[Any] = []
        self._num_bytes = 0

    def write(self, table: Any, num_unsettled: int = 0) -> None:
        """Append rows. Raises OSError."""
        self._waiting.append(table)
        self._num_bytes += table.nbytes
        self._rows += table.num_rows
        self._num_unsettled += num_unsettled
        if self._num_bytes > _GROUP_BYTES:
            self._flush()

    def finish(self) -> ExportedFile:
        """The file is whole, on the disk and under its name. Raises OSError."""
        self._flush()
        self._writer.close()
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sha256 = sha256_of(self._path)
        path = self._home / self._slot.path(sha256)
        self._path.rename(path)
        sync_folder(path.parent)
        return ExportedFile(
            slot=self._slot,
            path=str(path.relative_to(self._home)),
            rows=self._rows,
            num_bytes=path.stat().st_size,
            sha256=sha256,
            num_unsettled=self._num_unsettled,
        )

    def abandon(self) -> None:
        """Leave nothing behind."""
        # Where the disk is full, closing fails as writing did.
        with suppress(OSError):
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        # Small pieces become one group of rows.
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._num_bytes = [], 0


def _encodings(schema: Any) -> dict[str, Any]:
    """How the columns of a schema are written, by the names that Parquet has for them."""
    empty = pa.BufferOutputStream()
    parquet.write_table(schema.empty_table(), empty)
    columns = parquet.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    paths = [columns.column(number).path for number in range(len(columns))]
    whole = [path for path in paths if path.partition(".")[0] not in _PER_TOKEN]
    split = [path for path in paths if path.partition(".")[0] in _SPLIT]
    return {"use_dictionary": whole, "write_statistics": whole, "use_byte_stream_split": split or False}


def write_whole(home: Path, slot: Slot, table: Any) -> ExportedFile:
    """A file of one table. Raises OSError."""
    file = StagedFile(home, slot, table.schema)
    try:
        file.write(table)
        return file.finish()
    except BaseException:  # whatever ends it: nothing half-written stays
        file.abandon()
        raise


def row_groups(path: Path) -> Iterator[Any]:
    """The tables of a file, one after another, each as large as it was written. Raises OSError."""
    with parquet.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def schema_in(path: Path) -> Any:
    """The columns of a file. Raises OSError."""
    return parquet.read_schema(path)


def sha256_of(path: Path) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()
