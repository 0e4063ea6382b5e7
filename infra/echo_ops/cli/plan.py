"""`echoswarm plan`: how many workers a run needs, which ones, and what a step then costs. Starts nothing."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from echo_core.capacity.activation import Candidate, total_rate
from echo_core.capacity.overlap import Demand
from echo_core.capacity.provisioning import Limits, Provision, advice, provision
from echo_ops.cli.options import Page
from echo_ops.cli.output import ExitCode, aligned, out
from echo_ops.measured_run import AccuracyCurve, MeasuredRun, read_measured_run
from echo_ops.plan_page import MOST_LEVELS, accuracy_rows, accuracy_words, plan_page
from echo_ops.simulation.figures import finite, number
from echo_schemas.errors import UserError

_AUTO = "auto"
_KIND = "NAME:rate=R,price=P,count=N"
# A larger number is a typing error, and would take long to plan.
_MOST_WORKERS = 10_000


def plan(
    from_run: Annotated[
        Path | None, typer.Option("--from-run", metavar="FOLDER", help="Take the numbers that a run has measured from its summary.json.")
    ] = None,
    train_s: Annotated[float | None, typer.Option("--train-s", help="Seconds of a training step, without waiting.")] = None,
    broadcast_s: Annotated[
        float | None, typer.Option("--broadcast-s", help="Seconds from a published snapshot until workers generate with it.")
    ] = None,
    rollouts: Annotated[int | None, typer.Option(help="Rollouts of a step: groups per step times group size.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar=_KIND,
            help="Workers of one kind: rollouts per second and price per hour of each, and their number. Repeatable.",
        ),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="S,S,…", help="Staleness budgets to plan for.")] = "3",
    kappa: Annotated[
        str, typer.Option(metavar="N|auto", help="Steps between publications; auto: the number with the cheapest pool.")
    ] = _AUTO,
    gamma: Annotated[float, typer.Option(help="Safety factor on the rate that is needed.")] = 1.1,
    learner_price: Annotated[
        float | None, typer.Option("--learner-price", help="Of the learner's machines together, per hour; as in the run of --from-run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    page: Page = None,
) -> None:
    """Print a plan for each budget, and write it to `page`; exits 1 if none works."""
    measured = None if from_run is None else read_measured_run(from_run)
    demand = Demand(
        train_s=_known("--train-s", train_s, None if measured is None else measured.train_s, measured),
        broadcast_s=_known("--broadcast-s", broadcast_s, None if measured is None else measured.broadcast_s, measured),
        rollouts=int(_known("--rollouts", rollouts, None if measured is None else measured.rollouts, measured)),
    )
    candidates = _candidates(kind or (), measured)
    period = _period(kappa)
    if learner_price is None:
        learner_price = 0.0 if measured is None else measured.learner_price_per_hour
    plans = [
        provision(demand, candidates, Limits(budget=each, publication_period=period, gamma=gamma, learner_price_per_hour=learner_price))
        for each in _budgets(budget)
    ]
    if page is not None:
        page.write_text(plan_page(demand, plans, measured, columns=_HEADS, rows=[_row(each) for each in plans]), encoding="utf-8")
    if as_json:
        sys.stdout.write(json.dumps(as_plain(demand, candidates, plans, measured), indent=1, ensure_ascii=False) + "\n")
    else:
        for line in _lines(demand, candidates, plans, measured):
            out.print(line, markup=False)
    if not any(each.is_feasible for each in plans):
        sys.exit(ExitCode.FAILED)


# The options


def _known(option: str, given: float | None, found: float | None, measured: MeasuredRun | None) -> float:
    if given is not None:
        return given
    if found is not None:
        return found
    if measured is not None:
        raise UserError(f"The run {measured.run!r} has not measured what {option} says.", hint=f"Give {option} beside --from-run.")
    raise UserError(f"{option} is missing.", hint=f"Give {option}, or --from-run with the folder of a run that measured it.")


def _candidates(kinds: Sequence[str], measured: MeasuredRun | None) -> list[Candidate]:
    found = [] if measured is None else list(measured.workers)
    for text in kinds:
        found += parse_kind(text)
    if not found:
        raise UserError("No workers were named.", hint=f"Give --kind {_KIND}, or --from-run with the folder of a run that had some.")
    if len(found) > _MOST_WORKERS:
        raise UserError(f"{len(found)} workers are too many to plan for.", hint=f"Give at most {_MOST_WORKERS}.")
    return found


def parse_kind(text: str) -> list[Candidate]:
    """`h100:rate=0.5,price=2.5,count=8` as eight workers. Without a price they cost nothing, without a count there is one."""
    name, colon, rest = text.partition(":")
    parts = [part.partition("=") for part in rest.split(",")] if colon else []
    numbers: dict[str, float] = {}
    for key, equals, value in parts:
        if key.strip() not in ("rate", "price", "count") or not equals or key.strip() in numbers:
            raise UserError(f"--kind {text}: {key.strip()!r} is not one rate, price or count.", hint=f"Write {_KIND}.")
        try:
            numbers[key.strip()] = float(value)
        except ValueError as exc:
            raise UserError(f"--kind {text}: {value!r} is not a number.", hint=f"Write {_KIND}.") from exc
    if not name.strip() or "rate" not in numbers:
        raise UserError(f"--kind {text} lacks a {'rate' if name.strip() else 'name'}.", hint=f"Write {_KIND}.")
    count = numbers.get("count", 1.0)
    if not (count.is_integer() and 1 <= count <= _MOST_WORKERS):
        raise UserError(f"--kind {text}: there cannot be {count:g} workers.", hint=f"Give a whole number from 1 to {_MOST_WORKERS}.")
    return [
        Candidate(worker_id=f"{name.strip()}-{number}", kind=name.strip(), rate=numbers["rate"], price_per_hour=numbers.get("price", 0.0))
        for number in range(int(count))
    ]


def _budgets(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as exc:
        raise UserError(
            f"--budget {text} is not a list of whole numbers.", hint="Write one budget or several, such as 3 or 3,4,6."
        ) from exc


def _period(text: str) -> int | None:
    if text == _AUTO:
        return None
    try:
        return int(text)
    except ValueError as exc:
        raise UserError(f"--kappa {text} is neither a whole number nor {_AUTO}.", hint="Write --kappa 2, or leave it out.") from exc


# The output


def as_plain(
    demand: Demand, candidates: Sequence[Candidate], plans: Sequence[Provision], measured: MeasuredRun | None = None
) -> dict[str, Any]:
    """Everything as plain data for JSON; an infinite number is None."""
    return {
        "train_s": demand.train_s,
        "broadcast_s": demand.broadcast_s,
        "rollouts_per_step": demand.rollouts,
        "available_rate": total_rate(candidates),
        "measured_cost_per_step": None if measured is None else measured.cost_per_step,
        "unpriced": _unpriced(candidates),
        "plans": [
            {
                "budget": each.limits.budget,
                "publication_period": each.publication_period,
                "gamma": each.limits.gamma,
                "is_feasible": each.is_feasible,
                "needed_rate": finite(each.target),
                "workers": dict(_counts(each)),
                "worker_ids": [worker.worker_id for worker in each.workers],
                "rate": each.rate,
                "wait_s": finite(each.wait_s),
                "bubble_ratio": each.bubble_share,
                "staleness_bound": finite(each.staleness_bound),
                "price_per_hour": each.price_per_hour,
                "cost_per_step": finite(each.cost_per_step),
                "optimum_price_per_hour": each.optimum_price_per_hour,
                "advice": advice(each, demand),
            }
            for each in plans
        ],
        "accuracy": None if measured is None or measured.accuracy is None else _accuracy(plans, measured, measured.accuracy),
    }


def _accuracy(plans: Sequence[Provision], measured: MeasuredRun, curve: AccuracyCurve) -> dict[str, Any]:
    """The cost of each accuracy of the run's evaluation: steps of the run times the cost of a step."""
    return {
        "evaluation": curve.evaluation,
        "reward": curve.reward,
        "reached": [
            {
                "steps": point.version,
                "mean": point.mean,
                "stderr": point.stderr,
                "cost_in_run": None if measured.cost_per_step is None else measured.cost_per_step * point.version,
                "cost": {str(each.limits.budget): finite(each.cost_per_step * point.version) for each in plans},
            }
            for point in curve.best(MOST_LEVELS)
        ],
    }


