"""A step's training batch, formed again from its report and its trajectories: rewards, groups, order and cuts as they were. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from echo_core.batch_choice import ChosenGroup, ChosenSample, weight_of
from echo_core.groups import Member, Score
from echo_core.policy import OverBudget
from echo_core.staleness import age_of
from echo_learner.training.batch import BatchRules, SignalSource, TrainingBatch, form_batch
from echo_replay.sample_source import places_of
from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, TOKEN_DTYPE, VALUE_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, Coordinates, StepReport, Trajectory

# Rounding of one machine's float32 against another's.
_ADVANTAGE_TOLERANCE = 1e-5


def training_batch(
    report: StepReport,
    batch: Batch,
    trajectories: Sequence[Trajectory],
    *,
    rules: BatchRules,
    over_budget: OverBudget,
    budget: int,
    task: SignalSource,
) -> TrainingBatch:
    """What the trainer was given for `report.version`. `over_budget`, `budget`: what became of samples above S in asynchronous mode.

    Raises UserError if the report's rewards do not give its advantages, or its columns do not fit together.
    """
    version = report.version - 1
    groups = _groups(batch, trajectories, version, over_budget, budget)
    formed = form_batch(groups, version, report.reward_terms, rules, task)
    own, reported = (np.frombuffer(columns.advantages, LOGPROB_DTYPE) for columns in (formed.columns, batch))
    if not np.allclose(own, reported, rtol=_ADVANTAGE_TOLERANCE, atol=_ADVANTAGE_TOLERANCE):
        raise UserError(
            f"The rewards in the report of version {report.version} do not give the advantages that stand beside them.",
            hint="Are [learner] scale_by_std and std as they were when the run was trained?",
        )
    return replace(
        formed.training,
        order=np.frombuffer(batch.order, TOKEN_DTYPE),
        micro_batch_sizes=np.frombuffer(batch.micro_batches, TOKEN_DTYPE),
        update_sizes=np.frombuffer(batch.updates, TOKEN_DTYPE),
    )


def _groups(
    batch: Batch, trajectories: Sequence[Trajectory], version: int, over_budget: OverBudget, budget: int
) -> tuple[ChosenGroup, ...]:
    values = {column.name: np.frombuffer(column.values, VALUE_DTYPE).tolist() for column in batch.rewards}
    defaulted = {column.name: np.frombuffer(column.defaulted, FLAG_DTYPE).tolist() for column in batch.rewards}
    samples = [
        ChosenSample(
            member=Member(
                where=Coordinates(partition=partition, offset=offset),
                trajectory=trajectory,
                scores={name: Score(value=values[name][row], defaulted=bool(defaulted[name][row])) for name in values},
            ),
            staleness=age_of(trajectory, version),
            weight=weight_of(age_of(trajectory, version), over_budget, budget),
        )
        for row, ((partition, offset), trajectory) in enumerate(zip(places_of(batch), trajectories, strict=True))
    ]
    groups, start = [], 0
    for size in np.frombuffer(batch.group_sizes, TOKEN_DTYPE).tolist():
        members = tuple(samples[start : start + size])
        groups.append(ChosenGroup(seq=members[0].member.trajectory.seq, samples=members, dropped={}))
        start += size
    return tuple(groups)
