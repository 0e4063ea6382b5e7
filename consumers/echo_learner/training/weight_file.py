"""A safetensors file written tensor by tensor: byte for byte what the library writes, without all tensors in memory. Imports torch.

    8 bytes: the header's length ─ header (JSON: type, shape and place of each tensor, padded to 8 bytes) ─ the tensors' bytes

https://github.com/huggingface/safetensors describes the format, which the library reads one tensor at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_bus.blobs.digests import StreamDigest
from echo_learner.commit.snapshot import SnapshotFiles, file_names
from echo_schemas.errors import UserError
from echo_schemas.records import WeightFile, WeightKind

# In the order in which the library sorts types, the last first.
_TYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
_RANKS = {dtype: rank for rank, dtype in enumerate(_TYPES)}
# Bytes copied out of a tensor at once.
_PIECE_BYTES = 1 << 20
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a file that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_file_order(slots: Iterable[Slot]) -> list[Slot]:
    """In the library's order: by type, the widest first, then by name."""
    return sorted(slots, key=lambda slot: (-_RANKS[slot.dtype], slot.name))


def write_snapshot(
    folder: Path, version: int, kind: WeightKind, config: str, slots: Sequence[Slot], tensors: Iterator[Tensor]
) -> SnapshotFiles:
    """Write the weights and `config` into the new folder `folder`; `tensors` are those of `slots`, which are in file order.

    `tensors` is read to its end even if the disk refuses, because each may be gathered from all ranks. Raises OSError.
    """
    (weights_name, config_name), text = file_names(kind), config.encode()
    try:
        folder.mkdir(parents=True)
        with closing(StreamDigest()) as digest:
            with (folder / weights_name).open("xb") as file:
                for piece in _pieces(slots, tensors):
                    file.write(piece)
                    digest.update(piece)
                num_bytes = file.tell()
            digest.note()
            digest.update(text)
            (folder / config_name).write_bytes(text)
            whole = digest.finish()
    finally:
        for _ in tensors:
            pass
    files = (
        WeightFile(name=weights_name, num_bytes=num_bytes, sha256=digest.noted[0]),
        WeightFile(name=config_name, num_bytes=len(text), sha256=hashlib.sha256(text).hexdigest()),
    )
    return SnapshotFiles(version=version, kind=kind, config=config, folder=folder, files=files, sha256=whole)


@contextmanager
def open_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Callable[[str], Tensor]]:
    """A function that reads a tensor of the file by its name. Raises UserError unless the file's tensors are exactly those of `shapes`."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            own = stored_shapes(file)
            if differing := differing_names(own, shapes):
                name = differing[0]
                raise UserError(
                    f"The weights in {path} are of another policy: {name} has the shape {own.get(name)} there and {shapes.get(name)} here "
                    f"({len(differing)} differ).",
                    hint="[policy] base, update and lora must be those that the weights were trained with.",
                )
            yield file.get_tensor
    except (OSError, SafetensorError) as exc:
        raise UserError(f"The weights in {path} cannot be read: {exc}.", hint="Bring the file back as it was.") from exc


def stored_shapes(file: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor in an open safetensors file, by name."""
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  it is no mapping


def differing_names(own: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names that only one of the two has, or with another shape."""
    return sorted(name for name in {*own, *shapes} if own.get(name) != shapes.get(name))


def _pieces(slots: Sequence[Slot], tensors: Iterator[Tensor]) -> Iterator[bytes]:
    yield _header(slots)
    for slot, tensor in zip(slots, tensors, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (slot.dtype, slot.shape), slot.name
        own = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        # Copies: under ZeRO-3 the tensor's memory is freed right after.
        yield from (own[start : start + _PIECE_BYTES].tobytes() for start in range(0, len(own), _PIECE_BYTES))


def _header(slots: Sequence[Slot]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for slot in slots:
        content[slot.name] = {
            "dtype": _TYPES[slot.dtype],
            "shape": list(slot.shape),
            "data_offsets": [position, position + slot.num_bytes],
        }
        position += slot.num_bytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
