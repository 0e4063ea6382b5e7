"""From a run's settings to what the pure rules take."""

from __future__ import annotations

from echo_bus.settings.sections import Settings
from echo_core.policy import Admission, OverBudget, StalenessPolicy


def staleness_policy(settings: Settings) -> StalenessPolicy:
    """S, kappa and the rest."""
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
