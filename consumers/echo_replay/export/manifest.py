"""What an export holds: the one file that makes the others count. Written last, by rename; a file that it does not name is a leftover."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Any

from echo_replay.export.layout import BUCKET, STRIDE, Slot, Table, folder_of, is_ours
from echo_schemas.errors import UserError

FORMAT = 1
"""Grows when an older release could misread an export."""
NAME = "manifest.json"
_LOCK = ".lock"
_NEW_FOLDER = "Export into a new folder; this one stays as it is."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file and what it holds. `num_unsettled`: rows whose fate may change, for a table whose rows have one."""

    slot: Slot
    path: str
    rows: int
    num_bytes: int
    sha256: str
    num_unsettled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """`identity`: the cluster's id under `cluster`, each topic's under its name. `ranges`: offsets [start, end) by topic and partition.

    `reward_names`: those that have a column of their own. `missing`: what retention had removed, a sentence each. `rescored`: name and
    version of the one reward of which it holds the scores of a rescore, and nothing else; empty for an export of the run.
    """

    run_id: str
    namespace: str
    identity: Mapping[str, str]
    stride: int = STRIDE
    bucket: int = BUCKET
    ranges: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    tip: int = 0
    written_ms: int = 0
    reward_names: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    rescored: tuple[str, ...] = ()
    files: tuple[ExportedFile, ...] = ()

    def rows(self, table: Table) -> int:
        """How many rows of a table there are."""
        return sum(file.rows for file in self.files if file.slot.table is table)


def read_manifest(home: Path) -> ExportManifest | None:
    """Of the folder of a run; None if nothing was committed there. Raises UserError for one that this release cannot read."""
    path = home / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise UserError(f"{path} cannot be read ({exc}).", hint=_NEW_FOLDER) from exc
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise UserError(f"{path} is of format {found!r}; this release reads and writes format {FORMAT}.", hint=_NEW_FOLDER)
    try:
        return _parsed(content)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UserError(f"{path} is no manifest of an export ({type(exc).__name__}: {exc}).", hint=_NEW_FOLDER) from exc


def write_manifest(home: Path, manifest: ExportManifest) -> None:
    """The files that it names count from now on. Raises OSError."""
    content = {"format": FORMAT, **asdict(manifest)}
    staged = home / f".{NAME}"
    with staged.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    staged.rename(home / NAME)
    sync_folder(home)


def runs_in(export: Path) -> list[str]:
    """The runs of which something is committed in an export."""
    return sorted(path.parent.name.removeprefix("run=") for path in export.glob(f"run=*/{NAME}"))


def open_export(export: Path, run_id: str = "") -> tuple[Path, ExportManifest]:
    """The folder of a run and what it holds; without a name, of the only run. Raises UserError."""
    runs = runs_in(export)
    if not runs:
        raise UserError(f"{export} holds no export.", hint=f"Make one: echoswarm export --to {export}.")
    if not run_id and len(runs) > 1:
        raise UserError(f"{export} holds several runs: {', '.join(runs)}.", hint="Name one with --run.")
    home = folder_of(export, run_id or runs[0])
    manifest = read_manifest(home)
    if manifest is None:
        raise UserError(f"{export} holds no export of the run {run_id!r}.", hint=f"It holds {', '.join(runs)}.")
    return home, manifest


def remove_leftovers(home: Path, manifest: ExportManifest | None) -> int:
    """Remove files of exports that were killed, or were replaced; how many there were. Raises OSError."""
    named = {file.path for file in manifest.files} if manifest else set()
    found = [path for path in home.rglob("*.parquet") if is_ours(path.name) and str(path.relative_to(home)) not in named]
    for path in found:
        path.unlink()
    return len(found)


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """One export at a time. Raises UserError if another one writes there."""
    with (home / _LOCK).open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another export writes to {home}.", hint="Wait until it has ended, or stop it.") from None
        yield


def forget_if_empty(home: Path) -> None:
    """Remove the folder of a run of which nothing was exported, because there is no such run, say."""
    if [path.name for path in home.iterdir()] == [_LOCK]:
        (home / _LOCK).unlink()
        home.rmdir()


def sync_folder(folder: Path) -> None:
    """A rename in it survives a loss of power from now on."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parsed(content: Mapping[str, Any]) -> ExportManifest:
    return ExportManifest(
        run_id=str(content["run_id"]),
        namespace=str(content["namespace"]),
        identity={str(name): str(value) for name, value in content["identity"].items()},
        stride=int(content["stride"]),
        bucket=int(content["bucket"]),
        ranges={
            topic: {int(number): (int(start), int(end)) for number, (start, end) in ranges.items()}
            for topic, ranges in content["ranges"].items()
        },
        tip=int(content["tip"]),
        written_ms=int(content["written_ms"]),
        reward_names=tuple(content["reward_names"]),
        missing=tuple(content["missing"]),
        rescored=tuple(content.get("rescored", ())),
        files=tuple(_file(file) for file in content["files"]),
    )


def _file(content: Mapping[str, Any]) -> ExportedFile:
    fields = dict(content)
    slot = fields.pop("slot")
    parsed = ExportedFile(
        slot=Slot(Table(slot["table"]), int(slot["partition"]), int(slot["start"]), str(slot["bucket"])),
        path=str(fields["path"]),
        rows=int(fields["rows"]),
        num_bytes=int(fields["num_bytes"]),
        sha256=str(fields["sha256"]),
        num_unsettled=int(fields["num_unsettled"]),
    )
    # A manifest that a stranger wrote must not make us read, or count as ours, what lies elsewhere.
    if parsed.path != str(parsed.slot.path(parsed.sha256)) or ".." in parsed.path:
        message = f"{parsed.path!r} is not the name of such a file"
        raise ValueError(message)
    return parsed
