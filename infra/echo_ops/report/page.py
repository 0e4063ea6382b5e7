"""The HTML report: one self-contained file without scripts, for light, dark and paper. Pure: a `RunView` in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from echo_ops.report import charts
from echo_ops.report.evaluations import numbers, over_versions, pass_curves, shown_reward
from echo_ops.report.run_view import RunView
from echo_ops.report.spans import GenerationSpan
from echo_schemas.records import Eval

_AGES = ("--green", "--blue", "--violet", "--amber", "--red")


def report_page(
    view: RunView, summary: Mapping[str, Any], config: Mapping[str, Any], spans: Sequence[GenerationSpan], started_ms: int
) -> str:
    """The whole document. `config`: the run's settings without secrets; `spans`: groups of the close-up (none: left out)."""
    title = f"EchoSwarm run {view.run_id}"
    css = resources.files("echo_ops.report").joinpath("page.css").read_text(encoding="utf-8")
    body = [f"<h1>{escape(view.run_id)}</h1>", f'<p class="soft">{escape(_subtitle(summary, config))}</p>']
    body.append(f'<p class="answer">{escape(str(summary["bottleneck"]["sentence"]))}</p>')
    if summary["disbelief"]:
        body.append(f'<p class="answer alarm">{escape(str(summary["disbelief"]))}</p>')
    body.append(_numbers(summary, exact=view.is_exact))
    body.append('<div class="grid">' + "".join(_cards(view, summary, spans, started_ms) if view.steps else [_no_steps()]))
    body.append(_scorers(summary) + _workers(summary) + _tables(summary) + "</div>")
    body.append(_configuration(config))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{css}</style></head><body><main>{''.join(body)}</main></body></html>\n"
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


def _numbers(summary: Mapping[str, Any], *, exact: bool) -> str:
    shown = (
        (
            _form(summary["reward_last"], ".3f"),
            f"{'exact match' if exact else 'reward'}, last ten steps (first: {_form(summary['reward_first'], '.3f')})",
        ),
        (_form(summary["seconds_to_first_step"], ".1f", " s"), "until the first step"),
        (_form(summary["seconds_to_070"], ".0f", " s"), "until 0.70 (mean of ten steps)"),
        (_form(summary["s_per_step"], ".2f", " s"), f"a step; {summary['steps']} steps"),
        (_form(summary["bubble_ratio"], ".1%"), "of its time the learner had no batch"),
        (_form(summary["t_bcast_p50_s"], ".3f", " s"), "until new weights are installed (median)"),
        (_form(summary["max_staleness"], "d"), f"largest staleness trained (mean {_form(summary['staleness_mean'], '.2f')})"),
        (_form(summary["logprob_max_diff"], ".1e"), "largest log-probability difference, learner and worker"),
    )
    cells = (f'<div class="number"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in shown)
    return f'<div class="numbers">{"".join(cells)}</div>'


def _cards(view: RunView, summary: Mapping[str, Any], spans: Sequence[GenerationSpan], started_ms: int) -> list[str]:
    ages = [(f"{age}{' and more' if age == len(_AGES) - 1 else ''}", colour) for age, colour in enumerate(_AGES)][
        : len(summary["staleness"])
    ]
    reward = "Exact match" if view.is_exact else "Reward"
    cards = [
        _card(f"{reward} by version", "Dots: each step. Line: mean of ten.", charts.reward_by_step(view)),
        _card(f"{reward} by time", "The flat beginning is the start-up.", charts.reward_by_time(view)),
        _card(
            "Staleness of what was trained",
            "Versions between a sample's oldest token and the step that trained it.",
            charts.staleness(view),
            ages,
        ),
        _card("Throughput", "Samples trained per second, over ten steps.", charts.throughput(view)),
        _card(
            "Timeline",
            "Generation (darker: busier), training steps, and the way of each version from the learner to the last worker.",
            charts.timeline(view),
            [("generating", "--blue"), ("training", "--green"), ("weights on their way", "--violet")],
            css="card wide",
        ),
    ]
    if spans:
        text = "Each bar above is a group, coloured by its version; below, the learner waits (grey) and trains, and weights travel."
        cards.append(_card("Eight steps, close up", text, charts.close_up(view, spans, started_ms), css="card wide"))
    legend = [("busy", "--green"), ("nothing to do", "--grey"), ("nowhere to put it", "--red")]
    cards.append(_card("Where the time goes", "Each place of the pipeline, from the first step on.", charts.places(view), legend))
    cards += [_evaluation(view.evaluations.of(name)) for name in view.evaluations.names()]
    small = "".join(charts.small(view, metric, name) for metric, name in charts.SMALL)
    cards.append(f'<section class="card wide"><h2>Learning</h2><div class="small">{small}</div></section>' if small else "")
    return cards


def _evaluation(results: Sequence[Eval]) -> str:
    newest = results[-1]
    text = (
        f"{newest.num_prompts} held-out prompts of {newest.task}, {newest.num_samples} samples, temperature "
        f"{newest.sampling.temperature:g}. Line: mean of {shown_reward(newest).name}, with its standard error. "
        f"Version {newest.version}: {numbers(newest)}."
    )
    legend = [(f"pass@{k}", f"--{css}") for k, css in pass_curves(results)]
    return _card(f"Evaluation {newest.name}", text, over_versions(results), legend)


def _no_steps() -> str:
    return '<section class="card wide"><h2>No step was trained</h2><p>What the roles said is in the run folder, under logs.</p></section>'


def _card(title: str, text: str, svg: str, legend: Sequence[tuple[str, str]] = (), css: str = "card") -> str:
    keys = "".join(f'<span><i style="--c:var({colour})"></i>{escape(name)}</span>' for name, colour in legend)
    return (
        f'<section class="{css}"><h2>{escape(title)}</h2><p>{escape(text)}</p>'
        + (f'<div class="legend">{keys}</div>' if keys else "")
        + f"{svg}</section>"
    )


def _scorers(summary: Mapping[str, Any]) -> str:
    """A row for each reward, where another application than the run's own gave one."""
    heads = ("reward", "application", "weight", "state", "behind, s", "mean", "scored", "failed", "stale", "while it does not come")
    rows = [
        (
            *(line["name"], line["application"], f"{line['weight']:g}", line["state"], f"{line['behind']['seconds']:.1f}"),
            *(_form(line["mean"], ".3f"), f"{line['scored']:,}", f"{line['failed']:,}", f"{line['stale']:,}", line["policy"]),
        )
        for line in summary["scorers"]
    ]
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        '<section class="card wide"><h2>Rewards</h2><p>As the run ended. Weight 0: a shadow; nothing is trained on it. The counts are of '
        f'the newest records.</p><div class="scroll"><table class="wide"><tr>{head}</tr>{cells}</table></div></section>'
    )


