"""The HTML report: one self-contained file without scripts, for light, dark and paper. Pure: a `RunView` in, text out.

This module makes the content; `page.html.j2` has the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echo_ops.report import charts
from echo_ops.report.cards import COLOURS, Card, fill_page
from echo_ops.report.evaluations import numbers, over_versions, pass_curves, shown_reward
from echo_ops.report.run_view import RunView
from echo_ops.report.spans import GenerationSpan
from echo_ops.report.summary import or_dash
from echo_schemas.records import Eval

_WORKER_COLUMNS = (
    *("worker", "kind", "engine", "samples/s", "share", "delivered", "trained", "staleness, mean", "largest", "idle", "price per hour"),
    "cost per 1,000",
)
_COST_COLUMNS = ("", "busy", "idle", "standby", "all")
_DECISION_COLUMNS = ("after, s", "epoch", "decision", "figures")
_SCORER_COLUMNS = ("reward", "application", "weight", "state", "behind, s", "mean", "scored", "failed", "stale", "while it does not come")


def report_page(
    view: RunView, summary: Mapping[str, Any], config: Mapping[str, Any], spans: Sequence[GenerationSpan], started_ms: int
) -> str:
    """The whole document. `config`: the run's settings without secrets; `spans`: groups of the close-up (none: left out)."""
    return fill_page(
        "echo_ops.report",
        run_id=view.run_id,
        subtitle=_subtitle(summary, config),
        answers=[(summary["bottleneck"]["sentence"], ""), *([(summary["disbelief"], "alarm")] if summary["disbelief"] else [])],
        numbers=_numbers(summary, exact=view.is_exact),
        cards=_cards(view, summary, spans, started_ms) if view.steps else [],
        small="".join(charts.small(view, metric, name) for metric, name in charts.SMALL),
        scorers=_scorers(summary),
        costs=_costs(summary["cost"]),
        decisions=_decisions(summary),
        workers=_workers(summary),
        tables=_tables(summary),
        sections=[(title, {key: _plain(value) for key, value in values.items()}) for title, values in _sections(config)],
    )


