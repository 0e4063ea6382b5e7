"""Staleness, pace and required version: the formulas, and that no combination of them starves or overruns a run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_core.dispatch import DispatchState, may_issue, required_version
from echo_core.policy import Admission, OverBudget, StalenessPolicy
from echo_core.staleness import Freshness, freshness, staleness
from echo_schemas.errors import UserError


def policy(budget: int = 3, kappa: int = 2, groups: int = 4, **changes: object) -> StalenessPolicy:
    return StalenessPolicy(budget=budget, publication_period=kappa, groups_per_step=groups, group_size=4, **changes)  # type: ignore[arg-type]


def state(*, version: int = 0, published: int = 0, undecided: int = 0) -> DispatchState:
    return DispatchState(version=version, published=published, undecided=undecided)


def test_staleness_is_learner_version_minus_oldest_version() -> None:
    assert staleness(14, 12) == 2
    assert freshness(14, 12, 2) is Freshness.ADMISSIBLE
    assert freshness(14, 11, 2) is Freshness.STALE
    assert freshness(14, 14, 0) is Freshness.ADMISSIBLE
    assert freshness(14, 15, 2) is Freshness.NOT_THIS_PAST


@given(st.integers(0, 100), st.integers(0, 100), st.integers(0, 10))
def test_exactly_the_ages_from_zero_to_the_budget_are_admissible(learner: int, oldest: int, budget: int) -> None:
    assert (freshness(learner, oldest, budget) is Freshness.ADMISSIBLE) == (0 <= learner - oldest <= budget)


def test_a_period_above_the_budget_plus_one_is_refused() -> None:
    with pytest.raises(UserError, match="publication_period = 3 or budget = 3"):
        policy(budget=2, kappa=4)
    policy(budget=2, kappa=3)
    policy(budget=0, kappa=1)


@pytest.mark.parametrize("lead", [0, 4])
def test_a_lead_that_starves_the_learner_or_passes_the_budget_is_refused(lead: int) -> None:
    with pytest.raises(UserError, match=f"A lead of {lead} steps does not lie between publication period - 1 = 1, .* and the budget 3"):
        policy(budget=3, kappa=2, lead=lead)


def test_a_lead_below_the_budget_issues_less() -> None:
    rules = policy(budget=3, kappa=1, groups=4, lead=1)
    assert may_issue(state(undecided=7), rules)
    assert not may_issue(state(undecided=8), rules)


@pytest.mark.parametrize("change", [{"budget": -1}, {"kappa": 0}, {"groups": 0}])
def test_senseless_numbers_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError):
        policy(**{"budget": 3, "kappa": 1, **change})


def test_pace_counts_undecided_groups_against_what_is_published() -> None:
    rules = policy(budget=3, kappa=2, groups=4)
    assert may_issue(state(undecided=15), rules)
    assert not may_issue(state(undecided=16), rules)
    # One step trained, nothing published: what the next publication will let in is not yet under way.
    assert not may_issue(state(undecided=12, version=1), rules)
    assert may_issue(state(undecided=15, version=2, published=2), rules)
    assert may_issue(state(undecided=1_000), policy(admission=Admission.FREE))


def test_required_version_is_the_step_that_will_train_less_the_budget_rounded_up_to_a_publication() -> None:
    rules = policy(budget=2, kappa=2, groups=4)
    assert required_version(state(), rules) == 0
    # 12 undecided groups at version 4: trained at step 7, so 5 is the oldest that is fresh enough then, and 6 is published.
    assert required_version(state(version=4, published=4, undecided=12), rules) == 4
    assert required_version(state(version=6, published=6, undecided=12), rules) == 6
    assert required_version(state(version=7, published=6), rules) == 6


@given(
    budget=st.integers(0, 5),
    kappa=st.integers(1, 6),
    groups=st.integers(1, 4),
    drop_rate=st.floats(0, 0.9),
    admission=st.sampled_from(Admission),
    slack=st.integers(0, 5),
    seed=st.integers(0, 2**16),
)
def test_no_budget_period_and_drops_ever_stop_a_run_or_let_a_sample_be_born_too_old(
    budget: int, kappa: int, groups: int, drop_rate: float, admission: Admission, slack: int, seed: int
) -> None:
    """A learner that trains in order, an allocator that issues when it may, a worker that uses exactly the required version.

    The run must reach its steps, and under pace every group trained must be within the budget, although the worker is as lazy as allowed.
    """
    kappa = min(kappa, budget + 1)
    lead = max(kappa - 1, budget - slack)
    rules = policy(budget=budget, kappa=kappa, groups=groups, admission=admission, over_budget=OverBudget.DROP, lead=lead)
    dice = random.Random(seed)
    now = state()
    waiting: list[int] = []
    oldest_trained = 0
    for _ in range(2_000):
        if now.version == 12:
            break
        while may_issue(now, rules) and now.undecided < rules.max_open_groups:
            version = required_version(now, rules)
            assert version <= now.published, "a worker would wait for weights that do not exist"
            assert version % kappa == 0, "a worker would wait for a version that is never published"
            now = replace(now, undecided=now.undecided + 1)
            waiting.append(version)
        if dice.random() < drop_rate and waiting:
            waiting.pop(dice.randrange(len(waiting)))
            now = replace(now, undecided=now.undecided - 1)
            continue
        fresh = [version for version in waiting if now.version - version <= budget]
        stale = len(waiting) - len(fresh)
        if stale:
            assert admission is Admission.FREE, "under pace a group was issued that could only become stale"
            now = replace(now, undecided=now.undecided - stale)
        waiting = fresh
        if len(waiting) >= groups:
            batch, waiting = waiting[:groups], waiting[groups:]
            oldest_trained = max(oldest_trained, *(now.version - version for version in batch))
            version = now.version + 1
            published = version - version % rules.publication_period
            now = state(version=version, published=published, undecided=now.undecided - groups)
    assert now.version == 12, f"the run stood still at {now}"
    assert oldest_trained <= budget
