"""The slots of an export's rows, and the file names of slots. Pure.

    run=demo/trajectories/versions=100-199/p00003-0000000000000020000-9f2c41d07ab3.parquet
    run      table        bucket           partition, first offset of the stride, first digits of the file's SHA-256

A slot has one file. Its name holds the checksum, so equal content overwrites itself and other content never overwrites a file that a
manifest names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

STRIDE = 10_000
"""Offsets of a partition in one file."""
BUCKET = 100
"""Versions in one folder."""
UNKNOWN = "none"
"""The bucket of unreadable records, whose version is unknown."""
STAGED = ".staged-"
"""Prefix of the name of an unfinished file."""

_DIGITS = 12
_OURS = re.compile(rf"(?:p\d{{5}}-\d{{19}}-[0-9a-f]{{{_DIGITS}}}|{re.escape(STAGED)}.+)\.parquet")


class Table(StrEnum):
    """The tables of an export. Trajectories, rewards and records grow by offsets; the others are made from the books. `records`: bytes of
    other topics' records, for readers that use the export as a log (`exported_log`)."""

    TRAJECTORIES = "trajectories"
    REWARDS = "rewards"
    STEPS = "steps"
    SAMPLES = "samples"
    DROPS = "drops"
    WORKERS = "workers"
    RECORDS = "records"


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """`start`: first offset of a stride, or first version of a bucket; in a rescore's export, the number of the file. `bucket`: empty for a
    table without versions; for records, their topic."""

    table: Table
    partition: int
    start: int
    bucket: str = ""

    @property
    def folder(self) -> Path:
        """Relative to the folder of the run."""
        said = "topic" if self.table is Table.RECORDS else "versions"
        return Path(self.table.value) / f"{said}={self.bucket}" if self.bucket else Path(self.table.value)

    @property
    def topic(self) -> str:
        """The topic of its rows' offsets; empty for a table made from the books."""
        if self.table in (Table.TRAJECTORIES, Table.REWARDS):
            return self.table.value
        return self.bucket if self.table is Table.RECORDS else ""

    def path(self, sha256: str) -> Path:
        """The file with this content, relative to the folder of the run."""
        return self.folder / f"p{self.partition:05d}-{self.start:019d}-{sha256[:_DIGITS]}.parquet"


def folder_of(export: Path, run_id: str) -> Path:
    """The folder of one run in an export."""
    return export / f"run={run_id}"


def is_ours(name: str) -> bool:
    """Whether a file name is one that an export gives."""
    return _OURS.fullmatch(name) is not None


def bucket_of(version: int | None, width: int) -> str:
    """`100-199` for version 123 in buckets of 100."""
    if version is None:
        return UNKNOWN
    first = version - version % width
    return f"{first}-{first + width - 1}"