def _subtitle(summary: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    policy, rollout, staleness = config["policy"], config["rollout"], config["staleness"]
    kind = f"LoRA r = {policy['lora']['r']}" if policy["update"] == "lora" else "all weights"
    pool = [f"{each['workers']} {each['name']} on {each['engine'] or rollout['engine']}" for each in rollout["pool"]]
    workers = ", ".join(pool) or f"{rollout['workers']} worker(s) on {rollout['engine']}"
    return (
        f"{config['task']['name']} · {policy['base']} · {kind} · {workers} · "
        f"staleness budget {staleness['budget']} · {summary['outcome']} after {summary['wall_seconds']:.0f} s"
    )


def _numbers(summary: Mapping[str, Any], *, exact: bool) -> Sequence[tuple[str, str]]:
    return (
        (
            or_dash(summary["reward_last"], ".3f"),
            f"{'exact match' if exact else 'reward'}, last ten steps (first: {or_dash(summary['reward_first'], '.3f')})",
        ),
        (or_dash(summary["seconds_to_first_step"], ".1f", " s"), "until the first step"),
        (or_dash(summary["seconds_to_070"], ".0f", " s"), "until 0.70 (mean of ten steps)"),
        (or_dash(summary["s_per_step"], ".2f", " s"), f"a step; {summary['steps']} steps"),
        (or_dash(summary["bubble_ratio"], ".1%"), "of its time the learner had no batch"),
        (or_dash(summary["t_bcast_p50_s"], ".3f", " s"), "until new weights are installed (median)"),
        (or_dash(summary["max_staleness"], "d"), f"largest staleness trained (mean {or_dash(summary['staleness_mean'], '.2f')})"),
        (or_dash(summary["logprob_max_diff"], ".1e"), "largest log-probability difference, learner and worker"),
    )


def _cards(view: RunView, summary: Mapping[str, Any], spans: Sequence[GenerationSpan], started_ms: int) -> list[Card]:
    ages = [(f"{age}{' and more' if age == len(COLOURS) - 1 else ''}", colour) for age, colour in enumerate(COLOURS)]
    reward = "Exact match" if view.is_exact else "Reward"
    cards = [
        Card(f"{reward} by version", "Dots: each step. Line: mean of ten.", charts.reward(view, by_time=False)),
        Card(f"{reward} by time", "The flat beginning is the start-up.", charts.reward(view, by_time=True)),
        Card(
            "Staleness of trained samples",
            "Versions between a sample's oldest token and the step that trained it.",
            charts.staleness(view),
            ages[: len(summary["staleness"])],
        ),
        Card("Throughput", "Samples trained per second, over ten steps.", charts.throughput(view)),
        Card(
            "Timeline",
            "Generation (darker: busier), training steps, and the way of each version from the learner to the last worker.",
            charts.timeline(view),
            [("generating", "blue"), ("training", "green"), ("weights on their way", "violet")],
            is_wide=True,
        ),
    ]
    if spans:
        text = "Each bar above is a group, coloured by its version; below, the learner waits (grey) and trains, and weights travel."
        cards.append(Card("Eight steps, close up", text, charts.close_up(view, spans, started_ms), is_wide=True))
    legend = [("busy", "green"), ("no input", "grey"), ("output full", "red")]
    cards.append(Card("Where the time goes", "Each place of the pipeline, from the first step on.", charts.places(view), legend))
    cards += [_evaluation(view.evaluations.of(name)) for name in view.evaluations.names()]
    return cards


def _evaluation(results: Sequence[Eval]) -> Card:
    newest = results[-1]
    text = (
        f"{newest.num_prompts} held-out prompts of {newest.task}, {newest.num_samples} samples, temperature "
        f"{newest.sampling.temperature:g}. Line: mean of {shown_reward(newest).name}, with its standard error. "
        f"Version {newest.version}: {numbers(newest)}."
    )
    legend = [(f"pass@{k}", css) for k, css in pass_curves(results)]
    return Card(f"Evaluation {newest.name}", text, over_versions(results), legend)


def _scorers(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row for each reward, if an attached application gave one."""
    rows = [
        (
            *(line["name"], line["application"], f"{line['weight']:g}", line["state"], f"{line['behind']['seconds']:.1f}"),
            *(or_dash(line["mean"], ".3f"), f"{line['scored']:,}", f"{line['failed']:,}", f"{line['stale']:,}", line["policy"]),
        )
        for line in summary["scorers"]
    ]
    return {"columns": _SCORER_COLUMNS, "rows": rows}


def _workers(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row for each worker, from its first weights to its last heartbeat."""
    rows = [
        (
            line["worker_id"],
            line["kind"] or "–",
            line["engine"],
            or_dash(line["samples_per_s"], ",.1f"),
            or_dash(line["share"], ".1%"),
            f"{line['delivered']:,}",
            f"{line['trained']:,}",
            or_dash(line["staleness_mean"], ".2f"),
            or_dash(line["staleness_max"], "d"),
            or_dash(line["idle_share"], ".1%"),
            f"{line['price_per_hour']:g}",
            or_dash(line["cost_per_1000"], ".3g"),
        )
        for line in summary["workers"]
    ]
    text = "From the first weights to the last heartbeat. Delivered: trajectories acknowledged by the log; staleness: of those trained."
    if summary["cost_per_1000"] is not None:
        text += f" All workers together cost {summary['cost_per_1000']:.3g} per 1,000 trajectories."
    return {"text": text, "columns": _WORKER_COLUMNS, "rows": rows}


def _costs(cost: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """A row for each kind, for the learner, and for the sum; none if nothing has a price."""
    if cost is None:
        return {"rows": []}
    kinds = [(kind or "workers", each["busy"], each["idle"], each["standby"], each["total"]) for kind, each in cost["by_kind"].items()]
    rows = [(name, *(f"{money:.4g}" for money in parts)) for name, *parts in kinds]
    busy = cost["workers"] - cost["idle"] - cost["standby"]
    rows.append(("learner", "–", "–", "–", f"{cost['learner']:.4g}"))
    rows.append(("all", f"{busy:.4g}", f"{cost['idle']:.4g}", f"{cost['standby']:.4g}", f"{cost['total']:.4g}"))
    text = (
        f"A step, and so a version: {or_dash(cost['per_step'], '.4g')}; 1,000 trained samples: {or_dash(cost['per_1000_trained'], '.4g')}. "
        "From the step reports, so without the costs before the learner listened and after its last step."
    )
    return {"text": text, "columns": _COST_COLUMNS, "rows": rows}


def _decisions(summary: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row for each decision of the coordinator."""
    rows = [
        (
            f"{each['time_s']:.1f}",
            str(each["epoch"]),
            each["reason"],
            ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in each["figures"].items()),
        )
        for each in summary["decisions"]
    ]
    return {"columns": _DECISION_COLUMNS, "rows": rows}


def _tables(summary: Mapping[str, Any]) -> Sequence[tuple[str, Mapping[str, str]]]:
    accounting = {
        "trajectories published": f"{summary['trajectories_published']:,}",
        "trajectories trained": f"{summary['trajectories_trained']:,}",
        **{f"dropped: {reason}": f"{count:,}" for reason, count in summary["dropped"].items()},
        **{name.replace("_", " "): f"{count:,}" for name, count in summary["asked"].items()},
        "samples compared by log-probability": f"{summary['logprob_samples']:,}",
        "learner outside forward, backward and optimizer": or_dash(summary["learner_outside_compute"], ".1%"),
    }
    startup = {name.replace("_", " "): f"{time_s:.1f} s" for name, time_s in sorted(summary["startup_s"].items(), key=lambda item: item[1])}
    return ("Accounting", accounting), ("Start-up, seconds since the command", startup), ("Software", summary["software"])


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every section; repeated ones one by one."""
    for name, content in config.items():
        if isinstance(content, Mapping):
            yield f"[{name}]", content
        elif isinstance(content, list):
            yield from ((f"[[{name}]]", each) for each in content)


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "–"
    return "–" if value in ("", None) or value == [] else str(value)
