"""An estimate as lines of text: memory of each role, what to rent, bytes in the log."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from echo_core.capacity.costs import price_of
from echo_core.capacity.overlap import Demand, needed_rate, wait_s
from echo_core.needs.memory import learner_memory
from echo_core.needs.speed import GPUS, Gpu
from echo_core.needs.traffic import Retention, StepTraffic, bytes_per_step, kept_bytes
from echo_ops.estimate import ZERO, Needs
from echo_schemas.topic_files import load_topic_specs
from echo_settings.rules import store_from_bytes

_RANKS = (1, 2, 4, 8, 16, 32, 64)
_MANY_STEPS = 1_000_000


def lines_of(needs: Needs) -> Iterator[str]:
    """The lines; the assumptions come first."""
    work = needs.work
    rank = needs.learner.adapter_rank
    trained = needs.shape.adapter_parameters(rank) if rank else needs.shape.parameters
    yield (
        f"Estimated, not measured: prompts of {work.prompt_tokens:,.0f} tokens, answers of {work.answer_tokens:,.0f}, lines of "
        f"{needs.mbit_s:,.0f} Mbit/s (--prompt-tokens, --answer-tokens, --mbit-s). The formulas: docs/capacity.md."
    )
    yield (
        f"{needs.settings.policy.base}: {needs.shape.parameters / 1e9:.2f} billion weights, {trained / 1e9:.3g} billion trained; "
        f"a published version has {_size(needs.snapshot_bytes)}; a step has {work.rollouts:,} samples."
    )
    yield ""
    yield from _memory_lines(needs)
    yield ""
    yield from _rent_lines(needs)


def _memory_lines(needs: Needs) -> Iterator[str]:
    learner, worker = needs.learner_memory, needs.worker_memory
    parts = [(name, getattr(learner, name)) for name in ("weights", "optimizer", "reference", "copies", "activations", "logits")]
    host = f" In the machine's memory: optimizer {_size(learner.host)}." if learner.host else ""
    yield (
        f"Learner, each of {needs.learner.ranks} ranks (ZeRO-{needs.learner.stage}): {_size(learner.total)} of GPU memory = "
        f"{_sum_of(parts)}; a tenth for the allocator, 1.5 GB for CUDA.{host}"
    )
    parts = [("weights", worker.weights), ("adapters", worker.adapters), ("one sequence", worker.cache_least)]
    yield (
        f"Worker, each of its {needs.worker.gpus} GPUs: {_size(worker.least)} at least = {_sum_of(parts)}, and 3 GB for CUDA and buffers; "
        f"keys and values of all {needs.worker.sequences:,} sequences of {needs.worker.length:,} tokens: {_size(worker.cache_wanted)}."
    )


def _rent_lines(needs: Needs) -> Iterator[str]:
    kappa, ranks = needs.settings.publication_period, needs.learner.ranks
    fitting = [gpu for gpu in GPUS if needs.learner_memory.total <= gpu.memory]
    if not fitting:
        yield f"No GPU here holds a rank of {_size(needs.learner_memory.total)}: {_remedy(needs)}"
        return
    is_sequential = not needs.settings.budget
    if is_sequential:
        yield f"T_bcast is {needs.broadcast_s:,.1f} s; a sequential step takes it, T_train, and the generation of its samples:"
    else:
        yield f"T_bcast is {needs.broadcast_s:,.1f} s and has to be below kappa · T_train, kappa = {kappa}:"
    for gpu in fitting:
        verdict = "" if is_sequential else "  fits" if needs.broadcast_s < kappa * needs.train_s(gpu) else "  does not fit"
        yield f"  learner on {ranks} × {gpu.name:<14}  T_train {needs.train_s(gpu):>8,.1f} s{verdict}"
    chosen = next((gpu for gpu in fitting if gpu.price_per_hour), fitting[0])
    yield ""
    yield from _worker_lines(needs, chosen)
    yield ""
    yield from _traffic_lines(needs, needs.train_s(chosen))


def _worker_lines(needs: Needs, chosen: Gpu) -> Iterator[str]:
    """How many workers of each kind a learner on `chosen` needs, and the cheapest kind with a price."""
    kappa, budget, ranks = needs.settings.publication_period, needs.settings.budget, needs.learner.ranks
    demand = needs.demand(chosen)
    # Without overlap no rate hides generation: take a pool that is as fast as the learner.
    wanted = needed_rate(demand, kappa, budget) if budget else demand.rollouts / demand.train_s
    if math.isinf(wanted):
        yield (
            f"Beside {ranks} × {chosen.name} no number of workers keeps the learner busy: raise [staleness] budget, or publish an adapter."
        )
        return
    yield f"Workers beside {ranks} × {chosen.name}, which wants {wanted:.3g} rollouts/s:"
    priced: list[tuple[float, int, Gpu]] = []
    for gpu in GPUS:
        rate = needs.rate(gpu)
        if not rate:
            yield f"  {gpu.name:<14}  too small"
            continue
        count = math.ceil(wanted / rate)
        of_several = f" of {needs.worker.gpus} GPUs" if needs.worker.gpus > 1 else ""
        yield f"  {gpu.name:<14}  {count:>4} × {rate:.3g} rollouts/s{of_several}"
        if gpu.price_per_hour and chosen.price_per_hour:
            priced.append((ranks * chosen.price_per_hour + count * needs.worker.gpus * gpu.price_per_hour, count, gpu))
    if priced:
        per_hour, count, gpu = min(priced, key=lambda option: option[0])
        step_s = demand.train_s + _wait_s(demand, kappa, count * needs.rate(gpu), overlaps=budget > 0)
        yield (
            f"To rent, at ECHO-2's prices: {ranks} × {chosen.name} and {count * needs.worker.gpus} × {gpu.name}: ${per_hour:,.2f} an hour, "
            f"${price_of(per_hour, step_s):,.2f} a step of {step_s:,.0f} s."
        )


def _wait_s(demand: Demand, kappa: int, rate: float, *, overlaps: bool) -> float:
    """Waiting of the learner in each step, in seconds."""
    return wait_s(demand, kappa, rate) / kappa if overlaps else demand.broadcast_s + demand.rollouts / rate


def _remedy(needs: Needs) -> str:
    """The smallest number of ranks that fits on the largest priced GPU, under ZeRO-3 with recomputed activations."""
    largest = max(gpu.memory for gpu in GPUS if gpu.price_per_hour)
    for ranks in _RANKS:
        load = replace(needs.learner, ranks=ranks, stage=3, recomputes=True)
        if learner_memory(needs.shape, load).total <= largest:
            file = f'deepspeed = a file with {{"{ZERO}": {{"stage": 3}}}}'
            return f"write [learner] ranks = {ranks}, gradient_checkpointing = true and {file}."
    return "lower [learner] micro_batch_tokens or [policy] max_length, or train an adapter."


def _traffic_lines(needs: Needs, step_s: float) -> Iterator[str]:
    settings = needs.settings
    through_log = needs.snapshot_bytes < store_from_bytes(settings)
    traffic = bytes_per_step(
        StepTraffic(
            groups=settings.learner.groups_per_step,
            group_size=settings.rollout.group_size,
            prompt_tokens=needs.work.prompt_tokens,
            answer_tokens=needs.work.answer_tokens,
            rewards=len(settings.rewards),
            publication_period=settings.publication_period,
            snapshot_bytes=needs.snapshot_bytes,
            through_log=through_log,
        )
    )
    specs = {spec.name: spec for spec in load_topic_specs() if spec.name in traffic}
    retentions = {name: _retention(spec.config, spec.partitions) for name, spec in specs.items()}
    kept = kept_bytes(traffic, retentions, step_s=step_s, steps=settings.learner.steps or _MANY_STEPS)
    yield "Bytes before compression: of a step, and on the brokers' disks at the end of the run or of retention:"
    for name, num_bytes in traffic.items():
        if not num_bytes:
            continue
        replicas = settings.kafka.replicas or specs[name].replication_factor
        yield f"  {name:<14}  {_size(num_bytes):>9} a step  {_size(kept[name] * replicas):>9} in {replicas} copies"
    if not through_log:
        yield f"  [store] gets {_size(needs.snapshot_bytes)} every {settings.publication_period} steps."


def _retention(config: Mapping[str, str], partitions: int) -> Retention:
    hours, size = int(config.get("retention.ms", -1)) / 3_600_000, int(config.get("retention.bytes", -1))
    return Retention(
        hours=hours if hours > 0 else None,
        bytes=size * partitions if size > 0 else None,
        is_compacted=config["cleanup.policy"] == "compact",
    )


def _sum_of(parts: Sequence[tuple[str, int]]) -> str:
    return " + ".join(f"{name} {_size(size)}" for name, size in parts if size)


def _size(num_bytes: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes / 1e3:,.1f} kB"
