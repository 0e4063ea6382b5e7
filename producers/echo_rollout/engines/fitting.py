"""Does a snapshot fit the base model? Answered from names and shapes alone, before an engine is touched. Imports safetensors.

Engines do not check it: they copy a tensor that is too small into a corner of theirs, and leave out one that they do not know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import Snapshot, SnapshotRejected
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

Shapes = Mapping[str, tuple[int, ...]]

_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_ADAPTER_PREFIX = "base_model.model."
_TIED = "lm_head.weight"
# An engine casts these to its own type; others (quantised weights) it would read at the wrong scale.
_FLOATING = ("F64", "F32", "F16", "BF16")


def weight_shapes(folder: Path, *, floating: bool = False) -> dict[str, tuple[int, ...]]:
    """Name to shape of every tensor in the folder's `model*.safetensors`. Raises ValueError if there is none, or one cannot be read;
    with `floating`, also if one does not hold floating-point numbers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("model*.safetensors")):
        shapes |= _header(file, floating=floating)
    if not shapes:
        message = f"{folder} has no model.safetensors"
        raise ValueError(message)
    return shapes


def base_shapes(base: Path) -> dict[str, tuple[int, ...]]:
    """`weight_shapes` of the base model. Raises UserError."""
    try:
        return weight_shapes(base)
    except (ValueError, OSError) as exc:
        raise UserError(f"{base} cannot be read: {exc}.", hint="See [policy] base.") from exc


def check_fit(snapshot: Snapshot, base: Shapes, *, max_rank: int) -> None:
    """Raise SnapshotRejected if the snapshot is not complete, or is not of the base's shape. `max_rank`: of an adapter."""
    try:
        complaint = _adapter_complaint(snapshot.folder, base, max_rank) if snapshot.kind is WeightKind.LORA else None
        if snapshot.kind is WeightKind.FULL:
            complaint = _weights_complaint(weight_shapes(snapshot.folder, floating=True), base)
    except (OSError, ValueError, KeyError, TypeError) as exc:
        complaint = f"its files cannot be read: {exc}"
    if complaint is not None:
        raise SnapshotRejected(f"Version {snapshot.ref.version} does not fit the base model: {complaint}.")


def _adapter_complaint(folder: Path, base: Shapes, max_rank: int) -> str | None:
    config: dict[str, Any] = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
    rank = int(config["r"])
    if rank > max_rank:
        return f"its rank {rank} is above the engine's {max_rank} ([policy.lora] r)"
    shapes = _header(folder / _ADAPTER_WEIGHTS, floating=True)
    if not shapes:
        return "it holds no tensor"
    for name, shape in shapes.items():
        module, _, matrix = name.removeprefix(_ADAPTER_PREFIX).partition(".lora_")
        weight = base.get(f"{module}.weight")
        if weight is None or matrix not in {"A.weight", "B.weight"} or len(weight) != 2:
            return f"the base has no layer for its tensor {name}"
        wanted = (rank, weight[1]) if matrix == "A.weight" else (weight[0], rank)
        if shape != wanted:
            return f"{name} has the shape {shape}, and the base needs {wanted}"
        other = name.replace(".lora_A.", ".lora_B.") if matrix == "A.weight" else name.replace(".lora_B.", ".lora_A.")
        if other not in shapes:
            return f"{name} is there without {other}"
    return None


def _weights_complaint(shapes: Shapes, base: Shapes) -> str | None:
    # A model with tied embeddings may be written with or without its copy.
    missing = sorted(set(base) - set(shapes) - {_TIED})
    if missing:
        return f"it lacks {len(missing)} of the model's {len(base)} tensors, {missing[0]} for one"
    for name, shape in shapes.items():
        if name not in base and name != _TIED:
            return f"the base has no tensor {name}"
        if shape != base.get(name, shape):
            return f"{name} has the shape {shape}, and the base has {base[name]}"
    return None


def _header(file: Path, *, floating: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes from the file's header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  it is no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            dtypes = {name: str(tensor.get_dtype()) for name, tensor in slices.items()}
    except SafetensorError as exc:
        message = f"{file.name} is no whole safetensors file: {exc}"
        raise ValueError(message) from exc
    for name, dtype in dtypes.items():
        if floating and dtype not in _FLOATING:
            message = f"{name} holds {dtype} numbers, and weights are one of {', '.join(_FLOATING)}"
            raise ValueError(message)
    if any(math.prod(shape) == 0 for shape in shapes.values()):
        message = f"{file.name} has an empty tensor"
        raise ValueError(message)
    return shapes
