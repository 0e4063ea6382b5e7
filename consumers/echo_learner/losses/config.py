"""The options of each loss, with defaults and their sources.

No torch, so that any process can check a run's file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from echo_schemas.errors import UserError

CLIP_LOW = 0.2
"""PPO (arXiv 1707.06347) and GRPO."""
CLIP_HIGH = 0.28
"""DAPO's clip-higher (arXiv 2503.14476); ECHO-2 does not give its epsilon."""
TRUNCATION = 2.0
"""verl's `rollout_is_threshold`; ECHO-2 does not give its C."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def _require_positive(name: str, value: float) -> None:
    _require(value > 0 and math.isfinite(value), f"{name} is {value}; it must be a finite number above 0.")


def _require_band(low: float, high: float) -> None:
    _require(
        0 <= low <= 1 <= high and math.isfinite(high),
        f"The band [{low}, {high}] must hold the ratio 1, or even tokens of the current policy would be rejected.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """`clip_low`, `clip_high`: epsilon of eq. 25 on either side. `dual_clip`: bound on r for A < 0 (verl uses 3); None: no bound."""

    clip_low: float = CLIP_LOW
    clip_high: float = CLIP_HIGH
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        _require(0 <= low <= 1, f"clip_low is {low}; it must lie in [0, 1], since the ratio is held above 1 - clip_low.")
        _require(high >= 0 and math.isfinite(high), f"clip_high is {high}; it must be a number of at least 0.")
        _require(
            dual is None or (dual > 1 + high and math.isfinite(dual)),
            f"dual_clip is {dual}; it must be above 1 + clip_high, else it would cut ratios that the clip allows.",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoTis(Clip):
    """ECHO-2's objective: clip on pi/pi_prev, weight min(pi_prev/mu, cap). `cap`: C of eq. 24."""

    cap: float = TRUNCATION

    def __post_init__(self) -> None:
        Clip.__post_init__(self)
        _require_positive("cap", self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoClip(Clip):
    """One clipped ratio pi/mu, as in TRL's asynchronous GRPO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """REINFORCE with a clipped, detached weight pi/mu.

    `floor` 0: no lower clip (MiniMax-M1). `cap` 5: TRL's advice for CISPO, after ScaleRL (arXiv 2510.13786).
    """

    floor: float = 0.0
    cap: float = 5.0

    def __post_init__(self) -> None:
        _require_band(self.floor, self.cap)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTis(Cispo):
    """CISPO's formula with the name and the tighter cap of token-level truncated importance sampling (verl: 2)."""

    cap: float = TRUNCATION


@dataclass(frozen=True, slots=True, kw_only=True)
class IcePop(Clip):
    """GRPO whose tokens count only while pi_prev/mu stays inside [low, high] (Ling Team, IcePop: 0.5 and 5)."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        _require_band(self.low, self.high)
        Clip.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceMask(Clip):
    """GRPO with truncated weights that rejects a sequence whose geometric mean of pi_prev/mu leaves [low, high].

    The band is SkyRL's (0.99 and 1.01), meant for answers of hundreds of tokens; short answers scatter more: widen it
    until `sequences_rejected_fraction` is small.
    """

    low: float = 0.99
    high: float = 1.01
    cap: float = TRUNCATION

    def __post_init__(self) -> None:
        _require_band(self.low, self.high)
        _require_positive("cap", self.cap)
        Clip.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPpo(Clip):
    """AReaL's decoupled PPO.

    `reject_above`: tokens with pi_prev/mu beyond it are rejected (AReaL: 5). `clip_low`, `clip_high`: AReaL's
    `eps_clip`.
    """

    clip_high: float = 0.2
    reject_above: float = 5.0

    def __post_init__(self) -> None:
        Clip.__post_init__(self)
        _require_band(0.0, self.reject_above)


class Divergence(StrEnum):
    """Distance between pi and mu at the sampled token, with all other tokens taken as one (binary)."""

    TOTAL_VARIATION = "tv"
    KL = "kl"


_DPPO_THRESHOLDS: Mapping[Divergence, float] = {
    Divergence.TOTAL_VARIATION: 0.2,  # prime-rl's `dppo_mask`
    Divergence.KL: 0.05,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dppo:
    """The divergence mask of DPPO (arXiv 2602.04879).

    `threshold`: none takes 0.2 for "tv" (prime-rl) and 0.05 for "kl". `cap`: bound on pi/mu (verl: 20).
    `log_ratio_penalty`: factor of (log pi/mu)^2 on every token (prime-rl: 1e-3; the paper has none).
    """

    divergence: Divergence = Divergence.TOTAL_VARIATION
    threshold: float | None = None
    cap: float = 20.0
    log_ratio_penalty: float = 1e-3

    def __post_init__(self) -> None:
        _require_positive("threshold", self.limit)
        _require_band(0.0, self.cap)
        _require(
            self.log_ratio_penalty >= 0 and math.isfinite(self.log_ratio_penalty),
            f"log_ratio_penalty is {self.log_ratio_penalty}; it must be at least 0.",
        )

    @property
    def limit(self) -> float:
        return _DPPO_THRESHOLDS[self.divergence] if self.threshold is None else self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """One ratio per sequence, weight min(pi_prev/mu, cap) as in verl.

    `clip_low`, `clip_high`: far tighter than a token's, since a mean over many tokens hardly moves (arXiv 2507.18071,
    section 5.1).
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    cap: float = TRUNCATION

    def __post_init__(self) -> None:
        _ = self.clip  # raises for invalid bounds
        _require_positive("cap", self.cap)

    @property
    def clip(self) -> Clip:
        """The bounds as a Clip without a dual clip."""
        return Clip(clip_low=self.clip_low, clip_high=self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomLoss:
    """A user's own loss: `path` is `module:attribute`, `options` are passed to it by keyword."""

    path: str
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKl:
    """The KL term to the reference policy, beside any loss.

    `coef`: beta; 0 turns it off (DAPO and most verifiable-reward recipes). `estimator`: of KL(pi || pi_ref) a token. `placement`: a term of
    the loss, or taken off the token's advantage; k1 only there, since the gradient of k1 as a loss is zero in the mean. `weighted`, in the
    loss: multiply each token's term by the loss's importance weight, as ECHO-2 has it (the term stands inside eq. 25, which eq. 24
    weights); False is GRPO's plain term. `log_ratio_limit`: cut on log(pi_ref/pi) before exp() (PipelineRL: 5).
    """

    coef: float = 0.0
    estimator: Literal["k3", "k2", "k1"] = "k3"
    placement: Literal["loss", "advantage"] = "loss"
    weighted: bool = True
    log_ratio_limit: float = 5.0

    def __post_init__(self) -> None:
        _require(self.coef >= 0 and math.isfinite(self.coef), f"The KL coefficient is {self.coef}; it must be at least 0.")
        _require_positive("log_ratio_limit", self.log_ratio_limit)
        _require(
            self.estimator != "k1" or self.placement == "advantage",
            "The estimator k1 as a term of the loss has a gradient of zero in the mean; take it off the advantage, or write k2 or k3.",
        )


LossConfig = GrpoTis | GrpoClip | Cispo | IcePop | SequenceMask | DecoupledPpo | Dppo | Gspo
