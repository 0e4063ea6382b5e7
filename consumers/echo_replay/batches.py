"""Forms a step's training batch again from its report and its trajectories, with the same rewards, groups, order and cuts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from echo_core.batch_choice import ChosenGroup, ChosenSample, weight_of
from echo_core.groups import Member, Score
from echo_core.policy import OverBudget
from echo_core.staleness import age_of
from echo_learner.training.batch import BatchRules, SignalSource, TrainingBatch, form_batch
from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, Coordinates, RewardTerm, StepReport, Trajectory

# Machines round float32 differently.
_ADVANTAGE_TOLERANCE = 1e-5

Place = tuple[int, int]
"""(partition, offset)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OtherRewards:
    """Rewards that replace the run's own when it is trained again. `values` by place and name; a term without a value is an error."""

    terms: tuple[RewardTerm, ...]
    values: Mapping[Place, Mapping[str, float]]

    def scores_of(self, place: Place, version: int) -> dict[str, Score]:
        """The scores of one sample of the step that made `version`. Raises UserError if one is missing."""
        found = self.values.get(place, {})
        for term in self.terms:
            if term.name not in found:
                raise UserError(
                    f"A sample of version {version}, at partition {place[0]}, offset {place[1]}, has no value of {term.name!r}.",
                    hint=f"`echoswarm rescore … --step {version} --name {term.name}` gives it one.",
                )
        return {term.name: Score(value=found[term.name]) for term in self.terms}


def training_batch(
    report: StepReport,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    *,
    rules: BatchRules,
    over_budget: OverBudget,
    budget: int,
    task: SignalSource,
    other: OtherRewards | None = None,
) -> TrainingBatch:
    """The trainer's batch for `report.version`, or the one that `other` rewards would have given. `over_budget`, `budget`: the run's rule
    for samples above S in asynchronous mode. Raises UserError if the report's rewards do not give its advantages, its columns do not fit
    together, or `other` lacks a sample's value."""
    version = report.version - 1
    scores = _reported_scores(batch) if other is None else [other.scores_of(place, report.version) for place in places_of(batch)]
    groups = _groups(batch, trajectories, scores, version, over_budget, budget)
    formed = form_batch(groups, version, report.reward_terms if other is None else other.terms, rules, task)
    own, reported = (np.frombuffer(columns.advantages, LOGPROB_DTYPE) for columns in (formed.columns, batch))
    if other is None and not np.allclose(own, reported, rtol=_ADVANTAGE_TOLERANCE, atol=_ADVANTAGE_TOLERANCE):
        raise UserError(
            f"The rewards in the report of version {report.version} do not give the report's advantages.",
            hint="Are [learner] scale_by_std and std as they were when the run was trained?",
        )
    return replace(
        formed.training,
        order=np.frombuffer(batch.order, TOKEN_DTYPE),
        micro_batch_sizes=np.frombuffer(batch.micro_batches, TOKEN_DTYPE),
        update_sizes=np.frombuffer(batch.updates, TOKEN_DTYPE),
    )


def _reported_scores(batch: Batch) -> list[dict[str, Score]]:
    values = {column.name: np.frombuffer(column.values, VALUE_DTYPE).tolist() for column in batch.rewards}
    defaulted = {column.name: np.frombuffer(column.defaulted, FLAG_DTYPE).tolist() for column in batch.rewards}
    return [
        {name: Score(value=values[name][row], defaulted=bool(defaulted[name][row])) for name in values} for row in range(batch.num_samples)
    ]


def _groups(
    batch: Batch,
    trajectories: Sequence[Trajectory],
    scores: Sequence[Mapping[str, Score]],
    version: int,
    over_budget: OverBudget,
    budget: int,
) -> tuple[ChosenGroup, ...]:
    samples = [
        ChosenSample(
            member=Member(where=Coordinates(partition=partition, offset=offset), trajectory=trajectory, scores=dict(mine)),
            staleness=age_of(trajectory, version),
            weight=weight_of(age_of(trajectory, version), over_budget, budget),
        )
        for (partition, offset), trajectory, mine in zip(places_of(batch), trajectories, scores, strict=True)
    ]
    groups, start = [], 0
    for size in np.frombuffer(batch.group_sizes, TOKEN_DTYPE).tolist():
        members = tuple(samples[start : start + size])
        groups.append(ChosenGroup(seq=members[0].member.trajectory.seq, samples=members, dropped={}))
        start += size
    return tuple(groups)


def places_of(batch: Batch) -> list[Place]:
    """The place of each sample, in the batch's order."""
    return list(
        zip(np.frombuffer(batch.partitions, TOKEN_DTYPE).tolist(), np.frombuffer(batch.offsets, OFFSET_DTYPE).tolist(), strict=True)
    )
