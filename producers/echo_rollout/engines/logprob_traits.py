"""Which distribution a server's log-probabilities belong to, measured on the likeliest tokens at two temperatures and with top_k = 1."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from echo_rollout.engines.engine import EngineCapabilities, EngineConfig, Switch
from echo_schemas.records import LogprobDistribution, LogprobSource, WeightKind

logger = logging.getLogger(__name__)

TOP = 5
"""How many of the likeliest tokens are looked at."""
# The second temperature. Log-probabilities after temperature lie 1 / temperature times as far apart.
_COOL = 0.5
_LEAST_SPREAD, _MOST_ERROR = 0.05, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTraits:
    """`usable`: the server gives log-probabilities that the learner can use; the others as in `EngineCapabilities`."""

    usable: bool
    distribution: LogprobDistribution = LogprobDistribution.DRAWN
    before_temperature: bool = False

    def capabilities(self, config: EngineConfig, name: str, switch: Switch, *, proves_version: bool) -> EngineCapabilities:
        """Those of an engine whose server has these traits."""
        is_lora = config.kind is WeightKind.LORA
        return EngineCapabilities(
            name=name,
            lora=is_lora,
            full=not is_lora,
            switch=switch,
            max_tokens=config.max_length,
            proves_version=proves_version,
            logprobs=LogprobSource.SAMPLER if self.usable else LogprobSource.RECOMPUTED,
            distribution=self.distribution,
            before_temperature=self.before_temperature,
        )


class Likeliest(Protocol):
    """Asks for the log-probabilities of the likeliest first tokens after one prompt, by what the server calls the tokens."""

    async def __call__(self, *, temperature: float = 1.0, top_k: int = 0) -> Mapping[str, float]:
        """Empty if it tells none."""


async def look_at_logprobs(likeliest: Likeliest, *, url: str) -> LogprobTraits:
    """Measure them. If they do not follow the temperature, a warning names the server option that changes it."""
    slope = await _slope(likeliest)
    follows, before_temperature = (math.isclose(slope, wanted, abs_tol=_MOST_ERROR) for wanted in (1.0, _COOL))
    if not follows:
        logger.warning(
            "Log-probabilities of the server at %s do not follow the temperature: %s. Start it with --logprobs-mode processed_logprobs.",
            url,
            "they can be used at temperature 1 alone" if before_temperature else "they cannot be used",
        )
    # With top_k = 1 the one token that may be drawn has the probability 1.
    is_drawn = follows and max((await likeliest(top_k=1)).values(), default=0.0) > -_LEAST_SPREAD
    return LogprobTraits(
        usable=follows or before_temperature,
        distribution=LogprobDistribution.DRAWN if is_drawn else LogprobDistribution.FULL,
        before_temperature=before_temperature,
    )


async def _slope(likeliest: Likeliest) -> float:
    """By how much the distances between the likeliest tokens' log-probabilities grow as the temperature falls, as a share of
    1 / temperature: 1 if they follow it, `_COOL` if they are those before temperature, 0 where it cannot be measured."""
    plain, cool = [await likeliest(temperature=temperature) for temperature in (1.0, _COOL)]
    both = sorted(set(plain) & set(cool), key=lambda token: plain[token])
    spread = plain[both[-1]] - plain[both[0]] if len(both) > 1 else 0.0
    if spread < _LEAST_SPREAD:
        # The server lists too few tokens, or the model finds all equally likely.
        return 0.0
    return (cool[both[-1]] - cool[both[0]]) * _COOL / spread
