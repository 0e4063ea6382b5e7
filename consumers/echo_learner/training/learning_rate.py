"""The learning rate of an update: linear warm-up, then constant or falling, linearly or along half a cosine."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """[learner] `lr`, `warmup_steps`, `lr_schedule` (`constant`, `linear` or `cosine`), `decay_steps` (0 for a constant rate) and `min_lr`.

    All steps are the optimizer's updates, counted from the first one of the run.
    """

    lr: float
    warmup_steps: int = 0
    schedule: str = "constant"
    decay_steps: int = 0
    min_lr: float = 0.0

    def at(self, update: int) -> float:
        """The rate of the run's `update`-th update, from 1 on. With `decay_steps` = D and a warm-up of W it is `lr` at update W + 1 (or 1)
        and `min_lr` from update D + 1 on, so that none of the D updates has a rate of 0."""
        if update <= self.warmup_steps:
            return self.lr * (update / self.warmup_steps)
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (update - 1 - self.warmup_steps) / (self.decay_steps - self.warmup_steps))
        left = 1.0 - done if self.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
        return self.min_lr + (self.lr - self.min_lr) * left
