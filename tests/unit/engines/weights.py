"""Safetensors files made by hand: a base of one block, adapters and full weights for it, whole or with one thing wrong. No torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_schemas.records import WeightKind

HIDDEN, INNER, RANK, MAX_RANK = 4, 6, 2, 8
BASE: Mapping[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (10, HIDDEN),
    "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INNER, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I8": 1}
PREFIX = "base_model.model."
QUERY, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"


def write_tensors(file: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "F32") -> None:
    """A safetensors file of zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + math.prod(shape) * _SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))


def adapter_shapes(rank: int = RANK) -> dict[str, tuple[int, ...]]:
    """What PEFT writes for both linear layers."""
    return {
        f"{PREFIX}{QUERY}.lora_A.weight": (rank, HIDDEN),
        f"{PREFIX}{QUERY}.lora_B.weight": (HIDDEN, rank),
        f"{PREFIX}{UP}.lora_A.weight": (rank, HIDDEN),
        f"{PREFIX}{UP}.lora_B.weight": (INNER, rank),
    }


def write_adapter(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, rank: int = RANK, dtype: str = "F32") -> Snapshot:
    """Version 5, an adapter that says it has `rank` and holds `shapes`."""
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "lora_alpha": rank}))
    write_tensors(folder / "adapter_model.safetensors", shapes, dtype=dtype)
    return Snapshot(ref=SnapshotRef(version=5, sha256="5" * 64), kind=WeightKind.LORA, folder=folder)


def write_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str = "F32") -> Snapshot:
    """Version 5, all weights."""
    (folder / "config.json").write_text("{}")
    write_tensors(folder / "model.safetensors", shapes, dtype=dtype)
    return Snapshot(ref=SnapshotRef(version=5, sha256="5" * 64), kind=WeightKind.FULL, folder=folder)
