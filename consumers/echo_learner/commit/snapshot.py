"""A snapshot of the policy as files, which are published, kept in the checkpoint and loaded by workers.

The same weights give the same bytes: tensors in the order of their names, no time stamps, no paths. A snapshot's identity is the SHA-256
of its files' contents, one after another in the order listed, which is also the SHA-256 of the blob that carries them. The weights come
first: their own checksum is then an intermediate state of the whole one, so the weights are hashed once.

Snapshots may be larger than memory: they lie on disk and are read in pieces.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_schemas.errors import UserError
from echo_schemas.records import WeightFile, WeightKind

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
_CONFIGS = {ADAPTER_CONFIG, MODEL_CONFIG}
# Bytes read of a file at once.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles:
    """The files of one version, in `folder`. `config` is the text of the adapter's configuration, or the model's.
    `sha256`: of all contents, one after another; `files`: name, size and checksum of each."""

    version: int
    kind: WeightKind
    config: str
    folder: Path
    files: tuple[WeightFile, ...]
    sha256: str

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def path(self, file: WeightFile) -> Path:
        return self.folder / file.name

    def pieces(self) -> Iterator[bytes]:
        """All files, one after another, in pieces of at most a MiB. Raises OSError."""
        for file in self.files:
            yield from self.pieces_of(file)

    def pieces_of(self, file: WeightFile) -> Iterator[bytes]:
        """One of `files` in pieces of at most a MiB. Raises OSError."""
        return _pieces_of(self.path(file))


def file_names(kind: WeightKind) -> tuple[str, str]:
    """Weights and configuration, in the order of a snapshot."""
    return (ADAPTER_WEIGHTS, ADAPTER_CONFIG) if kind is WeightKind.LORA else (MODEL_WEIGHTS, MODEL_CONFIG)


def copy_snapshot(snapshot: SnapshotFiles, folder: Path) -> None:
    folder.mkdir(parents=True)
    for file in snapshot.files:
        shutil.copyfile(snapshot.path(file), folder / file.name)


def read_snapshot(folder: Path, version: int, kind: WeightKind, names: Sequence[str]) -> SnapshotFiles:
    """The snapshot whose files `names` lie in `folder`, its checksums computed. Raises UserError if a file is missing."""
    whole, config = hashlib.sha256(), ""
    files: list[WeightFile] = []
    try:
        for name in names:
            own, num_bytes = hashlib.sha256() if files else whole, 0
            for piece in _pieces_of(folder / name):
                num_bytes += len(piece)
                whole.update(piece)
                if own is not whole:
                    own.update(piece)
            files.append(WeightFile(name=name, num_bytes=num_bytes, sha256=own.hexdigest()))
            if name in _CONFIGS:
                config = (folder / name).read_text(encoding="utf-8")
    except OSError as exc:
        raise UserError(f"The snapshot in {folder} is not whole: {exc.strerror}: {exc.filename}.", hint="Bring the file back.") from exc
    return SnapshotFiles(version=version, kind=kind, config=config, folder=folder, files=tuple(files), sha256=whole.hexdigest())


def _pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
