"""Turns a run's settings into the configurations of the learner's parts. Pure, except for the base model's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_core.advantages import AdvantageScale
from echo_core.groups import AssemblyLimits
from echo_core.normalisation import Normalisation, UpdateSplit
from echo_core.policy import StalenessPolicy
from echo_learner.intake import READ_AT_ONCE
from echo_learner.losses.config import ReferenceKl
from echo_learner.training.batch import BatchRules
from echo_schemas.records import RewardTerm, StepPolicy, WeightKind
from echo_settings import Settings
from echo_settings.learner import LearnerSettings
from echo_settings.public import public_config
from echo_settings.rules import staleness_policy

# Settings that decide what the weights become: a run goes on in place only if they are the same. Other settings (names of machines, ports,
# number of steps, period of checkpoints) may change between two starts.
_MEANING: Mapping[str, tuple[str, ...]] = {
    "run": ("mode", "seed"),
    "task": ("name", "options"),
    "policy": ("base", "update", "lora", "dtype", "replay_experts"),
    "rollout": ("group_size", "temperature", "top_p", "top_k", "min_p", "max_new_tokens", "max_turn_tokens", "stop"),
    "learner": (
        "groups_per_step",
        "updates_per_step",
        "split",
        "loss",
        "loss_options",
        "kl",
        "kl_in",
        "kl_estimator",
        "kl_weighted",
        "kl_log_ratio_limit",
        "normalisation",
        "scale_by_std",
        "std",
        "lr",
        "warmup_steps",
        "lr_schedule",
        "decay_steps",
        "min_lr",
        "weight_decay",
        "max_grad_norm",
    ),
    "staleness": ("budget", "publication_period", "over_budget", "min_group_size"),
}
# Log-probabilities of engines with the same weights differ by about 1e-5 in float32 and 1e-2 in bfloat16; one update changes them by more.
_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.1}

# Token id and log-probability, and a token's share of the texts, which are kept if the task reads them.
_BYTES_A_TOKEN = 16
# Added under routing replay: one of the largest mixtures has eight experts a token in 61 layers, in two bytes each.
_BYTES_OF_EXPERTS = 1_024
_BYTES_A_RECORD = 8_192
# Rewards that the file does not name: attached ones, without weight.
_SHADOW_REWARDS = 2
_LEAST_EARLY = 30_000


def reward_terms(settings: Settings) -> tuple[RewardTerm, ...]:
    """The reward specification that a run starts with: every reward of [rewards] is required."""
    deadline_s = settings.scoring.deadline_s
    return tuple(RewardTerm(name=name, weight=weight, deadline_s=deadline_s) for name, weight in settings.rewards.items())


def ignored_rewards(terms: Sequence[RewardTerm], settings: Settings) -> str:
    """A warning if the file's rewards differ from the run's, which keeps those that it began with; else empty."""
    now = {term.name: (term.weight, term.deadline_s) for term in terms}
    wanted = {term.name: (term.weight, term.deadline_s) for term in reward_terms(settings)}
    if now == wanted:
        return ""
    return (
        f"The file's [rewards] and [scoring] deadline_s are not in force: this run is trained with {_listed(now)}, as it began; the file "
        f"has {_listed(wanted)}. To train with those, fork the run."
    )


def _listed(rewards: Mapping[str, tuple[float, float | None]]) -> str:
    return ", ".join(f"{name} = {weight:g} (deadline {deadline_s} s)" for name, (weight, deadline_s) in rewards.items())


def step_policy(policy: StalenessPolicy) -> StepPolicy:
    """The staleness policy for a step's report: `runs` may hold the configuration of a later start."""
    return StepPolicy(
        budget=policy.budget,
        publication_period=policy.publication_period,
        over_budget=policy.over_budget.value,
        groups_per_step=policy.groups_per_step,
        min_group_size=policy.min_group_size,
    )


