"""Evaluations for the screen (the newest) and the report (over the versions). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_ops.report.svg import Bar, Frame, Line, chart
from echo_schemas.records import Eval, RewardStats

# Further pass@k are nearly 1 and would give lines that cannot be told apart.
PASS_LINES = ("blue", "violet", "amber")
"""CSS classes of the pass@k curves, in order of k."""
_BAND_SHARE = 0.006


class EvaluationView:
    """Results by the evaluation's name; the first of a version counts."""

    def __init__(self) -> None:
        self._results: dict[str, dict[int, Eval]] = {}
        self.all: list[Eval] = []
        """In the order of their arrival."""

    def add(self, result: Eval) -> None:
        if self._results.setdefault(result.name, {}).setdefault(result.version, result) is result:
            self.all.append(result)

    def names(self) -> list[str]:
        """The evaluations' names, in the order of their first result."""
        return list(self._results)

    def of(self, name: str) -> list[Eval]:
        """The results of one evaluation, by version."""
        return [result for _, result in sorted(self._results[name].items())]

    def newest(self) -> list[Eval]:
        return [self.of(name)[-1] for name in self._results]


def shown_reward(result: Eval) -> RewardStats:
    """The reward that represents an evaluation: its pass reward, else the first."""
    return next((stats for stats in result.rewards if stats.name == result.pass_reward), result.rewards[0])


def numbers(result: Eval) -> str:
    """`exact 0.420 ± 0.030, pass@4 0.710`; pass@1 is left out if it equals the mean."""
    said = [f"{stats.name} {stats.mean:.3f} ± {stats.stderr:.3f}" for stats in result.rewards]
    return ", ".join([*said, *(f"pass@{each.k} {each.value:.3f}" for each in _telling(result))])


def evaluation_line(result: Eval) -> str:
    """`evaluation held-out  v20  exact 0.420 ± 0.030, pass@4 0.710  (64 prompts, 2.5 s)`."""
    missing = f", {result.num_missing} missing" if result.num_missing else ""
    return (
        f"evaluation {result.name}  v{result.version}  {numbers(result)}  ({result.num_prompts} prompts{missing}, {result.seconds:.1f} s)"
    )


def summary_of(result: Eval) -> dict[str, Any]:
    """An evaluation's entry in the run's summary."""
    return {
        "name": result.name,
        "version": result.version,
        "prompts": result.num_prompts,
        "missing": result.num_missing,
        "samples": result.num_samples,
        "shown": shown_reward(result).name,
        "rewards": {stats.name: {"mean": stats.mean, "stderr": stats.stderr} for stats in result.rewards},
        "pass_at": {str(each.k): each.value for each in result.pass_at},
        "seconds": result.seconds,
    }


def over_versions(results: Sequence[Eval]) -> str:
    """A chart of one evaluation over the versions: its reward ± one standard error, and pass@k."""
    stats = [shown_reward(result) for result in results]
    highest = max([1.0, *(each.mean + each.stderr for each in stats)])
    frame = Frame(
        x=(0.0, float(max(1, results[-1].version))),
        y=(min([0.0, *(each.mean - each.stderr for each in stats)]), highest),
        x_label="version",
        y_label=stats[-1].name,
    )
    half = _BAND_SHARE * frame.x[1]
    bars = [
        Bar(
            x0=result.version - half,
            x1=result.version + half,
            y0=each.mean - each.stderr,
            y1=each.mean + each.stderr,
            css="age0",
            tip=evaluation_line(result),
            opacity=0.35,
        )
        for result, each in zip(results, stats, strict=True)
    ]
    points = [(float(result.version), each.mean) for result, each in zip(results, stats, strict=True)]
    lines = [Line(points=points, css="mean"), Line(points=points, css="raw", dots=True)]
    for k, css in pass_curves(results):
        curve = [(float(result.version), each.value) for result in results for each in result.pass_at if each.k == k]
        lines.append(Line(points=curve, css=css))
    return chart(frame, title=f"evaluation {results[-1].name} over versions", lines=lines, bars=bars)


def pass_curves(results: Sequence[Eval]) -> list[tuple[int, str]]:
    """Every k that gets a curve, and its CSS class."""
    ks = sorted({each.k for result in results for each in _telling(result)})
    return list(zip(ks, PASS_LINES, strict=False))


def _telling(result: Eval) -> list[Any]:
    """pass@k, without a pass@1 that equals the mean."""
    mean = shown_reward(result).mean
    return [each for each in result.pass_at if each.k > 1 or abs(each.value - mean) > 1e-9]
