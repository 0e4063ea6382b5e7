"""Bytes on the learner's disk: of one checkpoint, and of all that lie there at once. Pure.

A checkpoint has the trainer's state and, if its version is published, the weights once more as the file that workers load. The state is
what DeepSpeed writes: float32 master weights and Adam's two moments, and the weights themselves unless ZeRO-3 spreads them, which leaves
only the master copy. Gradients are not written."""

from __future__ import annotations

import math
from dataclasses import dataclass

from echo_core.needs.memory import ITEM_BYTES

_MOMENTS, _MASTER = 8, 4
_SPREAD = 3
"""The ZeRO stage under which no rank has all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBytes:
    """Bytes of one checkpoint of a published version, on all ranks together."""

    snapshot: int
    """The file of weights or adapter that workers load."""
    trainer: int
    """Weights, master copies and moments."""

    @property
    def total(self) -> int:
        """Both parts."""
        return self.snapshot + self.trainer


def checkpoint_bytes(trained: int, dtype: str, stage: int) -> CheckpointBytes:
    """Of a checkpoint with `trained` trained weights; `stage`: ZeRO's.

    Qwen3-8B in bfloat16, 8.19e9 weights, all trained, ZeRO-3: master 4 and moments 8 bytes a weight are 98.3 GB, the workers' file 2 bytes
    a weight 16.4 GB: 114.7 GB, 7 times the file. ZeRO-0 to 2 write the bfloat16 weights too: 131.1 GB, 8 times.
    In float32 only ZeRO-1 and above keep a master copy beside the weights. Measured without the workers' file, on a model of 5.26e6 weights
    and one rank, in bytes a weight: bfloat16 14.01 under ZeRO-0 and 2, 12.01 under 3; float32 12.01 under 3."""
    item = ITEM_BYTES[dtype]
    master = _MASTER if stage or dtype != "float32" else 0
    weights = item if stage < _SPREAD else 0
    return CheckpointBytes(snapshot=trained * item, trainer=trained * (weights + master + _MOMENTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes in the folder of checkpoints, at most. `checkpoints`: how many lie there at once; `snapshots`: files of workers in the store
    that lies in the same folder, 0 if the log or another place has them."""

    one: CheckpointBytes
    checkpoints: int
    published: int
    """Those of `checkpoints` that have the workers' file."""
    snapshots: int

    @property
    def total(self) -> int:
        """Checkpoints and store."""
        return self.checkpoints * self.one.trainer + (self.published + self.snapshots) * self.one.snapshot

    def room_needed(self, there: int) -> int:
        """Bytes that have to be free if `there` bytes lie in the folder already: a run that goes on needs less, but always room for one
        checkpoint, since the new one is written before an old one is removed.

        400 bytes in all, one checkpoint of 100: at the start 400; with three there 100; with four, after a death, still 100."""
        return max(self.one.total, self.total - there)


def disk_need(one: CheckpointBytes, *, keep: int, every: int, period: int, steps: int, stored: int = 0) -> DiskNeed:
    """Of a run that writes a checkpoint every `every` steps and publishes every `period`; `steps` 0: without end; `stored`: how many files
    of workers the store in the same folder keeps, 0: there is none.

    Old checkpoints are removed at a publication: all but the newest `keep` and those since the publication before. Until the next one, its
    own checkpoint included, p = period / every are added: max(keep, p + 1) + p at once, and every p-th has the workers' file. The store has
    one more than it keeps while the next is written.

    keep = 3, every step: published each step max(3, 2) + 1 = 4, all with the file; every second step max(3, 3) + 2 = 5, three with it.
    Qwen3-8B under ZeRO-3 as above, every second step, `stored` 3: 5 · 98.3 + (3 + 4) · 16.4 = 606 GB. A run of 2 steps has three
    checkpoints (versions 0 to 2), and two files in the store."""
    per_period = max(1, period // every)
    checkpoints = max(keep, per_period + 1) + per_period
    snapshots = stored + 1 if stored else 0
    if steps:
        checkpoints, snapshots = min(checkpoints, steps // every + 1), min(snapshots, steps // period + 1)
    return DiskNeed(one=one, checkpoints=checkpoints, published=math.ceil(checkpoints / per_period), snapshots=snapshots)
