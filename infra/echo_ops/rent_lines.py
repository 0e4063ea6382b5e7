"""What to rent for a run, as lines of text: which GPUs, how many, at what price a step.

A run is one of three: learner and worker share one GPU, generation hides behind training (asynchronous), or a step is generation and then
training (sequential)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from echo_core.capacity.costs import price_of
from echo_core.capacity.overlap import Demand, needed_rate, wait_s
from echo_core.needs.amounts import figure, money, seconds, size, whole_seconds
from echo_core.needs.arrival import arrival_limit_s, least_mbit_s, least_period_and_budget
from echo_core.needs.fitting import least_change
from echo_core.needs.memory import LearnerLoad, learner_memory
from echo_core.needs.renting import SequentialRun, SequentialStep
from echo_core.needs.speed import GPUS, Gpu
from echo_ops.estimate import ZERO, Needs, with_adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class Rent:
    """The lines, and the seconds of a step on what they say."""

    lines: tuple[str, ...]
    step_s: float


def rent(needs: Needs, fitting: Sequence[Gpu]) -> Rent:
    """`fitting`: the kinds of GPU that hold a rank of the learner, at least one."""
    chosen = next((gpu for gpu in fitting if gpu.price_per_hour), fitting[0])
    if needs.is_shared(chosen):
        return _shared(needs, chosen)
    found = _overlapping(needs, chosen) if needs.settings.budget else _sequential(needs, chosen)
    return Rent(lines=(*_learner_lines(needs, fitting), "", *found.lines), step_s=found.step_s)


def _learner_lines(needs: Needs, fitting: Sequence[Gpu]) -> list[str]:
    kappa, ranks, budget = needs.settings.publication_period, needs.learner.ranks, needs.settings.budget
    if budget:
        lines = [f"T_bcast is {seconds(needs.broadcast_s)} and has to be below kappa · T_train, kappa = {kappa}:"]
    else:
        lines = [f"T_bcast is {seconds(needs.broadcast_s)}; a sequential step takes it, T_train, and T_gen, the generation of its samples:"]
    for gpu in fitting:
        verdict = "" if not budget else "  fits" if needs.broadcast_s < kappa * needs.train_s(gpu) else "  does not fit"
        lines.append(f"  learner on {ranks} × {gpu.name:<14}  T_train {seconds(needs.train_s(gpu)):>10}{verdict}")
    return lines


def _shared(needs: Needs, chosen: Gpu) -> Rent:
    """One GPU for both. It does one thing at a time: a step takes T_train + T_gen, and in sequential mode T_bcast."""
    waits_s = 0.0 if needs.settings.budget else needs.broadcast_s
    head = (
        f"Learner and worker share one GPU, of which the file gives the worker {needs.worker.share:g}; a step takes T_train and T_gen, "
        "the generation of its samples, one after the other:"
    )
    lines = [head]
    for gpu in filter(needs.is_shared, GPUS):
        train_s, generation_s = needs.train_s(gpu), needs.generation_s(gpu, 1)
        step_s = train_s + generation_s + waits_s
        lines.append(f"  {gpu.name:<14}  T_train {seconds(train_s)}, T_gen {seconds(generation_s)}: a step of {seconds(step_s)}")
    step_s = needs.train_s(chosen) + needs.generation_s(chosen, 1) + waits_s
    if chosen.price_per_hour:
        per_hour, price = chosen.price_per_hour, money(price_of(chosen.price_per_hour, step_s))
        lines.append(
            f"To rent, at ECHO-2's prices: 1 × {chosen.name} for both: ${per_hour:,.2f} an hour, {price} a step of {seconds(step_s)}."
        )
    else:
        lines.append(_no_price(needs, chosen))
    return Rent(lines=tuple(lines), step_s=step_s)


def _overlapping(needs: Needs, chosen: Gpu) -> Rent:
    """As many workers of each kind as a learner on `chosen` needs in order not to wait, and the cheapest kind with a price."""
    kappa, budget, ranks = needs.settings.publication_period, needs.settings.budget, needs.learner.ranks
    demand = needs.demand(chosen)
    wanted = needed_rate(demand, kappa, budget)
    if math.isinf(wanted):
        return Rent(lines=_too_late(needs, chosen, demand), step_s=demand.train_s)
    lines = [f"Workers beside {ranks} × {chosen.name}, which wants {figure(wanted)} rollouts/s:"]
    priced: list[tuple[float, int, Gpu]] = []
    for gpu in GPUS:
        rate = needs.rate(gpu)
        if not rate:
            lines.append(f"  {gpu.name:<14}  too small")
            continue
        count = math.ceil(wanted / rate)
        lines.append(f"  {gpu.name:<14}  {count:>4,} × {figure(rate)} rollouts/s{_of_several(needs)}")
        if gpu.price_per_hour and chosen.price_per_hour:
            priced.append((ranks * chosen.price_per_hour + count * needs.worker.gpus * gpu.price_per_hour, count, gpu))
    if not priced:
        return Rent(lines=(*lines, _no_price(needs, chosen)), step_s=demand.train_s)
    per_hour, count, gpu = min(priced, key=lambda option: option[0])
    step_s = demand.train_s + wait_s(demand, kappa, count * needs.rate(gpu)) / kappa
    price = money(price_of(per_hour, step_s))
    lines.append(f"{_to_rent(needs, chosen, count, gpu)}: ${per_hour:,.2f} an hour, {price} a step of {whole_seconds(step_s)}.")
    return Rent(lines=tuple(lines), step_s=step_s)


def _too_late(needs: Needs, chosen: Gpu, demand: Demand) -> tuple[str, ...]:
    """Why no number of workers is enough, and each change of the file or of the lines that mends it by itself."""
    kappa, budget, full = needs.settings.publication_period, needs.settings.budget, needs.settings.policy.update == "full"
    limit_s = arrival_limit_s(demand, kappa, budget)
    longer, older = least_period_and_budget(demand, kappa, needs.settings.checkpoint.every)
    ways = [f"[staleness] publication_period = {longer:,} with budget = {older:,}: a sample may then be {older:,} versions old"]
    mbit_s = least_mbit_s(needs.snapshot_bytes, needs.load_s, limit_s)
    if math.isfinite(mbit_s):
        ways.append(f"a line of more than {figure(math.ceil(mbit_s))} Mbit/s to each worker (--mbit-s)")
    if full:
        adapter = with_adapter(needs).demand(chosen)
        if math.isfinite(needed_rate(adapter, kappa, budget)):
            ways.append(f'[policy] update = "lora": an adapter arrives in {seconds(adapter.broadcast_s)}')
    head = (
        f"Beside {needs.learner.ranks} × {chosen.name} no number of workers keeps the learner busy: kappa = {kappa} and S = {budget} leave "
        f"new weights {seconds(limit_s)} to arrive, and T_bcast is {seconds(demand.broadcast_s)}."
    )
    more = "Each of these is enough by itself; beyond it fewer workers are needed:" if len(ways) > 1 else "This is enough:"
    return (head, more, *(f"  {way}" for way in ways))


def _sequential(needs: Needs, chosen: Gpu) -> Rent:
    """The number of workers at which a step costs the least (`SequentialRun.cheapest`), of the kind where it costs the least."""
    ranks, groups = needs.learner.ranks, needs.settings.learner.groups_per_step
    train_s = needs.train_s(chosen)
    lines = [
        f"Workers beside {ranks} × {chosen.name}; a step is T_gen + {seconds(train_s + needs.broadcast_s)}, and its price says how many:"
    ]
    priced: list[tuple[SequentialStep, SequentialStep, Gpu]] = []
    for gpu in GPUS:
        rate = needs.rate(gpu)
        if not rate:
            lines.append(f"  {gpu.name:<14}  too small")
            continue
        line = f"  {gpu.name:<14}  {figure(rate)} rollouts/s{_of_several(needs)}, T_gen of one {whole_seconds(needs.generation_s(gpu, 1))}"
        if gpu.price_per_hour and chosen.price_per_hour:
            run = SequentialRun(
                fixed_s=train_s + needs.broadcast_s,
                learner_per_hour=ranks * chosen.price_per_hour,
                worker_per_hour=needs.worker.gpus * gpu.price_per_hour,
            )
            generation = partial(needs.generation_s, gpu)
            best = run.cheapest(groups, generation)
            priced.append((best, run.step(2 * best.workers, generation), gpu))
            line += f"; cheapest with {best.workers}: {_step(best)}"
        lines.append(line)
    if not priced:
        return Rent(lines=(*lines, _no_price(needs, chosen)), step_s=train_s)
    best, twice, gpu = min(priced, key=lambda option: option[0].price)
    lines.append(
        f"{_to_rent(needs, chosen, best.workers, gpu)}: ${best.per_hour:,.2f} an hour, {_step(best)}. "
        f"With {twice.workers} workers instead of {best.workers}: {_step(twice)}."
    )
    return Rent(lines=tuple(lines), step_s=best.step_s)


def remedy(needs: Needs) -> str:
    """The least that a file has to say for a rank of its learner to fit into a GPU with a price."""
    found = _priced_fit(needs)
    if found is not None:
        written, memory, gpu = found
        return f"write {written}: a rank then takes {size(memory)}, which the {gpu.name} holds."
    settings = needs.settings
    less = "[learner] micro_batch_tokens" if settings.learner.micro_batch_tokens > settings.policy.max_length else "[policy] max_length"
    adapter = ', or write [policy] update = "lora"' if settings.policy.update == "full" else ""
    return f"lower {less}{adapter}."


def _priced_fit(needs: Needs) -> tuple[str, int, Gpu] | None:
    """What to write, the bytes that a rank then takes, and the smallest GPU with a price that holds it; None if nothing is enough."""
    priced = sorted((gpu for gpu in GPUS if gpu.price_per_hour), key=lambda gpu: gpu.memory)
    changed = least_change(needs.shape, needs.learner, priced[-1].memory)
    if changed is None:
        return None
    total = learner_memory(needs.shape, changed).total
    return _written(needs, changed), total, next(gpu for gpu in priced if gpu.memory >= total)


def _written(needs: Needs, changed: LearnerLoad) -> str:
    """The lines of [learner] in which `changed` is not the file's."""
    parts = []
    if changed.ranks != needs.learner.ranks:
        parts.append(f"ranks = {changed.ranks}")
    if changed.recomputes != needs.learner.recomputes:
        parts.append("gradient_checkpointing = true")
    if changed.stage != needs.learner.stage:
        # ZeRO-3 and compiled layers exclude each other.
        parts += ["compile = false"] * needs.settings.learner.compile
        parts.append(f'deepspeed = a file with {{"{ZERO}": {{"stage": {changed.stage}}}}}')
    return f"[learner] {', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}"


def _no_price(needs: Needs, chosen: Gpu) -> str:
    """Why nothing is said about the rent, and what makes the learner fit into a GPU with a price."""
    if not any(needs.rate(gpu) for gpu in GPUS):
        return "No GPU here holds a worker: spread it over more of them with [rollout.options] tensor_parallel_size."
    if chosen.price_per_hour:
        return "No price: the GPUs that hold a worker have none in the table."
    head = "No price: the GPUs that hold the learner have none in the table."
    found = _priced_fit(needs)
    if found is None:
        return head
    written, memory, gpu = found
    return f"{head} With {written} a rank takes {size(memory)}, which the {gpu.name} holds, and that one has a price."


def _to_rent(needs: Needs, chosen: Gpu, workers: int, gpu: Gpu) -> str:
    return f"To rent, at ECHO-2's prices: {needs.learner.ranks} × {chosen.name} and {workers * needs.worker.gpus} × {gpu.name}"


def _of_several(needs: Needs) -> str:
    return f" of {needs.worker.gpus} GPUs" if needs.worker.gpus > 1 else ""


def _step(step: SequentialStep) -> str:
    return f"{money(step.price)} a step of {whole_seconds(step.step_s)}"