def _counts(each: Provision) -> Counter[str]:
    return Counter(worker.kind for worker in each.workers)


_HEADS = ("S", "kappa", "workers", "needed/s", "made/s", "bubble", "staleness", "price/h", "cheapest/h", "per step")


def _lines(demand: Demand, candidates: Sequence[Candidate], plans: Sequence[Provision], measured: MeasuredRun | None) -> list[str]:
    source = "" if measured is None else f"As the run {measured.run!r} measured: "
    head = (
        f"{source}T_train {demand.train_s:.4g} s, T_bcast {demand.broadcast_s:.4g} s, {demand.rollouts} rollouts a step; "
        f"{len(candidates)} {'workers make' if len(candidates) > 1 else 'worker makes'} up to {total_rate(candidates):.4g} rollouts/s."
    )
    table = aligned([_HEADS, *(_row(each) for each in plans)])
    table += _accuracy_lines(plans, measured)
    words = [f"S = {each.limits.budget}: {advice(each, demand)}" for each in plans if not each.is_feasible]
    if measured is not None and measured.cost_per_step is not None:
        words.append(f"In the run a step cost {measured.cost_per_step:.4g}, workers on standby included.")
    if unpriced := _unpriced(candidates):
        words.append(f"Without a price {', '.join(unpriced)} count as free: give it in [rollout], [[rollout.pool]] or --kind.")
    return [head, "", *table, *(["", *words] if words else [])]


def _accuracy_lines(plans: Sequence[Provision], measured: MeasuredRun | None) -> list[str]:
    """The cost of each accuracy of the run's curve under each plan; a sentence where the run has no curve."""
    if measured is None:
        return []
    if measured.accuracy is None:
        return ["", "The run has no evaluations, so there is no cost per accuracy: give it [evaluation]."]
    head, rows = accuracy_rows(plans, measured, measured.accuracy)
    return ["", accuracy_words(measured.accuracy), "", *aligned([head, *rows])]


def _unpriced(candidates: Sequence[Candidate]) -> list[str]:
    """The kinds that have a worker without a price."""
    return sorted({each.kind for each in candidates if not each.price_per_hour})


def _row(each: Provision) -> tuple[str, ...]:
    chosen = ", ".join(f"{count} {kind}" for kind, count in sorted(_counts(each).items()))
    optimum = each.optimum_price_per_hour
    return (
        str(each.limits.budget),
        str(each.publication_period),
        chosen if each.is_feasible else f"{chosen or 'none'}: too few",
        number(each.target),
        number(each.rate),
        f"{each.bubble_share:.1%}",
        f"≤ {each.staleness_bound:g}" if math.isfinite(each.staleness_bound) else "–",
        f"{each.price_per_hour:.2f}",
        "–" if optimum is None else f"{optimum:.2f}",
        number(each.cost_per_step),
    )
