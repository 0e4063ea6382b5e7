"""Does something grow? A line through what was measured, with its uncertainty. Pure.

Neighbouring samples of a process resemble one another, which makes a line look surer than it is: the number of samples counts as
n (1 - r) / (1 + r), r being the correlation of neighbouring residuals (Bayley and Hammersley, 1946, for a first-order process).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

WARM_UP = 1 / 3
"""The share of the time, at the beginning, in which caches fill and libraries are loaded. It is not looked at."""
_SURE = 2.0
_MOST_ALIKE = 0.95
_FEWEST = 12


class Verdict(StrEnum):
    """FLAT: if it grows at all, then by less than is allowed. GROWS: by more. UNSURE: the samples do not say; go on for longer."""

    FLAT = "flat"
    GROWS = "grows"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """`level`: the median after the warm-up; `growth` over the time that was looked at, `window_s`, give or take `error` (two standard
    errors); `allowed`: more would be a leak.
    """

    level: float
    growth: float
    error: float
    allowed: float
    window_s: float

    @property
    def verdict(self) -> Verdict:
        """What the samples say."""
        if self.growth - self.error > self.allowed:
            return Verdict.GROWS
        return Verdict.FLAT if self.growth + self.error <= self.allowed else Verdict.UNSURE

    @property
    def at_most_per_hour(self) -> float:
        """What may still hide: the largest growth that the samples allow."""
        return max(0.0, self.growth + self.error) * 3_600 / self.window_s


def trend_of(times_s: Sequence[float], values: Sequence[float], *, allowed_share: float, allowed: float) -> Trend:
    """The trend of `values`, shape [n], at `times_s`. It may grow by `allowed_share` of its level, or by `allowed`, whichever is more.

    Raises ValueError if less than a dozen samples are left after the warm-up.
    """
    times, found = np.asarray(times_s, float), np.asarray(values, float)
    is_warm = times >= times[0] + WARM_UP * (times[-1] - times[0]) if len(times) else np.zeros(0, bool)
    times, found = times[is_warm], found[is_warm]
    if len(times) < _FEWEST:
        raise ValueError(f"{len(times)} samples after the warm-up are too few for a trend; {_FEWEST} are needed.")
    centred = times - times.mean()
    slope = float(centred @ found / (centred @ centred))
    rest = found - found.mean() - slope * centred
    alike = float(np.clip(rest[1:] @ rest[:-1] / (rest @ rest), 0, _MOST_ALIKE)) if rest @ rest > 0 else 0.0
    error = float(np.sqrt(rest @ rest / (len(times) - 2) / (centred @ centred) * (1 + alike) / (1 - alike)))
    window_s, level = float(times[-1] - times[0]), float(np.median(found))
    return Trend(
        level=level, growth=slope * window_s, error=_SURE * error * window_s, allowed=max(allowed_share * level, allowed), window_s=window_s
    )  # fmt: skip
