"""The report's charts, each from a `RunView` (seconds since the command) to one `<svg>`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappush, heapreplace

from echo_core.bottleneck import Place
from echo_ops.report.run_view import MEAN_OVER, Broadcast, RunView, Step
from echo_ops.report.spans import GenerationSpan
from echo_ops.report.summary import GOAL
from echo_ops.report.svg import Bar, Frame, Line, chart

_NUM_AGES = 5
_CLOSE_UP_STEPS = 8
# Workers with a row of their own in the timeline.
_MOST_ROWS = 48
SMALL = (
    ("entropy", "entropy, nats"),
    ("mismatch_kl", "mismatch KL, nats"),
    ("ess", "effective sample size"),
    ("grad_norm", "gradient norm"),
    ("cost", "cost of a step"),
)
"""Metrics with a small chart each, and their titles."""


def reward(view: RunView, *, by_time: bool) -> str:
    """Each step's reward and the mean over ten, over the seconds since the command or over the versions."""
    x_label = "seconds since the command" if by_time else "version"
    xs = [step.time_s if by_time else float(step.number) for step in view.steps]
    rewards, means = [step.reward for step in view.steps], view.mean_rewards()
    bounds = (min(0.0, *rewards), max(1.0, *rewards))
    frame = Frame(x=(0.0, max(xs)), y=bounds, x_label=x_label, y_label="exact match" if view.is_exact else "reward")
    lines = [
        Line(points=list(zip(xs, rewards, strict=True)), css="raw", dots=True),
        Line(points=list(zip(xs, means, strict=True)), css="mean"),
    ]
    return chart(frame, title=f"reward over {x_label}", lines=lines, marks=[GOAL] if view.is_exact else [])


def staleness(view: RunView) -> str:
    """Samples of each step by staleness, stacked."""
    bars = []
    for step in view.steps:
        base = 0.0
        for age, count in enumerate(step.staleness):
            tip = f"step {step.number}: {count} samples of staleness {age}"
            box = Bar(x0=step.number - 0.5, x1=step.number + 0.5, y0=base, y1=base + count, css=f"age{min(age, _NUM_AGES - 1)}", tip=tip)
            base += count
            if count:
                bars.append(box)
    top = max(step.samples for step in view.steps)
    return chart(Frame(x=(0.5, view.num_steps + 0.5), y=(0, top), x_label="version", y_label="samples"), title="staleness", bars=bars)


def throughput(view: RunView) -> str:
    """Samples trained per second, over ten steps."""
    points = []
    for index in range(1, len(view.steps)):
        chosen = view.steps[max(0, index - MEAN_OVER) : index + 1]
        seconds = chosen[-1].time_s - chosen[0].time_s
        if seconds > 0:
            points.append((chosen[-1].time_s, sum(step.samples for step in chosen[1:]) / seconds))
    top = max((y for _, y in points), default=1.0) * 1.1
    frame = Frame(x=(0.0, view.steps[-1].time_s), y=(0.0, top), x_label="seconds since the command", y_label="samples/s")
    return chart(frame, title="samples trained per second", lines=[Line(points=points, css="blue")])


def timeline(view: RunView) -> str:
    """The whole run: how busy each worker was, when the learner trained, when weights were on their way."""
    workers = view.busy_intervals()
    shown = sorted(workers)[:_MOST_ROWS]
    names = [*shown, "learner", "weights"]
    bars = []
    for row, worker in enumerate(shown):
        for start, end, share in workers[worker]:
            bars.append(_row(len(names), row, start, end, "generate", f"{worker} generated {share:.0%} of {end - start:.1f} s", share))
    bars += [_training(len(names), len(names) - 2, step) for step in view.steps]
    bars += _broadcast_rows(view.broadcasts(), len(names))
    frame = Frame(
        x=(0.0, view.steps[-1].time_s),
        y=(0, len(names)),
        x_label="seconds since the command",
        width=2 * 720,
        height=70 + 34 * len(names),
        y_names=names,
    )
    more = f", the first {len(shown)} of {len(workers)} workers" if len(shown) < len(workers) else ""
    return chart(frame, title=f"timeline of the run{more}", bars=bars)


