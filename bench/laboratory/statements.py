"""The claims about the conditions, each with its test. Seeds are paired: two conditions of one seed have the same first weights, prompts
and held-out prompts.

Equal within a margin   two one-sided t tests of the differences (Schuirmann 1987): p is the larger one, so p < 0.05 says that the mean
                        difference lies inside
Less                    a one-sided t test of the differences

`holds`: p < 0.05. `refuted`: the opposite is shown with p < 0.05. Else `open`: these seeds cannot tell.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from scipy.special import stdtr, stdtrit

from laboratory.results import Result

LEVEL = 0.05
CO_LOCATED, SEQUENTIAL = "co-located", "sequential"

Runs = Mapping[str, Mapping[int, Result]]
"""The results of one task by condition and seed."""


class Verdict(StrEnum):
    """The outcome of a test."""

    HOLDS = "holds"
    REFUTED = "refuted"
    OPEN = "open"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The mean over `num` pairs, its standard error, and its probability if the claim (`p`) or its opposite (`p_against`) is wrong."""

    mean: float
    stderr: float
    num: int
    p: float
    p_against: float

    @property
    def verdict(self) -> Verdict:
        """At `LEVEL`."""
        return Verdict.HOLDS if self.p < LEVEL else Verdict.REFUTED if self.p_against < LEVEL else Verdict.OPEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim and its test; `said`: the test in words; `needed`: the seeds that would show an equality."""

    letter: str
    claim: str
    said: str
    tested: Tested
    needed: int | None = None


def check_less(values: Sequence[float], bound: float) -> Tested:
    """Test that the mean is below `bound`. Raises ValueError for fewer than two values."""
    return _tested(values, p=_tail(values, bound, below=True), p_against=_tail(values, bound, below=False))


def check_within(values: Sequence[float], margin: float) -> Tested:
    """Test that the mean lies within ± `margin`. Raises ValueError for fewer than two values."""
    p = max(_tail(values, margin, below=True), _tail(values, -margin, below=False))
    # The opposite is two-sided.
    against = min(1.0, 2 * min(_tail(values, margin, below=False), _tail(values, -margin, below=True)))
    return _tested(values, p=p, p_against=against)


def seeds_needed(values: Sequence[float], margin: float) -> int | None:
    """The pairs with which a test that two equal conditions lie within ± `margin` succeeds nine times in ten, given the deviation of
    `values`; None above a thousand."""
    deviation = statistics.stdev(values)
    for num in range(2, 1001):
        # For a true difference of zero: the distance from 0 to the margin, in standard errors, minus the test's quantile.
        free = num - 1
        distance = margin / (deviation / math.sqrt(num)) if deviation else math.inf
        if 2 * stdtr(free, distance - stdtrit(free, 1 - LEVEL)) - 1 >= 0.9:
            return num
    return None


def _tested(values: Sequence[float], *, p: float, p_against: float) -> Tested:
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Tested(mean=statistics.fmean(values), stderr=error, num=len(values), p=p, p_against=p_against)


def _tail(values: Sequence[float], bound: float, *, below: bool) -> float:
    """The p of the t test that the mean is below `bound`, or above it."""
    if len(values) < 2:
        message = f"A test needs two pairs; there are {len(values)}."
        raise ValueError(message)
    deviation = statistics.stdev(values)
    distance = (bound - statistics.fmean(values)) * (1 if below else -1)
    if not deviation:
        return 0.0 if distance > 0 else 1.0
    return float(stdtr(len(values) - 1, -distance / (deviation / math.sqrt(len(values)))))


def findings(runs: Runs) -> list[Finding]:
    """The claims whose conditions have two seeds in common."""
    found: list[Finding] = []

    def equal(letter: str, claim: str, pair: tuple[str, str], margin: float) -> None:
        values = _paired(runs, pair, _accuracy)
        if len(values) >= 2:
            said = f"accuracy of {pair[0]} less that of {pair[1]}, within ± {margin:.3g}"
            tested, needed = check_within(values, margin), seeds_needed(values, margin)
            found.append(Finding(letter=letter, claim=claim, said=said, tested=tested, needed=needed))

    def less(letter: str, claim: str, said: str, pair: tuple[str, str], of: Measure, bound: float = 0.0) -> None:
        values = _paired(runs, pair, of)
        if len(values) >= 2:
            found.append(Finding(letter=letter, claim=claim, said=said, tested=check_less(values, bound)))

    def faster(letter: str, claim: str, pair: tuple[str, str], share: float) -> None:
        values = [math.log(one.train_s / other.train_s) for one, other in _pairs(runs, pair) if one.is_timed_like(other)]
        if len(values) >= 2:
            said = f"ln of the wall time of {pair[0]} over that of {pair[1]}, below ln {share:g}"
            found.append(Finding(letter=letter, claim=claim, said=said, tested=check_less(values, math.log(share))))

    equal("a", "sequential learns as co-located does", (SEQUENTIAL, CO_LOCATED), 0.03)
    for budget in (3, 6, 11):
        claim = f"S = {budget} through the pipeline learns as the same staleness does in one process"
        equal("a", claim, (f"s{budget}", f"{CO_LOCATED}-s{budget}"), 0.03)
    equal("b", "S = 3 reaches the accuracy of sequential", ("s3", SEQUENTIAL), 0.03)
    equal("b", "in one process and twice as many steps: the accuracy", (f"{CO_LOCATED}-s3-long", f"{CO_LOCATED}-long"), 0.03)
    equal("b", "in one process and with a falling rate: the accuracy", (f"{CO_LOCATED}-s3-falling", f"{CO_LOCATED}-falling"), 0.03)
    equal("b", "and with a falling rate: the accuracy", ("s3-falling", "sequential-falling"), 0.03)
    faster("b", "in 0.77 of its time", ("s3", SEQUENTIAL), 0.77)
    equal("b", "and with workers elsewhere: the accuracy", ("s3-elsewhere", "sequential-elsewhere"), 0.03)
    faster("b", "and with workers elsewhere: the time", ("s3-elsewhere", "sequential-elsewhere"), 0.77)
    if base := [result.final for result in runs.get(SEQUENTIAL, {}).values()]:
        equal("c", "S = 6 lies within 5 % of sequential", ("s6", SEQUENTIAL), 0.05 * statistics.fmean(base))
        equal("c", "and with a falling rate", ("s6-falling", "sequential-falling"), 0.05 * statistics.fmean(base))
        equal("d", "S = 11 with correction lies within 5 % of sequential", ("s11", SEQUENTIAL), 0.05 * statistics.fmean(base))
    worse, corrected = "S = 11 without correction is worse than with it", ("s11-uncorrected", "s11")
    less("d", worse, "accuracy of s11-uncorrected less that of s11, below 0", corrected, _accuracy)
    falls = "largest fall of the batch's reward, s11 less s11-uncorrected, below 0"
    less("d", "or less stable", falls, ("s11", "s11-uncorrected"), _largest_fall)
    equal("e", "LoRA ends where all weights do", ("s3", "s3-full"), 0.05)
    equal("e", "and in one process, at staleness 0", (CO_LOCATED, f"{CO_LOCATED}-full"), 0.05)
    equal("e", "or where those weights do that an adapter changes", (CO_LOCATED, f"{CO_LOCATED}-full-inner"), 0.05)
    equal("f", "killing a worker each minute changes no accuracy", ("s3-dying", "s3"), 0.03)
    return found


Measure = Callable[[Result], float]


def _accuracy(result: Result) -> float:
    return result.final


def _largest_fall(result: Result) -> float:
    """The largest fall of the mean reward over ten steps below an earlier one."""
    rewards, highest, fall = result.curve.reward, 0.0, 0.0
    for end in range(10, len(rewards) + 1):
        mean = statistics.fmean(rewards[end - 10 : end])
        highest = max(highest, mean)
        fall = max(fall, highest - mean)
    return fall


def _paired(runs: Runs, pair: tuple[str, str], of: Measure) -> list[float]:
    """The differences for the common seeds."""
    return [of(one) - of(other) for one, other in _pairs(runs, pair)]


def _pairs(runs: Runs, pair: tuple[str, str]) -> list[tuple[Result, Result]]:
    """The results of both conditions for the common seeds."""
    first, second = (runs.get(name, {}) for name in pair)
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def mean_and_error(values: Iterable[float]) -> tuple[float, float]:
    """The mean and its standard error over seeds; the error of one value is NaN."""
    listed = list(values)
    return statistics.fmean(listed), statistics.stdev(listed) / math.sqrt(len(listed)) if len(listed) > 1 else math.nan