def assembly_limits(settings: Settings) -> AssemblyLimits:
    """Bounds of the assembler, which honest records never reach. In bytes: partial groups, as many whole ones, and what one read adds."""
    policy, rollout = staleness_policy(settings), settings.rollout
    token_bytes = _BYTES_A_TOKEN + (_BYTES_OF_EXPERTS if settings.policy.replay_experts else 0)
    undecided = (policy.budget + 2) * policy.groups_per_step * rollout.group_size
    num_records = 2 * policy.max_open_groups * rollout.group_size + READ_AT_ONCE
    return AssemblyLimits(
        max_open_groups=policy.max_open_groups,
        max_open_bytes=num_records * (token_bytes * settings.policy.max_length + _BYTES_A_RECORD),
        max_early_rewards=max(_LEAST_EARLY, undecided * (len(settings.rewards) + _SHADOW_REWARDS)),
        group_timeout_s=settings.rollout.request_timeout_s,
        reward_timeout_s=settings.scoring.deadline_s,
    )


def logprob_tolerance(settings: Settings) -> float:
    """Mean difference of log-probabilities a token up to which a worker is believed, in nats."""
    given = settings.learner.logprob_tolerance
    return _TOLERANCE[settings.policy.dtype] if given is None else given


def batch_rules(settings: Settings) -> BatchRules:
    learner = settings.learner
    return BatchRules(
        num_updates=learner.updates_per_step,
        micro_batch_tokens=learner.micro_batch_tokens,
        scale=advantage_scale(learner),
        split=UpdateSplit(learner.split),
    )


def advantage_scale(learner: LearnerSettings) -> AdvantageScale:
    return AdvantageScale(learner.std) if learner.scale_by_std else AdvantageScale.NONE


def trainer_config(settings: Settings, base: Path) -> Any:
    """What every rank of the trainer takes. `base`: the base model's folder. Imports torch."""
    from echo_learner.training.cut import Cut
    from echo_learner.training.deepspeed_setup import OptimizerConfig
    from echo_learner.training.learning_rate import LearningRate
    from echo_learner.training.policy_model import PolicyConfig
    from echo_learner.training.trainer import TrainerConfig

    policy, learner = settings.policy, settings.learner
    return TrainerConfig(
        policy=PolicyConfig(
            base=str(base),
            base_name=policy.base,
            kind=WeightKind(policy.update),
            lora_r=policy.lora.r,
            lora_alpha=policy.lora.alpha,
            dtype=policy.dtype,
            temperature=settings.rollout.temperature,
            cut=Cut(top_p=settings.rollout.top_p, top_k=settings.rollout.top_k, min_p=settings.rollout.min_p),
            gradient_checkpointing=learner.gradient_checkpointing,
            compile=learner.compile,
            replay_experts=policy.replay_experts,
            seed=settings.run.seed,
        ),
        optimizer=OptimizerConfig(
            rate=LearningRate(
                lr=learner.lr,
                warmup_steps=learner.warmup_steps,
                schedule=learner.lr_schedule,
                decay_steps=learner.decay_steps or 0,
                min_lr=learner.min_lr,
            ),
            weight_decay=learner.weight_decay,
            max_grad_norm=learner.max_grad_norm,
            deepspeed=learner.deepspeed,
        ),
        loss=learner.loss,
        loss_options=learner.loss_options,
        kl=ReferenceKl(
            coef=learner.kl,
            estimator=learner.kl_estimator,
            placement=learner.kl_in,
            weighted=learner.kl_weighted,
            log_ratio_limit=learner.kl_log_ratio_limit,
        ),
        normalisation=Normalisation(learner.normalisation),
        normalisation_constant=settings.rollout.max_new_tokens,
    )


def meaning_of(settings: Settings) -> dict[str, Any]:
    """The settings that decide what the weights become, by `section.key`."""
    public = public_config(settings)
    return {f"{section}.{key}": public[section][key] for section, keys in _MEANING.items() for key in keys}


def changed_meaning(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys that differ, in order. Keys that only one of the two has do not count: a release added or removed them.

    Nor does the mode, which may change between two starts, and with it the mode's staleness settings.
    """
    is_switch = before.get("run.mode") != now.get("run.mode")
    differing = [key for key in now if key in before and before[key] != now[key]]
    return [key for key in differing if key != "run.mode" and not (is_switch and key.startswith("staleness."))]
