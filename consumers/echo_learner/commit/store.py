"""Large snapshots beside the log, on any file system or object store that fsspec knows. Imports fsspec when used.

    <uri>/<run>/v<n>-<sha12>/       complete, or not named by any manifest

On a local disk a snapshot is written under another name, forced onto the disk and renamed, so that a crash leaves no manifest without it.
An object store acknowledges only durable files.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from echo_learner.commit.fsync import sync_parents, sync_tree
from echo_learner.commit.snapshot import SnapshotFiles
from echo_schemas.errors import UserError
from echo_schemas.records import WeightManifest

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_PROBE = b"echoswarm"


class SnapshotStore:
    """Writes the snapshots of one run under `<uri>/<run>/`, and keeps the newest `keep` of them (0: all)."""

    def __init__(self, uri: str, run_id: str, *, keep: int = 0) -> None:
        """Raises UserError if no driver for the address is installed."""
        import fsspec
        from fsspec.implementations.local import LocalFileSystem

        self.uri = uri
        self._keep = keep
        try:
            self._files, root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as exc:
            raise UserError(f"[store] uri = {uri!r} cannot be used: {exc}", hint="Install the fsspec driver for this address.") from exc
        self._folder = f"{root.rstrip('/')}/{run_id}"
        self._local = Path(self._folder) if isinstance(self._files, LocalFileSystem) else None

    def check(self, num_bytes: int) -> None:
        """Raise UserError unless a file can be written here, read again and removed, and, on a local disk, `num_bytes` more fit."""
        probe = f"{self._folder}/.probe-{secrets.token_hex(4)}"
        try:
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(probe, _PROBE)
            found = self._files.cat_file(probe)
            self._files.rm_file(probe)
        except Exception as exc:  # a driver raises any error of the library below it
            raise UserError(
                f"Snapshots cannot be kept at {self.uri}: {exc}. Nothing was changed.",
                hint="Check [store] uri and its driver's credentials: the learner writes, reads and removes a small file there.",
            ) from exc
        if found != _PROBE:
            raise UserError(
                f"A file read from {self.uri} differs from the one just written there. Nothing was changed.", hint="Set [store] uri."
            )
        if self._local is not None and (free := shutil.disk_usage(self._local).free) < num_bytes:
            raise UserError(
                f"{self._local} has {free / _GIB:,.1f} GiB left, and a snapshot takes {num_bytes / _GIB:,.1f}. Nothing was changed.",
                hint="Free space there, or set [store] uri to where there is some.",
            )

    def write(self, snapshot: SnapshotFiles) -> str:
        """Write all files and return the snapshot's address. Writing it again changes nothing, since the name holds the checksum.

        Raises UserError if the store refuses.
        """
        folder = f"{self._folder}/v{snapshot.version}-{snapshot.sha256[:12]}"
        try:
            if self._local is not None:
                _write_local(snapshot, Path(folder))
            else:
                self._files.makedirs(folder, exist_ok=True)
                for file in snapshot.files:
                    with self._files.open(f"{folder}/{file.name}", "wb") as out:
                        for piece in snapshot.pieces_of(file):
                            out.write(piece)
        except Exception as exc:  # a driver raises any error of the library below it
            raise UserError(f"The snapshot of version {snapshot.version} could not be written to {folder}: {exc}.") from exc
        return str(self._files.unstrip_protocol(folder))

    def prune(self, version: int) -> None:
        """Remove snapshots older than the newest `keep` up to `version`, the newest public one. A snapshot that cannot be removed stays."""
        if not self._keep:
            return
        try:
            names = [str(name).rstrip("/").rpartition("/")[2] for name in self._files.ls(self._folder, detail=False)]
            versions = {
                name: int(name[1:].partition("-")[0]) for name in names if name.startswith("v") and name[1:].partition("-")[0].isdigit()
            }
            oldest = min(sorted({found for found in versions.values() if found <= version})[-self._keep :], default=0)
            for name, found in versions.items():
                if found < oldest:
                    self._files.rm(f"{self._folder}/{name}", recursive=True)
        except Exception as exc:  # a driver raises any error of the library below it; the next version tries again
            logger.warning("Old snapshots at %s could not be removed: %s", self.uri, exc)


def _write_local(snapshot: SnapshotFiles, folder: Path) -> None:
    """Write the files under another name, force them onto the disk, then rename the folder. Raises OSError."""
    if folder.is_dir():
        if all((folder / file.name).is_file() and (folder / file.name).stat().st_size == file.num_bytes for file in snapshot.files):
            # The name holds the checksum: an earlier session has written it and ended before its publication.
            return
        shutil.rmtree(folder)
    staging = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    try:
        staging.mkdir(parents=True)
        for file in snapshot.files:
            with (staging / file.name).open("xb") as out:
                for piece in snapshot.pieces_of(file):
                    out.write(piece)
        sync_tree(staging)
        staging.rename(folder)
    except BaseException:  # an interrupt, too, must leave no half-written snapshot
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_parents(folder)


def still_stored(manifests: Iterable[WeightManifest]) -> set[int]:
    """The versions among `manifests` whose snapshots are in their store. A store that does not answer is taken to hold them."""
    import fsspec

    listed: dict[str, set[str] | None] = {}
    found = set()
    for manifest in manifests:
        place, _, name = (manifest.uri or "").rpartition("/")
        if place not in listed:
            try:
                files, folder = fsspec.core.url_to_fs(place)
                listed[place] = {str(path).rstrip("/").rpartition("/")[2] for path in files.ls(folder, detail=False)}
            except FileNotFoundError:
                listed[place] = set()
            except Exception as exc:  # a driver raises any error of the library below it
                logger.warning("The snapshots at %s cannot be listed: %s", place, exc)
                listed[place] = None
        names = listed[place]
        if names is None or name in names:
            found.add(manifest.version)
    return found


def read_stored(manifest: WeightManifest) -> list[tuple[str, bytes]]:
    """The files of a snapshot in a store, not verified. Raises UserError if one cannot be read."""
    import fsspec

    try:
        files, folder = fsspec.core.url_to_fs(manifest.uri)
        return [(file.name, files.cat_file(f"{folder}/{file.name}")) for file in manifest.files]
    except (OSError, ImportError, ValueError) as exc:
        raise UserError(f"The snapshot at {manifest.uri} cannot be read: {exc}.", hint="Choose another version.") from exc
