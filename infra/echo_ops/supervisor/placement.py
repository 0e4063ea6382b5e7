"""Which cores and devices each role of a run gets on this machine. Pure, but for `this_machine`.

On two cores an unpinned worker and learner take one another's caches and threads: pinned, a step is a twelfth faster. Everything else
(Kafka, rewards, feeder) is left to the scheduler, which fills the gaps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# From so many cores on, one is left to Kafka, the rewards and the feeder.
_SPARE_FROM = 4
# A training step frees and asks for the same tens of MiB again and again; glibc would give them back to the kernel each time and fault
# them in anew, which is a twentieth of a small model's step.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(256 << 20)}


@dataclass(frozen=True, slots=True)
class Machine:
    """What may be used: ids of cores and of GPUs."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process runs: additions to its environment, and the cores it is bound to (none: wherever the scheduler likes)."""

    environ: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """A place for each worker in order, for the learner, and for everybody else."""

    workers: tuple[Place, ...]
    learner: Place
    others: Place


def placement(machine: Machine, *, workers: int, ranks: int = 1, gpus_per_worker: int = 1) -> Placement:
    """Share the machine out. With GPUs: the learner's ranks first, then each worker's own, if there are enough; else all see all."""
    return _on_gpus(machine, workers, ranks, gpus_per_worker) if machine.gpus else _on_cores(machine.cores, workers)


def this_machine() -> Machine:
    """Cores that this process may use, and NVIDIA devices that CUDA_VISIBLE_DEVICES does not hide."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    present = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present and visible is not None:
        present = [device for device in visible.split(",") if device.strip() not in {"", "-1"}]
    return Machine(tuple(cores), tuple(present))


def _on_cores(cores: Sequence[int], workers: int) -> Placement:
    single = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "DS_ACCELERATOR": "cpu"}
    others = Place(single)
    usable = len(cores) - (1 if len(cores) >= _SPARE_FROM else 0)
    if usable < workers + 1 or workers == 0:
        return Placement((others,) * workers, Place({**single, **_KEEP_MEMORY}), others)
    for_learner = max(1, usable // 2) if workers <= usable - usable // 2 else 1
    each = (usable - for_learner) // workers
    bound = tuple(
        Place(
            {
                **single,
                "OMP_NUM_THREADS": str(each),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores[index * each : (index + 1) * each]),
            }
        )
        for index in range(workers)
    )
    learner_cores = tuple(cores[usable - for_learner : usable])
    return Placement(bound, Place({**single, **_KEEP_MEMORY, "OMP_NUM_THREADS": str(for_learner)}, learner_cores), others)


def _on_gpus(machine: Machine, workers: int, ranks: int, gpus_per_worker: int) -> Placement:
    others = Place({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    if len(machine.gpus) < ranks + workers * gpus_per_worker:
        return Placement((Place(),) * workers, Place(), others)

    def devices(start: int, count: int) -> Place:
        return Place({"CUDA_VISIBLE_DEVICES": ",".join(machine.gpus[start : start + count])})

    return Placement(
        tuple(devices(ranks + index * gpus_per_worker, gpus_per_worker) for index in range(workers)), devices(0, ranks), others
    )
