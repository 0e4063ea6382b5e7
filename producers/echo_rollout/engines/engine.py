"""The protocol of engines. An engine serves one version at a time and says under which version each token was made.

EchoError
└── EngineError             this request cannot be generated; the engine goes on
    ├── SnapshotRejected    these weights cannot be served; the old version stays in force
    └── AnswerUnusable      the answer does not fit the request; the group is given up, the engine goes on
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echo_core.layer_split import Device
from echo_schemas.errors import EchoError, UserError
from echo_schemas.records import FinishReason, LogprobDistribution, LogprobSource, Sampling, VersionSpan, WeightKind
from echo_settings.rules import training_sampling
from echo_settings.sections import RolloutSettings

# The members of a group count up from the seed, and a generator takes 63 bits.
_MOST_SEED = 2**62
# vLLM raises lower temperatures to it, while the learner would compute with the requested one.
_LEAST_TEMPERATURE = 0.01
# Temperatures at which log-probabilities before and after temperature are the same; at 0 by convention.
_PLAIN_TEMPERATURES = frozenset({0.0, 1.0})
logger = logging.getLogger(__name__)


class EngineError(EchoError):
    """A request that cannot be generated: too long, or with tokens that the model does not have."""


class SnapshotRejected(EngineError):
    """A snapshot that does not fit the base model or cannot be loaded."""


class AnswerUnusable(EngineError):
    """An answer that does not fit its request: too few choices, tokens without log-probabilities, another model's."""