def close_up_window(view: RunView) -> tuple[float, float]:
    """Seconds (from, to) of some steps in the middle of the run."""
    middle = len(view.steps) // 2
    chosen = view.steps[max(0, middle - _CLOSE_UP_STEPS // 2) : middle + _CLOSE_UP_STEPS // 2]
    return chosen[0].time_s - chosen[0].training_s - chosen[0].idle_s, chosen[-1].time_s


def close_up(view: RunView, spans: Sequence[GenerationSpan], started_ms: int) -> str:
    """Some steps in the middle: the generation of every group, each step's waiting and training, each version's way to the workers."""
    start, end = close_up_window(view)
    # (time when a lane is free again, its number); the lane that is free first is used next.
    lanes: list[tuple[float, int]] = []
    placed: list[tuple[int, float, float, GenerationSpan]] = []
    for span in spans:
        begins, ends = (span.started_ms - started_ms) / 1000, (span.finished_ms - started_ms) / 1000
        lane = lanes[0][1] if lanes and lanes[0][0] <= begins else len(lanes)
        (heapreplace if lane < len(lanes) else heappush)(lanes, (ends, lane))
        placed.append((lane, max(start, begins), min(end, ends), span))
    # All lanes of generation share one tall row; the two other rows have one unit each.
    tall = 5
    rows = tall + 2
    bars = []
    for lane, begins, ends, span in placed:
        height = tall / len(lanes)
        top = rows - lane * height
        tip = f"group {span.seq} on {span.worker_id}, version {span.version}, {ends - begins:.2f} s"
        bars.append(Bar(x0=begins, x1=ends, y0=top - 0.85 * height, y1=top, css=f"age{span.version % _NUM_AGES}", tip=tip))
    steps = [step for step in view.steps if start <= step.time_s <= end + 1e-6]
    for step in steps:
        began = step.time_s - step.training_s
        bars.append(_row(rows, tall, max(start, began - step.idle_s), began, "idle", f"step {step.number}: waited {step.idle_s:.2f} s"))
        bars.append(_training(rows, tall, step))
    inside = [cast for cast in view.broadcasts() if start <= cast.created_s <= end]
    bars += _broadcast_rows(inside, rows)
    names = ["", "", "groups", "", "", "learner", "weights"]
    frame = Frame(x=(start, end), y=(0, rows), x_label="seconds since the command", width=2 * 720, height=340, y_names=names)
    return chart(frame, title="some steps in the middle", bars=bars)


def places(view: RunView) -> str:
    """Busy, empty and blocked share of each place."""
    uses = {place: use for place, use in view.place_use().items() if use.observed_s > 0}
    shown = [place for place in Place if place in uses]
    bars = []
    for row, place in enumerate(shown):
        use, left = uses[place], 0.0
        for css, seconds in (("busy", use.busy_s), ("empty", use.empty_s), ("blocked", use.blocked_s)):
            share = seconds / use.observed_s
            if share:
                bars.append(_row(len(shown), row, left, left + share, css, f"{place.value}: {css} {share:.0%} ({seconds:.1f} s)"))
            left += share
    names = [place.value.replace("publish_weights", "weights out") for place in shown]
    frame = Frame(x=(0.0, 1.0), y=(0, max(1, len(shown))), x_label="share of its time", height=60 + 24 * max(1, len(shown)), y_names=names)
    return chart(frame, title="where the time goes", bars=bars)


def small(view: RunView, metric: str, name: str) -> str:
    """One metric over the steps; empty if no step has it."""
    points = [(float(step.number), step.metrics[metric]) for step in view.steps if metric in step.metrics]
    if not points:
        return ""
    top = max(y for _, y in points)
    frame = Frame(x=(0.0, view.num_steps), y=(0.0, top * 1.1 or 1.0), x_label=name, width=340, height=150)
    return chart(frame, title=name, lines=[Line(points=points, css="violet")])


def _row(rows: int, row: int, start: float, end: float, css: str, tip: str, opacity: float = 1.0) -> Bar:
    top = rows - row
    return Bar(x0=start, x1=end, y0=top - 0.85, y1=top - 0.15, css=css, tip=tip, opacity=opacity)


def _training(rows: int, row: int, step: Step) -> Bar:
    tip = f"step {step.number}: trained {step.training_s:.2f} s"
    # A small gap, so that steps can be told apart.
    return _row(rows, row, step.time_s - 0.97 * step.training_s, step.time_s, "train", tip)


def _broadcast_rows(broadcasts: Sequence[Broadcast], rows: int) -> list[Bar]:
    bars = []
    for cast in broadcasts:
        if cast.installed_s:
            last = max(cast.installed_s.values())
            tip = f"version {cast.version}, {cast.num_bytes:,} bytes: installed everywhere after {last - cast.created_s:.3f} s"
            bars.append(_row(rows, rows - 1, cast.created_s, max(last, cast.created_s), "cast", tip))
    return bars