def _workers(summary: Mapping[str, Any]) -> str:
    """A row a worker, from its first weights to its last word."""
    heads = (
        *("worker", "kind", "engine", "samples/s", "share", "delivered", "trained", "staleness, mean", "largest", "idle", "price per hour"),
        "cost per 1,000",
    )
    rows = [
        (
            line["worker_id"],
            line["kind"] or "–",
            line["engine"],
            _form(line["samples_per_s"], ",.1f"),
            _form(line["share"], ".1%"),
            f"{line['delivered']:,}",
            f"{line['trained']:,}",
            _form(line["staleness_mean"], ".2f"),
            _form(line["staleness_max"], "d"),
            _form(line["idle_share"], ".1%"),
            f"{line['price_per_hour']:g}",
            _form(line["cost_per_1000"], ".3g"),
        )
        for line in summary["workers"]
    ]
    if not rows:
        return ""
    text = "From first weights to last word. Delivered: trajectories acknowledged by the log; staleness: of those trained."
    if summary["cost_per_1000"] is not None:
        text += f" All workers together cost {summary['cost_per_1000']:.3g} per 1,000 trajectories."
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    cells = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<table class="workers"><tr>{head}</tr>{cells}</table>'
    return f'<section class="card wide"><h2>Workers</h2><p>{escape(text)}</p>{table}</section>'


def _tables(summary: Mapping[str, Any]) -> str:
    accounting = {
        "trajectories published": f"{summary['trajectories_published']:,}",
        "trajectories trained": f"{summary['trajectories_trained']:,}",
        **{f"dropped: {reason}": f"{count:,}" for reason, count in summary["dropped"].items()},
        **{name.replace("_", " "): f"{count:,}" for name, count in summary["asked"].items()},
        "samples compared by log-probability": f"{summary['logprob_samples']:,}",
        "learner outside forward, backward and optimizer": _form(summary["learner_outside_compute"], ".1%"),
    }
    startup = {name.replace("_", " "): f"{time_s:.1f} s" for name, time_s in sorted(summary["startup_s"].items(), key=lambda item: item[1])}
    return "".join(
        f'<section class="card"><h2>{escape(title)}</h2>{_table(rows)}</section>'
        for title, rows in (("Accounting", accounting), ("Start-up, seconds since the command", startup), ("Software", summary["software"]))
    )


def _configuration(config: Mapping[str, Any]) -> str:
    sections = "".join(
        f"<section><h3>{escape(title)}</h3>{_table({key: _plain(value) for key, value in values.items()})}</section>"
        for title, values in _sections(config)
    )
    return f'<section class="card" style="margin-top:16px"><h2>Configuration</h2><div class="columns">{sections}</div></section>'


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every section, those that stand there several times one by one."""
    for name, content in config.items():
        if isinstance(content, Mapping):
            yield f"[{name}]", content
        elif isinstance(content, list):
            yield from ((f"[[{name}]]", each) for each in content)


def _table(rows: Mapping[str, str]) -> str:
    cells = (f"<tr><td>{escape(str(key))}</td><td>{escape(str(value))}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {item}" for key, item in value.items()) or "–"
    return "–" if value in ("", None) or value == [] else str(value)


def _form(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"