class Switch(StrEnum):
    """What happens to generations under way when a version is installed: they finish under their own, are waited for, or go on mixed."""

    KEEPS = "keeps"
    DRAINS = "drains"
    MIXES = "mixes"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do. `max_tokens`: prompt and answer together. `proves_version`: it proves that it serves the installed version.
    `logprobs`: `recomputed` if it gives no log-probabilities. `distribution`: the one that its log-probabilities belong to;
    `before_temperature`: they are those at temperature 1, whatever the sampling, so they are right at temperatures 1 and 0 alone.
    `experts`: it notes which experts tokens went to."""

    name: str
    lora: bool
    full: bool
    switch: Switch
    max_tokens: int
    proves_version: bool = True
    logprobs: LogprobSource = LogprobSource.SAMPLER
    distribution: LogprobDistribution = LogprobDistribution.DRAWN
    before_temperature: bool = False
    experts: bool = False

    def source_at(self, temperature: float) -> LogprobSource:
        """Where the log-probabilities of tokens drawn at `temperature` come from."""
        is_unsaid = self.before_temperature and temperature not in _PLAIN_TEMPERATURES
        return LogprobSource.RECOMPUTED if is_unsaid else self.logprobs

    def described(self) -> dict[str, str]:
        """As text, for a worker's status."""
        kinds = [kind for kind, can in (("lora", self.lora), ("full", self.full)) if can]
        return {
            "weights": ",".join(kinds),
            "switch": self.switch.value,
            "max_tokens": str(self.max_tokens),
            "logprobs": self.logprobs.value,
            "distribution": self.distribution.value,
            "version": "proved" if self.proves_version else "claimed",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotRef:
    """Which weights: version and SHA-256 of the snapshot."""

    version: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Verified files of one version. The folder stays as it is while `Engine.in_use` names its version."""

    ref: SnapshotRef
    kind: WeightKind
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """One completion. `token_ids` int32 [G], end token included; `logprobs` float32 [G], natural, after temperature; zeros if
    `logprob_source` leaves them to the learner. `experts`, if `EngineConfig` asks for them: [P + G - 1, layers, per token], unsigned, of
    prompt and completion without the last token."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    weights_sha256: str
    finish_reason: FinishReason
    text: str
    logprob_source: LogprobSource = LogprobSource.SAMPLER
    logprob_distribution: LogprobDistribution = LogprobDistribution.DRAWN
    experts: npt.NDArray[np.unsignedinteger[Any]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to open an engine. `options` are the engine's own arguments, from [rollout.options]; `devices`: of [rollout], none for one;
    `notes_experts`: generations hold the experts that their tokens went to."""

    base: Path
    kind: WeightKind
    dtype: str
    max_length: int
    lora_rank: int
    concurrency: int
    options: dict[str, object]
    devices: tuple[Device, ...] = ()
    notes_experts: bool = False


class Engine(Protocol):
    """Generates. One asyncio loop uses it; `generate` may run many times at once."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What it can do; known once it is started."""

    @property
    def installed(self) -> SnapshotRef | None:
        """What generations that start now run under; None before the first `install`."""

    @property
    def in_use(self) -> frozenset[int]:
        """Versions that a generation under way, or the next one, needs."""

    async def start(self) -> None:
        """Load the base model. Slow. Raises UserError if it cannot be served here."""

    async def install(self, snapshot: Snapshot) -> None:
        """Serve `snapshot` for every generation that starts after this returns. Raises SnapshotRejected; the old version stays in force."""

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """`n` completions of one prompt. Raises EngineError for a prompt that cannot be served, or before the first `install`."""

    async def close(self) -> None:
        """Stop; generations under way raise EngineError. Idempotent."""


def check_prompt(prompt: Sequence[int], sampling: Sampling, *, vocabulary: int, max_length: int) -> None:
    """Raise EngineError if `prompt` has a token outside the vocabulary or leaves no room for the answer, or `sampling` is out of range."""
    if not prompt:
        raise EngineError("The prompt is empty.")
    _check_sampling(sampling)
    if len(prompt) + sampling.max_new_tokens > max_length:
        raise EngineError(
            f"A prompt of {len(prompt)} tokens and {sampling.max_new_tokens} new ones are above the engine's {max_length}.",
            hint="Raise [policy] max_length, or shorten prompts or [rollout] max_new_tokens.",
        )
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise EngineError(f"The prompt has a token outside the vocabulary of {vocabulary}.")


def _check_sampling(sampling: Sampling) -> None:
    """The same for every engine: a value that one engine refuses and another reads differently is refused before."""
    # Written so that NaN fails.
    in_range = {
        "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (
            sampling.temperature == 0 or _LEAST_TEMPERATURE <= sampling.temperature < math.inf,
            f"0, or {_LEAST_TEMPERATURE} and more",
        ),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 (off) or above"),
        "min_p": (0 <= sampling.min_p < 1, "0 (off) or above, and below 1"),
        "seed": (sampling.seed is None or 0 <= sampling.seed <= _MOST_SEED, f"from 0 to {_MOST_SEED}, or none"),
        "stop": (all(sampling.stop), "texts of at least one character"),
    }
    for name, (is_fine, wanted) in in_range.items():
        if not is_fine:
            raise EngineError(f"sampling.{name} is {getattr(sampling, name)!r}; it has to be {wanted}.")


def check_capabilities(capabilities: EngineCapabilities, rollout: RolloutSettings, *, replays_experts: bool = False) -> None:
    """Check an engine once it is started. Raise UserError for one without log-probabilities, or without proof of its version, unless the
    run allows it; what it allows is logged. `replays_experts`: the engine has to note experts.

    With top_p, top_k or min_p log-probabilities are required: the learner does not know which tokens the engine left out.
    """
    if capabilities.source_at(rollout.temperature) is LogprobSource.RECOMPUTED:
        sentence = f"The engine {capabilities.name!r} gives no log-probabilities for the tokens that it draws."
        if training_sampling(rollout).cuts:
            raise UserError(
                f"{sentence} With [rollout] top_p, top_k or min_p it has to: of what it drew from, or of the whole distribution.",
                hint="Leave them at 1, 0 and 0, use an engine that can, or start a vLLM server with --logprobs-mode processed_logprobs.",
            )
        if rollout.missing_logprobs == "refuse":
            raise UserError(
                sentence,
                hint='Set [rollout] missing_logprobs = "recompute" to have the learner say it when it trains (importance weight 1 whatever '
                "the staleness), or use an engine that can; see docs/engines.md.",
            )
        logger.warning("%s The learner computes it when it trains: importance weight 1.", sentence)
    if replays_experts and not capabilities.experts:
        raise UserError(
            f"The engine {capabilities.name!r} does not note which experts its tokens went to, as [policy] replay_experts needs.",
            hint='Set [rollout] engine = "transformers", or [policy] replay_experts = false.',
        )
    if not capabilities.proves_version:
        refusal = unproved(capabilities.name)
        if rollout.unproved_versions == "refuse":
            raise refusal
        logger.warning("%s Only the learner's comparison of log-probabilities checks it.", refusal.message)


def unproved(name: str) -> UserError:
    """The refusal of an engine that only claims its version."""
    return UserError(
        f"The engine {name!r} cannot prove which version it serves.",
        hint='Set [rollout] unproved_versions = "allow" to believe it as far as the comparison of log-probabilities goes, or use '
        "an engine that can; see docs/engines.md.",
    )
