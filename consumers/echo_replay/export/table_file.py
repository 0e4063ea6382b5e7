"""One Parquet file: written under a temporary name, hashed, and renamed to its name, which holds the hash. Imports pyarrow."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from echo_learner.commit.fsync import sync
from echo_replay.export.layout import STAGED, Slot
from echo_replay.export.manifest import ExportedFile

# Every reader of Parquet knows it, and texts become smaller than with the default (snappy).
_COMPRESSION = "zstd"
# Numbers of each token: a dictionary and statistics of them would cost more than all other columns, and no query uses them.
_PER_TOKEN = ("tokens", "logprobs")
# Stores equal bytes of the floats together (Parquet format, "BYTE_STREAM_SPLIT"), which makes them a quarter smaller.
_SPLIT = ("logprobs",)
# Bytes of a group of rows: read at once, and kept in memory while a file is written.
_GROUP_BYTES = 32 << 20


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
        """Complete the file on the disk and rename it. Raises OSError."""
        self._flush()
        self._writer.close()
        sync(self._path)
        sha256 = sha256_of(self._path)
        path = self._home / self._slot.path(sha256)
        self._path.rename(path)
        sync(path.parent)
        return ExportedFile(
            slot=self._slot,
            path=str(path.relative_to(self._home)),
            rows=self._rows,
            num_bytes=path.stat().st_size,
            sha256=sha256,
            num_unsettled=self._num_unsettled,
        )

    def abandon(self) -> None:
        """Remove the unfinished file."""
        # On a full disk closing fails as writing did.
        with suppress(OSError):
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        # Waiting tables become one group of rows.
        if self._waiting:
            self._writer.write_table(pa.concat_tables(self._waiting))
        self._waiting, self._num_bytes = [], 0


def _encodings(schema: Any) -> dict[str, Any]:
    """The options of `ParquetWriter` for the columns of a schema, by their names in Parquet."""
    empty = pa.BufferOutputStream()
    parquet.write_table(schema.empty_table(), empty)
    columns = parquet.ParquetFile(pa.BufferReader(empty.getvalue())).schema
    paths = [columns.column(number).path for number in range(len(columns))]
    whole = [path for path in paths if path.partition(".")[0] not in _PER_TOKEN]
    split = [path for path in paths if path.partition(".")[0] in _SPLIT]
    return {"use_dictionary": whole, "write_statistics": whole, "use_byte_stream_split": split or False}


def write_whole(home: Path, slot: Slot, table: Any) -> ExportedFile:
    """Write one table to a file. Raises OSError."""
    file = StagedFile(home, slot, table.schema)
    try:
        file.write(table)
        return file.finish()
    except BaseException:  # after any failure, an interrupt included, remove the unfinished file
        file.abandon()
        raise


def row_groups(path: Path) -> Iterator[Any]:
    """The groups of rows of a file, one after another. Raises OSError."""
    with parquet.ParquetFile(path) as file:
        for number in range(file.num_row_groups):
            yield file.read_row_group(number)


def schema_in(path: Path) -> Any:
    """The columns of a file. Raises OSError."""
    return parquet.read_schema(path)


def sha256_of(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
