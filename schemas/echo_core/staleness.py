"""Staleness, computed here and nowhere else."""

from __future__ import annotations

from enum import StrEnum

from echo_schemas.records import Trajectory


class Freshness(StrEnum):
    """Whether the learner may train a sample, by its age."""

    ADMISSIBLE = "admissible"
    STALE = "stale"
    NOT_THIS_PAST = "not_this_past"


def age_of(trajectory: Trajectory, learner_version: int) -> int:
    """A trajectory's staleness; 0 for an exempt one, whatever version its spans name."""
    return 0 if trajectory.is_exempt else staleness(learner_version, trajectory.min_version)


def freshness_of(trajectory: Trajectory, learner_version: int, budget: int) -> Freshness:
    """A trajectory's freshness. An exempt one is always admissible, because no version of this run made it."""
    return Freshness.ADMISSIBLE if trajectory.is_exempt else freshness(learner_version, trajectory.min_version, budget)


def staleness(learner_version: int, oldest_version: int) -> int:
    """Learner version when the batch is formed, minus the oldest version that generated any of the sample's tokens. Negative: this learner
    has not made those weights, so the sample does not belong to this run's past."""
    return learner_version - oldest_version


def freshness(learner_version: int, oldest_version: int, budget: int) -> Freshness:
    """A sample is admissible iff 0 ≤ staleness ≤ budget."""
    age = staleness(learner_version, oldest_version)
    if age < 0:
        return Freshness.NOT_THIS_PAST
    return Freshness.ADMISSIBLE if age <= budget else Freshness.STALE
