"""Which cores and devices each role of a run gets on this machine. Pure, except `this_machine`.

On two cores an unpinned worker and learner evict one another's caches: pinned, a step is a twelfth faster. The scheduler places everything
else (Kafka, rewards, feeder).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

# A variable of vLLM: the cores of its compute threads, for each of its processes after a bar; or `nobind`.
_BIND = "VLLM_CPU_OMP_THREADS_BIND"
# With at least this many cores, one is left to Kafka, the rewards and the feeder.
_SPARE_FROM = 4
# A step of training or of generation frees and allocates the same tens of MiB again and again. By default glibc gives them back to the
# kernel each time; the page faults then take a twentieth of a small model's step.
_KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(256 << 20)}


@dataclass(frozen=True, slots=True)
class Machine:
    """Ids of the usable cores and GPUs. `binds`: whether processes are bound to cores of their own."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    binds: bool = True


@dataclass(frozen=True, slots=True)
class ProcessPlacement:
    """Where one process runs: additions to its environment, and the cores that it is bound to (none: the scheduler chooses)."""

    environ: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPlacement:
    """A place for each worker in order, for the learner, and for every other role."""

    workers: tuple[ProcessPlacement, ...]
    learner: ProcessPlacement
    others: ProcessPlacement


@dataclass(frozen=True, slots=True)
class WorkerNeed:
    """What a worker needs of this machine. `gpus`: their number, or, on a machine without GPUs, that of the processes that its model is
    split over; `is_elsewhere`: its engine is a remote server."""

    gpus: int = 1
    is_elsewhere: bool = False


def placement(machine: Machine, workers: Sequence[WorkerNeed], *, ranks: int = 1) -> RunPlacement:
    """Divide the machine. With enough GPUs: first the learner's ranks, then each worker's own. With too few every process sees all.

    Workers that generate on cores get equal parts of them. A worker whose engine is elsewhere is placed as the other roles are.
    """
    local = [need for need in workers if not need.is_elsewhere]
    found = _on_gpus(machine, local, ranks) if machine.gpus else _on_cores(machine.cores, local)
    if not machine.binds:
        found = RunPlacement(tuple(map(_unbound, found.workers)), _unbound(found.learner), found.others)
    places = iter(found.workers)
    return replace(found, workers=tuple(found.others if need.is_elsewhere else next(places) for need in workers))


def this_machine() -> Machine:
    """Cores that this process may use, and NVIDIA devices that CUDA_VISIBLE_DEVICES does not hide.

    If the user tells vLLM not to bind its threads, the other roles are not bound either.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    present = sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if present and visible is not None:
        present = [device for device in visible.split(",") if device.strip() not in {"", "-1"}]
    return Machine(tuple(cores), tuple(present), binds=os.environ.get(_BIND) != "nobind")


def _unbound(place: ProcessPlacement) -> ProcessPlacement:
    return ProcessPlacement({name: value for name, value in place.environ.items() if name != _BIND})


def _on_cores(cores: Sequence[int], needs: Sequence[WorkerNeed]) -> RunPlacement:
    workers = len(needs)
    single = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2", "DS_ACCELERATOR": "cpu"}
    others, computing = ProcessPlacement(single), {**single, **_KEEP_MEMORY}
    usable = len(cores) - (1 if len(cores) >= _SPARE_FROM else 0)
    if usable < workers + 1 or workers == 0:
        return RunPlacement((ProcessPlacement(computing),) * workers, ProcessPlacement(computing), others)
    for_learner = max(1, usable // 2) if workers <= usable - usable // 2 else 1
    each = (usable - for_learner) // workers
    bound = []
    for index, need in enumerate(needs):
        parts = _parts(cores[index * each : (index + 1) * each], max(1, need.gpus))
        lists = "|".join(",".join(map(str, part)) for part in parts)
        bound.append(ProcessPlacement({**computing, "OMP_NUM_THREADS": str(len(parts[0])), _BIND: lists}))
    learner_cores = tuple(cores[usable - for_learner : usable])
    return RunPlacement(tuple(bound), ProcessPlacement({**computing, "OMP_NUM_THREADS": str(for_learner)}, learner_cores), others)


def _parts(cores: Sequence[int], num: int) -> list[Sequence[int]]:
    """`cores` in `num` equal parts; all of them for everybody if there are fewer."""
    each = len(cores) // num
    return [cores[index * each : (index + 1) * each] if each else cores for index in range(num)]


def _on_gpus(machine: Machine, workers: Sequence[WorkerNeed], ranks: int) -> RunPlacement:
    others = ProcessPlacement({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    # A worker without a GPU computes on the cores that the others leave free.
    on_cores = ProcessPlacement({"CUDA_VISIBLE_DEVICES": ""})
    if len(machine.gpus) < ranks + sum(need.gpus for need in workers):
        return RunPlacement(tuple(ProcessPlacement() if need.gpus else on_cores for need in workers), ProcessPlacement(), others)
    left = iter(machine.gpus)

    def devices(count: int) -> ProcessPlacement:
        return ProcessPlacement({"CUDA_VISIBLE_DEVICES": ",".join(islice(left, count))}) if count else on_cores

    learner = devices(ranks)
    return RunPlacement(tuple(devices(need.gpus) for need in workers), learner, others)
