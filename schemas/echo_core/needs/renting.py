"""What to rent where generation does not hide behind training: a sequential run's workers, and one GPU for learner and worker. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from echo_core.capacity.costs import price_of
from echo_core.needs.memory import LearnerMemory, WorkerLoad, WorkerMemory
from echo_core.needs.model_shape import ModelShape
from echo_core.needs.speed import Gpu, Workload, rollouts_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialStep:
    """A step of a sequential run with so many workers. `per_hour`: the price of workers and learner together."""

    workers: int
    step_s: float
    per_hour: float

    @property
    def price(self) -> float:
        """Of the step."""
        return price_of(self.per_hour, self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialRun:
    """What a step of a sequential run takes besides its generation, and the prices. `fixed_s`: T_train + T_bcast."""

    fixed_s: float
    learner_per_hour: float
    worker_per_hour: float

    def step(self, workers: int, generation: Callable[[int], float]) -> SequentialStep:
        """With so many workers; `generation` gives T_gen, in seconds, by the number of workers."""
        return SequentialStep(
            workers=workers,
            step_s=generation(workers) + self.fixed_s,
            per_hour=self.learner_per_hour + workers * self.worker_per_hour,
        )

    def cheapest(self, most: int, generation: Callable[[int], float]) -> SequentialStep:
        """The rule: rent the number of workers, `most` at most, at which (price of learner and workers) · (T_gen + T_train + T_bcast) is
        the smallest; of equal ones the fewest.

        Nothing overlaps in a sequential step, so everybody is paid for all of it: a worker more shortens T_gen for all and costs the whole
        step. Learner 8 an hour, workers 1, T_train + T_bcast 100 s, T_gen 800 s / n: with 1, 2, 4, 8, 16 workers 9 · 900 = 8100,
        10 · 500 = 5000, 12 · 300 = 3600, 16 · 200 = 3200, 24 · 150 = 3600: eight."""
        return min((self.step(number, generation) for number in range(1, most + 1)), key=lambda step: step.price)


def generation_s(shape: ModelShape, work: Workload, gpu: Gpu, load: WorkerLoad, *, groups: int, workers: int) -> float:
    """T_gen: seconds in which `workers` workers generate the samples of a step, `groups` groups of equal size; infinite if none fits.

    Groups are not divided, so the busiest worker has ⌈groups / workers⌉ of them. With fewer sequences at once each token is made a little
    sooner, for the weights are read all the same: twice the workers are not twice as fast.

    Qwen3-30B-A3B, 16 groups of 16, 256 + 6144 tokens, two A100 each, 64 sequences at once: one token of 64 takes
    (30.53 GB + 64 · 0.1636 GB) / 1.2234e12 = 33.5 ms, of 32 29.2 ms. Four workers have 64 samples each: 6144 · 33.5 ms = 206 s; eight have
    32: 6144 · 29.2 ms = 180 s; one has 256, four times 64: 824 s."""
    samples = math.ceil(groups / workers) * work.rollouts // groups
    rate = rollouts_per_s(shape, work, gpu, replace(load, sequences=min(load.sequences, samples)))
    return samples / rate if rate else math.inf


def holds_both(learner: LearnerMemory, worker: WorkerMemory, memory: float, share: float) -> bool:
    """Whether a GPU of `memory` bytes holds a learner of one rank beside a worker that may use `share` of it.

    A learner of 5.2 GB and a worker that needs 4.1 GB, share 0.3: of 24 GB the worker has 7.2, and 16.8 are left. At a share of 0.9 only
    2.4 would be left."""
    return worker.least <= memory * share and learner.total <= memory * (1 - share)
