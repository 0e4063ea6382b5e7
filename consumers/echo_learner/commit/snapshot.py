"""A snapshot of the policy as files: what is published, kept in the checkpoint, and loaded by workers.

The same weights give the same bytes: tensors in the order of their names, no time stamps, no paths. Identity is the SHA-256 of the files'
contents, one after another in the order listed, which is also the SHA-256 of the blob that carries them. The weights come first: then their
own checksum is a stage on the way to the whole one, and nobody who makes or verifies a snapshot has to hash them twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echo_schemas.errors import UserError
from echo_schemas.records import WeightFile, WeightKind

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MODEL_CONFIG = "config.json"
MODEL_WEIGHTS = "model.safetensors"
_CONFIGS = {ADAPTER_CONFIG, MODEL_CONFIG}


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotFiles:
    """The files of one version, in memory. `config` is the text of the adapter's configuration, or the model's.
    `sha256`: of all contents, one after another; `files`: name, size and checksum of each."""

    version: int
    kind: WeightKind
    config: str
    contents: tuple[tuple[str, bytes], ...]
    sha256: str = field(init=False)
    files: tuple[WeightFile, ...] = field(init=False)

    def __post_init__(self) -> None:
        whole = hashlib.sha256()
        files: list[WeightFile] = []
        for name, content in self.contents:
            whole.update(content)
            own = hashlib.sha256(content) if files else whole
            files.append(WeightFile(name=name, num_bytes=len(content), sha256=own.hexdigest()))
        object.__setattr__(self, "sha256", whole.hexdigest())
        object.__setattr__(self, "files", tuple(files))

    def pieces(self) -> Iterator[bytes]:
        """All files, one after another, in pieces."""
        for file in self.files:
            yield from self.pieces_of(file)

    def pieces_of(self, file: WeightFile) -> Iterator[bytes]:
        """One of `files` in pieces."""
        yield next(content for name, content in self.contents if name == file.name)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(len(content) for _, content in self.contents)


def file_names(kind: WeightKind) -> tuple[str, str]:
    """Weights and configuration, in the order of a snapshot."""
    return (ADAPTER_WEIGHTS, ADAPTER_CONFIG) if kind is WeightKind.LORA else (MODEL_WEIGHTS, MODEL_CONFIG)


def write_snapshot(snapshot: SnapshotFiles, folder: Path) -> None:
    """Write the files into the new folder `folder`."""
    folder.mkdir(parents=True)
    for name, content in snapshot.contents:
        (folder / name).write_bytes(content)


def read_snapshot(folder: Path, version: int, kind: WeightKind, names: Sequence[str]) -> SnapshotFiles:
    """The snapshot that a checkpoint keeps in `folder`. Raises UserError if a file is missing."""
    try:
        contents = tuple((name, (folder / name).read_bytes()) for name in names)
    except OSError as exc:
        raise UserError(f"The snapshot in {folder} is not whole: {exc.strerror}: {exc.filename}.", hint="Bring the file back.") from exc
    config = next(content.decode() for name, content in contents if name in _CONFIGS)
    return SnapshotFiles(version=version, kind=kind, config=config, contents=contents)
