"""An estimate as lines of text: memory of each role, disk, what to rent, bytes in the log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echo_core.needs.amounts import figure, size
from echo_core.needs.speed import GPUS
from echo_core.needs.traffic import Retention, StepTraffic, bytes_per_step, kept_bytes
from echo_ops.estimate import Needs
from echo_ops.rent_lines import remedy, rent
from echo_rollout.engines.catalogue import is_elsewhere
from echo_schemas.topic_files import load_topic_specs

_MANY_STEPS = 1_000_000


def lines_of(needs: Needs) -> Iterator[str]:
    """The lines; the assumptions come first."""
    work = needs.work
    rank = needs.learner.adapter_rank
    trained = needs.shape.adapter_parameters(rank) if rank else needs.shape.parameters
    yield (
        f"Estimated, not measured: prompts of {work.prompt_tokens:,.0f} tokens, answers of {work.answer_tokens:,.0f}, lines of "
        f"{figure(needs.mbit_s)} Mbit/s (--prompt-tokens, --answer-tokens, --mbit-s). The formulas: docs/capacity.md."
    )
    yield (
        f"{needs.settings.policy.base}: {figure(needs.shape.parameters / 1e9)} billion weights, {figure(trained / 1e9)} billion trained; "
        f"a published version has {size(needs.snapshot_bytes)}; a step has {_counted(work.rollouts, 'sample')}."
    )
    yield ""
    yield from _memory_lines(needs)
    yield ""
    yield from _rent_lines(needs)


def _memory_lines(needs: Needs) -> Iterator[str]:
    learner, worker = needs.learner_memory, needs.worker_memory
    parts = [
        ("weights", learner.weights),
        ("gradients and optimizer", learner.optimizer),
        ("reference", learner.reference),
        ("copies", learner.copies),
        ("activations", learner.activations),
        ("logits", learner.logits),
    ]
    host = f" In the machine's memory: gradients and optimizer {size(learner.host)}." if learner.host else ""
    yield (
        f"Learner, {_each(needs.learner.ranks, 'rank')} (ZeRO-{needs.learner.stage}): {size(learner.total)} of GPU memory = "
        f"{_sum_of(parts)}; a tenth for the allocator, 1.5 GB for CUDA.{host}"
    )
    parts = [("weights", worker.weights), ("adapters", worker.adapters), ("one sequence", worker.cache_least)]
    yield (
        f"Worker, {_each(needs.worker.gpus, 'GPU')}: {size(worker.least)} at least = {_sum_of(parts)}, and 3 GB for CUDA and buffers; "
        f"keys and values of {_counted(needs.worker.sequences, 'sequence')} of {needs.worker.length:,} tokens: "
        f"{size(worker.cache_wanted)}."
    )
    yield from _worker_notes(needs)
    yield _disk_line(needs)


def _worker_notes(needs: Needs) -> Iterator[str]:
    """Where the numbers of a worker are of GPUs that it does not have."""
    rollout = needs.settings.rollout
    if rollout.devices:
        sizes, num = " and ".join(f"{device.memory_gb:g} GB" for device in rollout.devices), len(rollout.devices)
        yield f"  Its devices have {sizes}, and these numbers are of {num} equal GPUs. Layers are planned from the model's files."
    elif is_elsewhere(rollout.options):
        yield f"  The engine {rollout.engine!r} asks servers that run already, and these numbers are of a GPU that does their work."


def _disk_line(needs: Needs) -> str:
    disk, keep = needs.disk, needs.settings.checkpoint.keep
    stored = f" + {_counted(disk.snapshots, 'file')} for workers in the store beside them" if disk.snapshots else ""
    return (
        f"Disk of [checkpoint] folder: {size(disk.total)} = {_counted(disk.checkpoints, 'checkpoint')} at most (keep = {keep}; old ones "
        f"are removed at a publication){stored}; a checkpoint has {size(disk.one.total)} = weights and optimizer "
        f"{size(disk.one.trainer)} + file for workers {size(disk.one.snapshot)}, which only published versions have."
    )


def _rent_lines(needs: Needs) -> Iterator[str]:
    fitting = [gpu for gpu in GPUS if needs.learner_memory.total <= gpu.memory]
    if not fitting:
        yield f"No GPU here holds a rank of {size(needs.learner_memory.total)}: {remedy(needs)}"
        return
    renting = rent(needs, fitting)
    yield from renting.lines
    yield ""
    yield from _traffic_lines(needs, renting.step_s)


def _traffic_lines(needs: Needs, step_s: float) -> Iterator[str]:
    settings = needs.settings
    traffic = bytes_per_step(
        StepTraffic(
            groups=settings.learner.groups_per_step,
            group_size=settings.rollout.group_size,
            prompt_tokens=needs.work.prompt_tokens,
            answer_tokens=needs.work.answer_tokens,
            rewards=len(settings.rewards),
            publication_period=settings.publication_period,
            snapshot_bytes=needs.snapshot_bytes,
            through_log=needs.through_log,
        )
    )
    specs = {spec.name: spec for spec in load_topic_specs() if spec.name in traffic}
    retentions = {name: _retention(spec.config, spec.partitions) for name, spec in specs.items()}
    kept = kept_bytes(traffic, retentions, step_s=step_s, steps=settings.learner.steps or _MANY_STEPS)
    yield "Bytes before compression: of a step, and on the brokers' disks at the end of the run or of retention:"
    for name, num_bytes in traffic.items():
        if not num_bytes:
            continue
        copies = _counted(needs.replicas, "copy", "copies")
        yield f"  {name:<14}  {size(num_bytes):>9} a step  {size(kept[name] * needs.replicas):>9} in {copies}"
    if not needs.through_log:
        yield f"  [store] gets {size(needs.snapshot_bytes)} {_every(settings.publication_period)}."


def _retention(config: Mapping[str, str], partitions: int) -> Retention:
    hours, most = int(config.get("retention.ms", -1)) / 3_600_000, int(config.get("retention.bytes", -1))
    return Retention(
        hours=hours if hours > 0 else None,
        bytes=most * partitions if most > 0 else None,
        is_compacted=config["cleanup.policy"] == "compact",
    )


def _sum_of(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{name} {size(num_bytes)}" for name, num_bytes in parts if num_bytes)


def _counted(number: int, one: str, several: str = "") -> str:
    """1 sample, 2 samples, 1 copy, 3 copies."""
    return f"{number:,} {one if number == 1 else several or f'{one}s'}"


def _each(number: int, noun: str) -> str:
    """Its only rank; each of its 4 ranks."""
    return f"its only {noun}" if number == 1 else f"each of its {_counted(number, noun)}"


def _every(period: int) -> str:
    """Every step, every 2 steps."""
    return "every step" if period == 1 else f"every {period} steps"
