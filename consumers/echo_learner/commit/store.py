"""Large snapshots beside the log: any file system or object store that fsspec knows. Imports fsspec when used."""

from __future__ import annotations

from echo_learner.commit.snapshot import SnapshotFiles
from echo_schemas.errors import UserError
from echo_schemas.records import WeightManifest


class SnapshotStore:
    """Writes snapshots of at least `least_bytes` under `<uri>/<run>/v<n>-<sha12>/`."""

    def __init__(self, uri: str, least_bytes: int) -> None:
        """Raises UserError if no driver for the address is installed."""
        import fsspec

        self.least_bytes = least_bytes
        try:
            self._files, self._root = fsspec.core.url_to_fs(uri)
        except (ImportError, ValueError) as exc:
            raise UserError(f"[store] uri = {uri!r} cannot be used: {exc}", hint="Install the fsspec driver that it names.") from exc

    def write(self, run_id: str, snapshot: SnapshotFiles) -> str:
        """The snapshot's address, once all its files are there. Writing it again changes nothing, since the name holds the checksum.

        Raises UserError if the store refuses.
        """
        folder = f"{self._root}/{run_id}/v{snapshot.version}-{snapshot.sha256[:12]}"
        try:
            self._files.makedirs(folder, exist_ok=True)
            for file in snapshot.files:
                self._files.put_file(str(snapshot.path(file)), f"{folder}/{file.name}")
        except OSError as exc:
            raise UserError(f"The snapshot of version {snapshot.version} could not be written to {folder}: {exc}.") from exc
        return str(self._files.unstrip_protocol(folder))


def read_stored(manifest: WeightManifest) -> list[tuple[str, bytes]]:
    """The files of a snapshot that lies in a store, not verified. Raises UserError if one cannot be read."""
    import fsspec

    try:
        files, folder = fsspec.core.url_to_fs(manifest.uri)
        return [(file.name, files.cat_file(f"{folder}/{file.name}")) for file in manifest.files]
    except (OSError, ImportError, ValueError) as exc:
        raise UserError(f"The snapshot at {manifest.uri} cannot be read: {exc}.", hint="Choose another version.") from exc
