"""A leak is found, and what only wobbles, saws or settles is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.endurance.judge import Verdict, trend_of

_Values = npt.NDArray[np.floating[Any]]
_TIMES = np.arange(0.0, 1_200.0, 5.0)
_RNG = np.random.default_rng(7)


def _verdict(values: _Values, times: _Values = _TIMES) -> Verdict:
    return trend_of(times.tolist(), values.tolist(), allowed_share=0.02, allowed=4.0).verdict


def _wandering(share: float) -> _Values:
    """Noise of one unit whose neighbours resemble one another."""
    values = np.zeros(len(_TIMES))
    for index in range(1, len(values)):
        values[index] = share * values[index - 1] + _RNG.normal()
    return values


def test_what_stands_still_is_flat() -> None:
    assert _verdict(np.full(len(_TIMES), 300.0)) is Verdict.FLAT
    assert _verdict(300 + _RNG.normal(0, 2, len(_TIMES))) is Verdict.FLAT
    assert _verdict(300 + _wandering(0.8)) is Verdict.FLAT


def test_a_saw_that_comes_back_is_flat() -> None:
    assert _verdict(300 + _TIMES % 60 / 6) is Verdict.FLAT


def test_what_settles_during_the_warm_up_is_flat() -> None:
    assert _verdict(300 - 100 * np.exp(-_TIMES / 60)) is Verdict.FLAT


@pytest.mark.parametrize("noise", [0.0, 1.0, 5.0])
def test_a_leak_is_found(noise: float) -> None:
    """60 MB an hour beside 300 MB: a fifteenth of that within the time looked at."""
    assert _verdict(300 + 60 / 3_600 * _TIMES + _RNG.normal(0, noise, len(_TIMES))) is Verdict.GROWS


def test_a_leak_under_a_saw_is_found() -> None:
    assert _verdict(300 + 60 / 3_600 * _TIMES + _TIMES % 60 / 6) is Verdict.GROWS


def test_a_file_more_now_and_then_is_found() -> None:
    assert _verdict(40 + np.floor(_TIMES / 60)) is Verdict.GROWS


@pytest.mark.parametrize("when_s", [500, 650, 800, 950, 1_100])
def test_one_step_that_stays_is_not_called_a_leak(when_s: int) -> None:
    assert _verdict(np.where(when_s < _TIMES, 44.0, 40.0)) is not Verdict.GROWS


def test_too_much_noise_or_too_little_time_is_said() -> None:
    assert _verdict(300 + _RNG.normal(0, 60, len(_TIMES))) is Verdict.UNSURE
    with pytest.raises(ValueError, match="too few for a trend"):
        _verdict(np.full(10, 300.0), _TIMES[:10])


def test_what_may_still_hide_is_said_by_the_hour() -> None:
    trend = trend_of(_TIMES.tolist(), (300 + 6 / 3_600 * _TIMES).tolist(), allowed_share=0.02, allowed=4.0)
    assert trend.verdict is Verdict.FLAT
    assert trend.at_most_per_hour == pytest.approx(6.0)
