"""The results of the cells for people: tables as Markdown and the curves as a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_schemas.errors import UserError
from laboratory.results import Result
from laboratory.statements import LEVEL, Finding, Runs, findings, mean_and_error

_BEGIN, _END = "<!-- measured: begin -->", "<!-- measured: end -->"
_SMOOTHED = 10


def tables(tasks: Mapping[str, Runs]) -> str:
    """The conditions and claims of each task."""
    parts = []
    for task, runs in tasks.items():
        parts += [f"### {task}\n", _taken(runs), _conditions(runs)]
        if len(runs) > 1:
            parts.append(_claims(findings(runs)))
    return "\n".join(parts)


def figures(tasks: Mapping[str, Runs]) -> dict[str, Any]:
    """The same as numbers, for `--json`."""
    return {
        task: {
            "conditions": {name: _numbers(list(seeds.values())) for name, seeds in runs.items()},
            "claims": [
                {
                    "letter": each.letter,
                    "claim": each.claim,
                    "test": each.said,
                    "mean": each.tested.mean,
                    "stderr": each.tested.stderr,
                    "pairs": each.tested.num,
                    "p": each.tested.p,
                    "verdict": each.tested.verdict.value,
                }
                for each in findings(runs)
            ],
        }
        for task, runs in tasks.items()
    }


def check_page(page: Path) -> None:
    """Raise UserError if `put_into` would."""
    _around_tables(page)


def put_into(page: Path, text: str) -> None:
    """Replace the text between the two marks of `page`. Raises UserError without marks, or if it is no text file."""
    before, after = _around_tables(page)
    page.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{after}", encoding="utf-8")


def _around_tables(page: Path) -> tuple[str, str]:
    """What `page` has before the first mark and after the second one."""
    if not page.is_file():
        raise UserError(f"There is no page {page}.", hint=f"--page takes a file that exists, with {_BEGIN} and {_END} in it.")
    try:
        content = page.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise UserError(f"{page} is no text file.", hint="--page takes a Markdown file; --picture takes the picture's.") from exc
    before, begin, rest = content.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise UserError(f"{page} has no place for tables.", hint=f"Write {_BEGIN} and {_END} where they belong.")
    return before, after


def _taken(runs: Runs) -> str:
    """When and where the cells were taken."""
    results = [result for seeds in runs.values() for result in seeds.values()]
    days = sorted({day[:10] for result in results if (day := result.facts.get("ended"))})
    commits = sorted({commit for result in results if (commit := result.facts.get("commit"))})
    said = ["1 cell" if len(results) == 1 else f"{len(results)} cells"]
    if days:
        said.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    if commits:
        said.append(f"at {', '.join(commits)}")
    timed = sum(result.is_timed for result in results)
    return f"{', '.join(said)}; {timed} had the cores to themselves.\n"


def _numbers(results: Sequence[Result]) -> dict[str, Any]:
    accuracy, error = mean_and_error(result.final for result in results)
    timed = [result.train_s for result in results if result.is_timed]
    return {
        "seeds": len(results),
        "accuracy": accuracy,
        "accuracy_stderr": None if math.isnan(error) else error,
        "held_out": {str(version): statistics.fmean(means) for version, means in _by_version(results).items()},
        "reward_last": statistics.fmean(statistics.fmean(result.curve.reward[-_SMOOTHED:]) for result in results),
        "samples": statistics.fmean(result.curve.samples[-1] for result in results),
        "staleness": statistics.fmean(statistics.fmean(result.curve.staleness) for result in results),
        "max_staleness": max(result.facts["max_staleness"] for result in results),
        "dropped": sum(result.facts["dropped"] for result in results),
        "diverged": sum(result.outcome != "finished" for result in results),
        "train_s": statistics.fmean(timed) if timed else None,
        "timed_cells": len(timed),
    }


def _by_version(results: Sequence[Result]) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for each in (each for result in results for each in result.held_out()):
        found.setdefault(each.version, []).append(each.mean)
    return dict(sorted(found.items()))


def _conditions(runs: Runs) -> str:
    columns = ["condition", "seeds", "accuracy at the end", "held-out before, between, after", "batch, last ten steps"]
    columns += ["staleness mean, max", "dropped", "seconds (cells)"]
    rows = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, seeds in runs.items():
        found = _numbers(list(seeds.values()))
        error = found["accuracy_stderr"]
        ended = f", {found['diverged']} diverged" if found["diverged"] else ""
        rows.append(
            f"| {name} | {found['seeds']}{ended} | {found['accuracy']:.3f}{'' if error is None else f' ± {error:.3f}'} "
            f"| {', '.join(f'{value:.3f}' for value in found['held_out'].values())} | {found['reward_last']:.3f} "
            f"| {found['staleness']:.2f}, {found['max_staleness']} | {found['dropped']} | {_seconds(found)} |"
        )
    return "\n".join(rows) + "\n"


def _seconds(found: Mapping[str, Any]) -> str:
    return "not measured" if found["train_s"] is None else f"{found['train_s']:.0f} ({found['timed_cells']})"


def _claims(found: Sequence[Finding]) -> str:
    if not found:
        return "No claim has two seeds of both its conditions yet.\n"
    rows = [f"| | claim | test | mean ± standard error (pairs) | p | at {LEVEL:g} | seeds needed |", "|---|---|---|---|---|---|---|"]
    rows += [
        f"| {each.letter} | {each.claim} | {each.said} | {each.tested.mean:+.3f} ± {each.tested.stderr:.3f} ({each.tested.num}) "
        f"| {each.tested.p:.2g} | {each.tested.verdict} | {each.needed or ''} |"
        for each in found
    ]
    return "\n".join(rows) + "\n"


_TIMED = "seconds"
_STYLES = ("-", "--", ":", "-.")
_AXES: Sequence[tuple[str, Callable[[Result, int], float]]] = (
    ("step", lambda result, index: float(result.curve.version[index])),
    (_TIMED, lambda result, index: result.curve.seconds[index]),
    ("samples", lambda result, index: float(result.curve.samples[index])),
)


def rows_of(tasks: Mapping[str, Runs], sets: Mapping[str, Sequence[str]]) -> dict[str, Runs]:
    """What is drawn together: of each task the conditions of one set of the matrix, without sets that another one contains. A task with one
    condition is drawn only if there is no other."""
    rows: dict[str, Runs] = {}
    for task, runs in tasks.items():
        if len(runs) == 1:
            continue
        known = {name: frozenset(each for each in conditions if each in runs) for name, conditions in sets.items()}
        # Of equal ones the first; one that another contains is drawn with that.
        first = {conditions: name for name, conditions in reversed(known.items())}
        shown = {name: conditions for name, conditions in known.items() if first[conditions] == name}
        shown = {name: conditions for name, conditions in shown.items() if not any(conditions < others for others in shown.values())}
        for name, conditions in shown.items():
            label = task if len(shown) == 1 else f"{task}, {name}"
            rows[label] = {each: seeds for each, seeds in runs.items() if each in conditions}
    return rows or dict(tasks)


def draw(tasks: Mapping[str, Runs], sets: Mapping[str, Sequence[str]], picture: Path) -> None:
    """For each set of a task the batch's reward (mean over ten steps) and the held-out accuracy, by step, by wall time and by samples.

    A line is the mean over seeds at the same step, its shade one standard error; dots are evaluations. By wall time only timed cells.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows_of(tasks, sets)
    page, axes = plt.subplots(len(rows), len(_AXES), figsize=(15, 4.6 * len(rows)), squeeze=False, sharey="row", layout="constrained")
    for row, (label_of_row, runs) in zip(axes, rows.items(), strict=True):
        for axis, (label, x_of) in zip(row, _AXES, strict=True):
            for number, (name, seeds) in enumerate(runs.items()):
                results = [result for result in seeds.values() if label != _TIMED or result.is_timed]
                if results:
                    _draw_condition(axis, results, x_of, name, number)
            if not axis.lines:
                axis.text(0.5, 0.5, "no cell had the cores to itself", ha="center", va="center", transform=axis.transAxes)
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
        row[0].set_ylabel(f"{label_of_row}: reward (line), held-out (dots)")
        row[-1].legend(*row[0].get_legend_handles_labels(), fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    picture.parent.mkdir(parents=True, exist_ok=True)
    page.savefig(picture, dpi=80)
    plt.close(page)


def _draw_condition(axis: Any, results: Sequence[Result], x_of: Callable[[Result, int], float], name: str, number: int) -> None:
    # There are ten colours.
    colour, style = f"C{number % 10}", _STYLES[number // 10 % len(_STYLES)]
    length = min(len(result.curve.version) for result in results)
    steps = range(length)
    xs = [statistics.fmean(x_of(result, index) for result in results) for index in steps]
    found = [mean_and_error(_smoothed(result, index) for result in results) for index in steps]
    means = [mean for mean, _ in found]
    axis.plot(xs, means, color=colour, linestyle=style, label=f"{name} ({len(results)})", linewidth=1.2)
    if len(results) > 1:
        lows, highs = [mean - error for mean, error in found], [mean + error for mean, error in found]
        axis.fill_between(xs, lows, highs, color=colour, alpha=0.15, linewidth=0)
    versions = _by_version(results)
    dots = [version for version in versions if 0 < version <= length]
    axis.plot(
        [xs[version - 1] for version in dots], [statistics.fmean(versions[version]) for version in dots], "o", color=colour, markersize=5
    )


def _smoothed(result: Result, index: int) -> float:
    return statistics.fmean(result.curve.reward[max(0, index + 1 - _SMOOTHED) : index + 1])
