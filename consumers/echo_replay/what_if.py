"""A run under other rewards: their values for its samples, and the comparison of weights on held-out prompts.

The answers stay those of the run's own policy; only their rewards change. So a few steps show the direction of the training. The further
the weights move, the less these answers are those that they would give.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from echo_bus.clock import SystemClock
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.evaluation.requests import Planned
from echo_replay.batches import OtherRewards
from echo_replay.history import History
from echo_replay.selection import Selection, Steps
from echo_rollout.engines.engine import Engine, Snapshot, SnapshotRef
from echo_rollout.generation import GroupPrompt, GroupSampler, Sample
from echo_schemas.errors import UserError
from echo_schemas.records import RewardTerm
from echo_settings.sections import ScoringSettings
from echo_streams.metrics import StreamsMetrics
from echo_streams.scoring import Attached, Scorer
from echo_tasks.prompts import ChatCodec
from echo_tasks.rewards import ScoredSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One reward over held-out prompts: the mean of the prompts' means, its standard error, and the number of samples without a value."""

    name: str
    mean: float
    stderr: float
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the base model and the run: token ids are below `vocabulary`, an episode has at most `max_length` tokens, one answer at
    most `max_turn_tokens`."""

    vocabulary: int
    max_length: int
    max_turn_tokens: int | None = None


def read_other_rewards(history: History, steps: range, terms: tuple[RewardTerm, ...]) -> OtherRewards:
    """The values of `terms` in the log, for the samples of some steps. Raises UserError if the log has no such step, TransportError."""
    names = {term.name for term in terms}
    values = {
        (record.where.partition, record.where.offset): {name: value for name, value in record.rewards.items() if name in names}
        for record in history.undecoded(Selection(range=Steps(steps.start, steps.stop - 1)))
    }
    return OtherRewards(terms=terms, values=values)


async def measure(
    engine: Engine,
    weights: Sequence[SnapshotFiles],
    planned: Planned,
    rewards: Sequence[Attached],
    codec: ChatCodec,
    *,
    limits: ModelLimits,
) -> list[list[Measured]]:
    """Every reward of each of `weights` on the prompts of an evaluation. Starts and closes `engine`. Raises EngineError, UserError for an
    impossible prompt or answer."""
    scorer = Scorer(
        rewards, run_id="", limits=ScoringSettings(timeout_s=planned.spec.patience_s), metrics=StreamsMetrics(), clock=SystemClock()
    )
    found: list[list[Measured]] = []
    await engine.start()
    try:
        opened = GroupSampler(
            engine, planned.task, codec, vocabulary=limits.vocabulary, on_empty=lambda: None, max_turn_tokens=limits.max_turn_tokens
        )
        with closing(opened) as sampler:
            for number, files in enumerate(weights):
                await engine.install(Snapshot(ref=SnapshotRef(version=number, sha256=files.sha256), kind=files.kind, folder=files.folder))
                prompts = [_prompt(planned, index, codec, limits.max_length) for index in range(planned.spec.prompts)]
                groups = await asyncio.gather(*(sampler.sample(prompt) for _, prompt in prompts))
                samples = [
                    [_scored(text, prompt, sample, planned) for sample in group]
                    for (text, prompt), group in zip(prompts, groups, strict=True)
                ]
                found.append([await _measured(scorer, entry, samples) for entry in rewards])
    finally:
        await engine.close()
    return found


def _prompt(planned: Planned, index: int, codec: ChatCodec, max_length: int) -> tuple[str, GroupPrompt]:
    try:
        prompt = planned.task.prompt(planned.spec.seed, index)
    except Exception as exc:  # a task is the user's code and may raise anything
        raise UserError(f"The task {planned.spec.task!r} has no prompt {index}: {type(exc).__name__}: {exc}") from exc
    text = codec.render(prompt.messages) if prompt.messages else prompt.text
    given = GroupPrompt(
        token_ids=codec.encode(text),
        entry=dict(prompt.entry),
        sampling=planned.spec.sampling,
        group_size=planned.spec.samples,
        max_length=max_length,
        messages=tuple(prompt.messages),
    )
    return text, given


def _scored(text: str, prompt: GroupPrompt, sample: Sample, planned: Planned) -> ScoredSample:
    return ScoredSample(
        prompt=text if sample.prompt is None else sample.prompt,
        completion=sample.completion,
        entry=prompt.entry,
        token_ids=sample.token_ids,
        num_generated=sum(span.end - span.start for span in sample.generated),
        turn_rewards=sample.turn_rewards,
        finish_reason=sample.finish_reason,
        metadata={},
        task=planned.task.name,
    )


async def _measured(scorer: Scorer, entry: Attached, groups: Sequence[Sequence[ScoredSample]]) -> Measured:
    judgements = await scorer.judge_together(entry, [sample for group in groups for sample in group])
    means, num_failed, at = [], 0, 0
    for group in groups:
        values = [each.value for each in judgements[at : at + len(group)] if each.value is not None]
        num_failed += len(group) - len(values)
        at += len(group)
        if values:
            means.append(statistics.fmean(values))
    if not means:
        return Measured(name=entry.name, mean=math.nan, stderr=math.nan, num_failed=num_failed)
    stderr = float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan
    return Measured(name=entry.name, mean=statistics.fmean(means), stderr=stderr, num_failed=num_failed)
