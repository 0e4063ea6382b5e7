"""A published snapshot of the policy: the manifest that names it and the chunks that carry it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from echo_schemas.errors import InvalidReason
from echo_schemas.records.base import Record, require, require_not_negative

SHA256_HEX_LENGTH = 64


class WeightKind(StrEnum):
    """The content of a snapshot: a PEFT LoRA adapter, or the whole model."""

    LORA = "lora"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """One file of a snapshot. The blob holds the files in the manifest's order."""

    name: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRef:
    """One chunk of a blob: its offset in the blob's partition, and its checksum."""

    index: int
    offset: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BlobRef:
    """A blob that was written to a topic in chunks. A long list of chunks is left out: each chunk holds its own index and checksum."""

    topic: str
    partition: int
    blob: str
    num_bytes: int
    sha256: str
    num_chunks: int
    first_offset: int
    last_offset: int
    chunks: tuple[ChunkRef, ...] = ()

    def check(self) -> None:
        """Raise InvalidRecord if the numbers contradict one another."""
        require_not_negative(partition=self.partition, num_bytes=self.num_bytes, first_offset=self.first_offset)
        require(len(self.sha256) == SHA256_HEX_LENGTH, "A blob's sha256 is 64 hexadecimal digits.")
        require(self.first_offset <= self.last_offset, "A blob ends before it starts.")
        if self.chunks:
            message = f"{self.num_chunks} chunks announced, {len(self.chunks)} listed."
            require(len(self.chunks) == self.num_chunks, message, InvalidReason.LENGTH_MISMATCH)
            num_bytes = sum(chunk.num_bytes for chunk in self.chunks)
            require(num_bytes == self.num_bytes, "The chunks' sizes do not add up to the blob's.", InvalidReason.LENGTH_MISMATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest(Record):
    """Identity of one snapshot = (run, version, sha256), and the place of its bytes: `blob` on a topic, or `uri` in an object store.
    `delta`: the changes since the parent, for workers that have the parent."""

    SCHEMA: ClassVar[str] = "weight_manifest"

    run_id: str
    version: int
    parent: int | None = None
    parent_run: str | None = None
    parent_sha256: str | None = None
    kind: WeightKind
    config: str = "{}"
    files: tuple[WeightFile, ...]
    num_bytes: int
    sha256: str
    blob: BlobRef | None = None
    chunk_list: BlobRef | None = None
    uri: str | None = None
    delta: BlobRef | None = None
    session: str
    checkpoint: str
    next_seq: int
    created_ms: int

    def validate(self) -> None:
        require_not_negative(version=self.version, parent=self.parent, num_bytes=self.num_bytes, next_seq=self.next_seq)
        require(len(self.sha256) == SHA256_HEX_LENGTH, "A snapshot's sha256 is 64 hexadecimal digits.")
        require(bool(self.files), "A snapshot has at least one file.")
        message = f"The files' sizes do not add up to {self.num_bytes} bytes."
        require(sum(file.num_bytes for file in self.files) == self.num_bytes, message, InvalidReason.LENGTH_MISMATCH)
        require((self.blob is None) != (self.uri is None), "A snapshot lies either in a blob or at a URI.")
        are_plain = all(_is_plain_name(file.name) for file in self.files)
        require(are_plain, "A snapshot's files are plain relative names: no absolute path, no '..'.")
        for blob in (self.blob, self.chunk_list, self.delta):
            if blob is not None:
                blob.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(Record):
    """A piece of a blob too large for one record. Key: `<run>/<blob>/<index>`."""

    SCHEMA: ClassVar[str] = "chunk"

    run_id: str
    blob: str
    index: int
    num_chunks: int
    sha256: str
    data: bytes

    def validate(self) -> None:
        require_not_negative(index=self.index)
        require(self.index < self.num_chunks, f"Chunk {self.index} of {self.num_chunks}.")


def _is_plain_name(name: str) -> bool:
    parts = name.split("/")
    return bool(name) and "\\" not in name and all(part not in {"", ".", ".."} for part in parts)
