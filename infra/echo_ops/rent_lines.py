"""What to rent for a run, as lines of text: which GPUs, how many, at what price a step.

A run is one of three: learner and worker share one GPU, generation hides behind training (asynchronous), or a step is generation and then
training (sequential)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from echo_core.capacity.costs import price_of
from echo_core.capacity.overlap import needed_rate, wait_s
from echo_core.needs.renting import SequentialRun, SequentialStep
from echo_core.needs.speed import GPUS, Gpu
from echo_ops.estimate import Needs

_CENT = 0.1
"""Smaller amounts are printed with two digits that count, not with cents."""


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
        lines = [f"T_bcast is {needs.broadcast_s:,.1f} s and has to be below kappa · T_train, kappa = {kappa}:"]
    else:
        lines = [f"T_bcast is {needs.broadcast_s:,.1f} s; a sequential step takes it, T_train, and T_gen, the generation of its samples:"]
    for gpu in fitting:
        verdict = "" if not budget else "  fits" if needs.broadcast_s < kappa * needs.train_s(gpu) else "  does not fit"
        lines.append(f"  learner on {ranks} × {gpu.name:<14}  T_train {needs.train_s(gpu):>8,.1f} s{verdict}")
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
        lines.append(f"  {gpu.name:<14}  T_train {train_s:,.1f} s, T_gen {generation_s:,.1f} s: a step of {step_s:,.1f} s")
    step_s = needs.train_s(chosen) + needs.generation_s(chosen, 1) + waits_s
    if chosen.price_per_hour:
        per_hour, price = chosen.price_per_hour, _money(price_of(chosen.price_per_hour, step_s))
        lines.append(
            f"To rent, at ECHO-2's prices: 1 × {chosen.name} for both: ${per_hour:,.2f} an hour, {price} a step of {step_s:,.1f} s."
        )
    return Rent(lines=tuple(lines), step_s=step_s)


def _overlapping(needs: Needs, chosen: Gpu) -> Rent:
    """As many workers of each kind as a learner on `chosen` needs in order not to wait, and the cheapest kind with a price."""
    kappa, budget, ranks = needs.settings.publication_period, needs.settings.budget, needs.learner.ranks
    demand = needs.demand(chosen)
    wanted = needed_rate(demand, kappa, budget)
    if math.isinf(wanted):
        no_pool = (
            f"Beside {ranks} × {chosen.name} no number of workers keeps the learner busy: raise [staleness] budget, or publish an adapter."
        )
        return Rent(lines=(no_pool,), step_s=demand.train_s)
    lines = [f"Workers beside {ranks} × {chosen.name}, which wants {wanted:.3g} rollouts/s:"]
    priced: list[tuple[float, int, Gpu]] = []
    for gpu in GPUS:
        rate = needs.rate(gpu)
        if not rate:
            lines.append(f"  {gpu.name:<14}  too small")
            continue
        count = math.ceil(wanted / rate)
        lines.append(f"  {gpu.name:<14}  {count:>4} × {rate:.3g} rollouts/s{_of_several(needs)}")
        if gpu.price_per_hour and chosen.price_per_hour:
            priced.append((ranks * chosen.price_per_hour + count * needs.worker.gpus * gpu.price_per_hour, count, gpu))
    if not priced:
        return Rent(lines=tuple(lines), step_s=demand.train_s)
    per_hour, count, gpu = min(priced, key=lambda option: option[0])
    step_s = demand.train_s + wait_s(demand, kappa, count * needs.rate(gpu)) / kappa
    price = _money(price_of(per_hour, step_s))
    lines.append(f"{_to_rent(needs, chosen, count, gpu)}: ${per_hour:,.2f} an hour, {price} a step of {step_s:,.0f} s.")
    return Rent(lines=tuple(lines), step_s=step_s)


def _sequential(needs: Needs, chosen: Gpu) -> Rent:
    """The number of workers at which a step costs the least (`SequentialRun.cheapest`), of the kind where it costs the least."""
    ranks, groups = needs.learner.ranks, needs.settings.learner.groups_per_step
    train_s = needs.train_s(chosen)
    lines = [
        f"Workers beside {ranks} × {chosen.name}; a step is T_gen + {train_s + needs.broadcast_s:,.1f} s, and its price says how many:"
    ]
    priced: list[tuple[SequentialStep, SequentialStep, Gpu]] = []
    for gpu in GPUS:
        rate = needs.rate(gpu)
        if not rate:
            lines.append(f"  {gpu.name:<14}  too small")
            continue
        line = f"  {gpu.name:<14}  {rate:.3g} rollouts/s{_of_several(needs)}, T_gen of one {needs.generation_s(gpu, 1):,.0f} s"
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
        return Rent(lines=tuple(lines), step_s=train_s)
    best, twice, gpu = min(priced, key=lambda option: option[0].price)
    lines.append(
        f"{_to_rent(needs, chosen, best.workers, gpu)}: ${best.per_hour:,.2f} an hour, {_step(best)}. "
        f"With {twice.workers} workers instead of {best.workers}: {_step(twice)}."
    )
    return Rent(lines=tuple(lines), step_s=best.step_s)


def _to_rent(needs: Needs, chosen: Gpu, workers: int, gpu: Gpu) -> str:
    return f"To rent, at ECHO-2's prices: {needs.learner.ranks} × {chosen.name} and {workers * needs.worker.gpus} × {gpu.name}"


def _of_several(needs: Needs) -> str:
    return f" of {needs.worker.gpus} GPUs" if needs.worker.gpus > 1 else ""


def _step(step: SequentialStep) -> str:
    return f"{_money(step.price)} a step of {step.step_s:,.0f} s"


def _money(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= _CENT else f"${amount:.2g}"
