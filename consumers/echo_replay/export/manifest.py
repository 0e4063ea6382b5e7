"""The manifest of an export: the list of its files. Written last, by rename; a file that it does not name is a leftover."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from echo_learner.commit.fsync import sync
from echo_replay.export.layout import BUCKET, STRIDE, Slot, Table, folder_of, is_ours
from echo_schemas.errors import UserError

FORMAT = 1
"""Grows when an older release could misread an export."""
NAME = "manifest.json"
_LOCK = ".lock"
_OTHER_FOLDER = "Export into another folder; this one stays as it is."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file. `num_unsettled`: rows whose fate may change, for a table whose rows have one."""

    slot: Slot
    path: str
    rows: int
    num_bytes: int
    sha256: str
    num_unsettled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportManifest:
    """`identity`: the cluster's id under `cluster`, each topic's under its name. `ranges`: offsets [start, end) by topic and partition.
    `reward_names`: rewards with a column of their own. `missing`: the ranges that retention had removed, a sentence each. `rescored`: for
    the scores of a rescore, the name and version of its reward; empty for an export of the run."""

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
        return sum(file.rows for file in self.files if file.slot.table is table)


def read_manifest(home: Path) -> ExportManifest | None:
    """The manifest in a run's folder; None if nothing was committed there. Raises UserError if this release cannot read it."""
    path = home / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise UserError(f"{path} cannot be read ({exc}).", hint=_OTHER_FOLDER) from exc
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else None
        raise UserError(f"{path} is of format {found!r}; this release reads and writes format {FORMAT}.", hint=_OTHER_FOLDER)
    refusal = f"{path} is no manifest of an export"
    if lacking := {each.name for each in fields(ExportManifest)} - {"rescored"} - content.keys():
        raise UserError(f"{refusal}: it lacks {', '.join(sorted(lacking))}.", hint=_OTHER_FOLDER)
    try:
        manifest = TypeAdapter(ExportManifest).validate_python(content)
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{refusal}: {where} is {first['input']!r}. {first['msg']}.", hint=_OTHER_FOLDER) from exc
    for file in manifest.files:
        # A forged manifest must not make us read a file outside the folder, or count it as ours.
        if file.path != str(file.slot.path(file.sha256)) or ".." in file.path:
            raise UserError(f"{refusal}: {file.path!r} is not the name of such a file.", hint=_OTHER_FOLDER)
    return manifest


def write_manifest(home: Path, manifest: ExportManifest) -> None:
    """Commit the manifest: from now on its files count. Raises OSError."""
    content = {"format": FORMAT, **asdict(manifest)}
    staged = home / f".{NAME}"
    with staged.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    staged.rename(home / NAME)
    sync(home)


def open_export(export: Path, run_id: str = "") -> tuple[Path, ExportManifest]:
    """A run's folder and manifest; without a name, of the only run. `export` may be the run's folder itself. Raises UserError."""
    here = export.absolute()
    if not run_id and here.name.startswith("run=") and (here / NAME).is_file():
        export, run_id = here.parent, here.name.removeprefix("run=")
    runs = sorted(path.parent.name.removeprefix("run=") for path in export.glob(f"run=*/{NAME}"))
    if not runs:
        archived = export / "export"
        hint = f"That of an archive is {archived}." if archived.is_dir() else f"Make one: echoswarm export --to {export}."
        raise UserError(f"{export} holds no export.", hint=hint)
    if not run_id and len(runs) > 1:
        raise UserError(f"{export} holds several runs: {', '.join(runs)}.", hint="Name one with --run.")
    home = folder_of(export, run_id or runs[0])
    manifest = read_manifest(home)
    if manifest is None:
        raise UserError(f"{export} holds no export of the run {run_id!r}.", hint=f"It holds {', '.join(runs)}.")
    return home, manifest


def check_identity(manifest: ExportManifest, home: Path, *, run_id: str, namespace: str, identity: Mapping[str, str]) -> None:
    """Raises UserError unless the export is of this run of this cluster. Names return when a cluster or topic is recreated, ids do not."""
    if manifest.run_id != run_id:
        raise UserError(f"{home} holds an export of the run {manifest.run_id!r}, not of {run_id!r}.", hint=_OTHER_FOLDER)
    if manifest.namespace != namespace:
        raise UserError(f"{home} is of the namespace {manifest.namespace!r}, this run is in {namespace!r}.", hint=_OTHER_FOLDER)
    if manifest.identity.get("cluster") != identity.get("cluster"):
        raise UserError(f"{home} is an export of another Kafka cluster, whose run has the same name.", hint=_OTHER_FOLDER)
    for topic, known in manifest.identity.items():
        if topic in identity and identity[topic].partition("/")[0] != known.partition("/")[0]:
            raise UserError(f"The topic {topic} was made anew since {home} was exported.", hint=_OTHER_FOLDER)


def unwritable(what: str, home: Path, exc: OSError) -> UserError:
    """The error to raise when `what` cannot be written to `home`."""
    is_full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
    return UserError(
        f"The {what} cannot be written to {home} ({exc.strerror or exc}).",
        hint=f"{'Make room, or choose another disk' if is_full else 'Choose a folder that you may write to'}; what was committed stays.",
    )


def remove_leftovers(home: Path, manifest: ExportManifest | None) -> None:
    """Remove the files that the manifest does not name: of killed exports, or replaced ones. Raises OSError."""
    named = {file.path for file in manifest.files} if manifest else set()
    for path in list(home.rglob("*.parquet")):
        if is_ours(path.name) and str(path.relative_to(home)) not in named:
            path.unlink()


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """Lock the folder for one export. Raises UserError if another one writes there."""
    with (home / _LOCK).open("w") as file:
        try:
            flock(file, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another export writes to {home}.", hint="Wait until it has ended, or stop it.") from None
        yield


def forget_if_empty(home: Path) -> None:
    """Remove a run's folder if nothing was exported, for example because the run does not exist."""
    if [path.name for path in home.iterdir()] == [_LOCK]:
        (home / _LOCK).unlink()
        home.rmdir()
