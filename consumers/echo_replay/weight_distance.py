"""The distance between retrained and published weights. Imports torch and safetensors."""

from __future__ import annotations

import hashlib
import math
from contextlib import closing
from typing import Any

import safetensors
import safetensors.torch

from echo_bus.bus import Bus
from echo_learner.commit.snapshot import SnapshotFiles
from echo_replay.published import read_from_store
from echo_schemas.errors import UserError
from echo_schemas.records import WeightManifest


def weight_distance(bus: Bus, published: WeightManifest, retrained: SnapshotFiles, start: SnapshotFiles) -> float:
    """‖retrained − published‖ / ‖published − start‖, over all tensors (Euclidean norm, float64); infinite where tensors or shapes differ. A
    norm over all weights, not the largest difference: Adam moves a weight whose gradient is only rounding error by a whole learning rate in
    either direction. Raises UserError if the published bytes are missing, TransportError."""
    theirs = _tensors(_published_bytes(bus, published)[: published.files[0].num_bytes])
    with _opened(retrained) as ours, _opened(start) as base:
        shapes = {name: ours.get_slice(name).get_shape() for name in ours.keys()}  # noqa: SIM118  it is no mapping
        if {name: list(tensor.shape) for name, tensor in theirs.items()} != shapes:
            return math.inf
        off = _norm(ours.get_tensor(name).double() - theirs[name].double() for name in theirs)
        way = _norm(theirs[name].double() - base.get_tensor(name).double() for name in theirs)
    return off / way if way else math.inf if off else 0.0


def weight_cosine(bus: Bus, published: WeightManifest, retrained: SnapshotFiles, start: SnapshotFiles) -> float:
    """The cosine between published − start and retrained − start, over all tensors (float64); NaN if one of them is zero. Raises as
    `weight_distance`."""
    theirs = _tensors(_published_bytes(bus, published)[: published.files[0].num_bytes])
    with _opened(retrained) as ours, _opened(start) as base:
        ways = [
            (theirs[name].double() - base.get_tensor(name).double(), ours.get_tensor(name).double() - base.get_tensor(name).double())
            for name in theirs
        ]
    lengths = _norm(way for way, _ in ways) * _norm(way for _, way in ways)
    return sum(float((way * other).sum()) for way, other in ways) / lengths if lengths else math.nan


def _published_bytes(bus: Bus, manifest: WeightManifest) -> bytes:
    if manifest.blob is None:
        return b"".join(read_from_store(manifest))
    with closing(bus.blob_reader()) as blobs:
        data = blobs.read(manifest.blob, manifest.run_id)
    if hashlib.sha256(data).hexdigest() != manifest.sha256:
        raise UserError(f"The published bytes of version {manifest.version} are not whole.", hint="`echoswarm audit` says more.")
    return data


def _opened(snapshot: SnapshotFiles) -> Any:
    return safetensors.safe_open(snapshot.path(snapshot.files[0]), framework="pt")


def _tensors(data: bytes) -> dict[str, Any]:
    try:
        return safetensors.torch.load(data)
    except Exception as exc:  # the library raises its own errors, and others for a malformed header
        raise UserError(f"A snapshot's first file does not hold tensors: {exc}") from exc


def _norm(tensors: Any) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
