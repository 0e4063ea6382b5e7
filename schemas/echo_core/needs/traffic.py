"""Bytes of a step on each topic, and the brokers' disk until retention. Pure. Before compression: lz4 reduces texts to a half or a third.

Sizes are those of the records: 4 bytes a token, 4 a log-probability, a sample's texts beside its tokens; a step's report has some 30 bytes
for each sample and 9 for each of its rewards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TOKEN_TEXT_BYTES = 4
"""Of a token as text: English has about four characters."""
# Names, versions, times, headers and the record's frame, measured on encoded records of runs.
_TRAJECTORY, _REWARD, _REQUEST, _REPORT, _MANIFEST = 700, 400, 500, 6_000, 2_000
_SAMPLE_IN_REPORT, _REWARD_IN_REPORT, _GROUP_IN_REPORT = 32, 9, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTraffic:
    """A step's records. `snapshot_bytes`: of one publication; `through_log`: whether its bytes go to the log, not to a store."""

    groups: int
    group_size: int
    prompt_tokens: float
    answer_tokens: float
    rewards: int
    publication_period: int
    snapshot_bytes: int
    through_log: bool


def bytes_per_step(step: StepTraffic) -> dict[str, float]:
    """By topic, of one copy.

    128 groups of 16, prompts of 256 tokens and answers of 4096, one reward, 16.4 GB every second step: trajectories 2048 · (8 · 4096 + 4 ·
    256 + 4 · 4352 + 700) = 106 MB, rewards 0.8 MB, requests 0.2 MB, steps 0.1 MB, and 8.2 GB of weights."""
    samples = step.groups * step.group_size
    text = TOKEN_TEXT_BYTES * (step.prompt_tokens + step.answer_tokens)
    weights = step.snapshot_bytes / step.publication_period
    return {
        "requests": step.groups * (_REQUEST + TOKEN_TEXT_BYTES * step.prompt_tokens),
        "trajectories": samples * (_TRAJECTORY + 4 * step.prompt_tokens + 8 * step.answer_tokens + text),
        "rewards": samples * step.rewards * _REWARD,
        "steps": _REPORT + samples * (_SAMPLE_IN_REPORT + _REWARD_IN_REPORT * step.rewards) + step.groups * _GROUP_IN_REPORT,
        "weights": _MANIFEST / step.publication_period,
        "weights.chunks": weights if step.through_log else 0.0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """The retention of a topic. `hours`, `bytes`: of all partitions; None: no limit of that kind. `is_compacted`: only the newest record of
    each key is kept."""

    hours: float | None
    bytes: float | None
    is_compacted: bool = False


def kept_bytes(traffic: Mapping[str, float], retentions: Mapping[str, Retention], *, step_s: float, steps: int) -> dict[str, float]:
    """By topic, of one copy: the bytes that a run of `steps` steps leaves there under its retention.

    106 MB a step of 1631 s, kept for 168 h: 371 steps, 39 GB, of a run of 200 steps 21 GB."""
    found = {}
    for topic, num_bytes in traffic.items():
        kept = retentions[topic]
        within = steps if kept.hours is None else min(steps, kept.hours * 3600 / step_s)
        found[topic] = num_bytes if kept.is_compacted else min(num_bytes * within, float("inf") if kept.bytes is None else kept.bytes)
    return found
