"""A run's settings as the arguments of the pure rules."""

from __future__ import annotations

import math

from echo_core.evaluation import EvaluationSpec, held_out_seed
from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_schemas.records import Sampling
from echo_settings.evaluation import EvalSettings
from echo_settings.sections import RolloutSettings, Settings


def staleness_policy(settings: Settings) -> StalenessPolicy:
    """S, kappa and the other staleness rules."""
    return StalenessPolicy(
        budget=settings.budget,
        lead=settings.lead,
        publication_period=settings.publication_period,
        groups_per_step=settings.learner.groups_per_step,
        group_size=settings.rollout.group_size,
        min_group_size=settings.staleness.min_group_size,
        admission=Admission(settings.staleness.admission),
        over_budget=OverBudget(settings.staleness.over_budget),
    )


def store_from_bytes(settings: Settings) -> float:
    """Snapshots of at least this many bytes go to the store; infinite: none."""
    return {"log": math.inf, "store": 0}.get(settings.weights.source or "", settings.store.above_mb << 20)


def training_sampling(rollout: RolloutSettings) -> Sampling:
    """The sampling of training groups."""
    return Sampling(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=rollout.stop,
    )


def evaluation_specs(settings: Settings) -> tuple[EvaluationSpec, ...]:
    return tuple(evaluation_spec(settings, section) for section in settings.eval)


def evaluation_spec(settings: Settings, section: EvalSettings) -> EvaluationSpec:
    """One evaluation; values that its section leaves out come from the run."""
    rollout, rewards = settings.rollout, section.rewards or tuple(settings.rewards)
    is_own_task = section.task in {"", settings.task.name}
    return EvaluationSpec(
        name=section.name,
        task=section.task or settings.task.name,
        options=section.options or (settings.task.options if is_own_task else {}),
        rewards=rewards,
        pass_reward=section.pass_reward or rewards[0],
        pass_from=section.pass_from,
        pass_at=section.pass_at,
        prompts=section.prompts,
        samples=section.samples,
        sampling=Sampling(
            max_new_tokens=rollout.max_new_tokens if section.max_new_tokens is None else section.max_new_tokens,
            temperature=section.temperature,
            top_p=section.top_p,
            top_k=section.top_k,
            min_p=section.min_p,
            stop=rollout.stop if section.stop is None else section.stop,
        ),
        seed=held_out_seed(section.seed),
        every=section.every,
        at_start=section.at_start,
        at_end=section.at_end,
        patience_s=section.patience_s,
    )
