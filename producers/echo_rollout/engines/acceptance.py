"""Whether an engine may sample for a run, checked once it is started. Every weakness that the run allows is logged."""

from __future__ import annotations

import logging

from echo_rollout.engines.engine import EngineCapabilities
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobSource
from echo_settings.rules import training_sampling
from echo_settings.sections import RolloutSettings

logger = logging.getLogger(__name__)


def check_capabilities(capabilities: EngineCapabilities, rollout: RolloutSettings, *, replays_experts: bool = False) -> None:
    """Raise UserError for an engine without log-probabilities, or without proof of its version, unless the run allows it.
    `replays_experts`: the engine has to note experts.

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
        sentence = f"The engine {capabilities.name!r} cannot prove which version it serves."
        if rollout.unproved_versions == "refuse":
            raise UserError(
                sentence,
                hint='Set [rollout] unproved_versions = "allow" to believe it as far as the comparison of log-probabilities goes, or use '
                "an engine that can; see docs/engines.md.",
            )
        logger.warning("%s Only the learner's comparison of log-probabilities checks it.", sentence)
