"""Chooses the groups of the next batch, and drops or weights samples that are too old. The authoritative check of staleness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_core.groups import Member, ReadyGroup
from echo_core.policy import OverBudget, StalenessPolicy
from echo_core.staleness import Freshness, age_of, freshness_of
from echo_schemas.records import Coordinates, DropReason, RewardTerm

_REASONS = {Freshness.STALE: DropReason.STALE, Freshness.NOT_THIS_PAST: DropReason.NOT_THIS_PAST}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSample:
    """A sample of the batch. `weight` scales its tokens' loss: 0 under `withhold`, S / staleness under `downweight`, else 1."""

    member: Member
    staleness: int
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGroup:
    """A group of the batch: the kept samples, and the dropped members with their reasons."""

    seq: int
    samples: tuple[ChosenSample, ...]
    dropped: Mapping[Coordinates, DropReason]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`batch`: the groups to train, None while there are too few. `refused`: by seq, groups that can never be trained, and why."""

    batch: tuple[ChosenGroup, ...] | None
    refused: Mapping[int, DropReason]


def choose_batch(ready: Sequence[ReadyGroup], learner_version: int, policy: StalenessPolicy, terms: tuple[RewardTerm, ...] = ()) -> Choice:
    """The oldest admissible groups, by (oldest version, seq) and never by arrival, so that the choice is the same after a restart. A group
    that keeps fewer than `min_group_size` samples is refused whole. A refused group cannot become admissible later: staleness only
    grows."""
    batch: list[ChosenGroup] = []
    refused: dict[int, DropReason] = {}
    for group in sorted(ready, key=lambda each: (each.min_version, each.seq)):
        chosen = _admit(group, learner_version, policy, terms)
        kept = sum(sample.weight > 0 for sample in chosen.samples)
        if kept < min(policy.min_group_size, len(group.members)) or not kept:
            refused[group.seq] = next(iter(chosen.dropped.values()), DropReason.STALE)
        elif len(batch) < policy.groups_per_step:
            batch.append(chosen)
    return Choice(batch=tuple(batch) if len(batch) == policy.groups_per_step else None, refused=refused)


def weight_of(age: int, over_budget: OverBudget, budget: int) -> float:
    """The factor of a kept sample's loss. Above the budget: 0 under `withhold` (it stays in the group's baseline), else budget / age."""
    if age <= budget or over_budget is OverBudget.DROP:
        return 1.0
    return 0.0 if over_budget is OverBudget.WITHHOLD else budget / age


def _admit(group: ReadyGroup, learner_version: int, policy: StalenessPolicy, terms: tuple[RewardTerm, ...]) -> ChosenGroup:
    samples: list[ChosenSample] = []
    dropped: dict[Coordinates, DropReason] = {}
    required = [term.name for term in terms if term.is_awaited]
    for member in group.members:
        verdict = freshness_of(member.trajectory, learner_version, policy.budget)
        age = age_of(member.trajectory, learner_version)
        if verdict is Freshness.NOT_THIS_PAST or (verdict is Freshness.STALE and policy.over_budget is OverBudget.DROP):
            dropped[member.where] = _REASONS[verdict]
        elif any(name not in member.scores for name in required):
            dropped[member.where] = DropReason.UNREWARDED
        else:
            samples.append(ChosenSample(member=member, staleness=age, weight=weight_of(age, policy.over_budget, policy.budget)))
    return ChosenGroup(seq=group.seq, samples=tuple(samples), dropped=dropped)
