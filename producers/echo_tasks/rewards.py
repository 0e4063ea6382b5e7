"""Reward functions: plain functions, sync, async or over batches, with a name and a version.

    @reward(name="brevity", version="1")
    def brevity(sample: ScoredSample) -> float:
        return 1.0 / (1 + len(sample.completion))

A function is named by where it can be imported from (`origin`), so that other processes can find it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from echo_schemas.converters import maker_of
from echo_schemas.entry import parse_entry
from echo_schemas.records import FinishReason, Trajectory

COST, CACHED = "cost_usd", "cached"
"""Components in which a function reports the cost of a sample, in US dollars, and (1) that a cache answered it, at no cost."""


class RewardKind(StrEnum):
    """How a function is called: with one sample, awaited with one sample, or with a list of them."""

    SYNC = "sync"
    ASYNC = "async"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A value with the parts it was made of."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredSample:
    """A trajectory as reward functions see it. `token_ids` int32 [T], prompt included; `num_generated` of them were generated."""

    prompt: str
    completion: str
    entry: Mapping[str, Any]
    token_ids: npt.NDArray[np.int32]
    num_generated: int
    turn_rewards: tuple[float, ...]
    finish_reason: FinishReason
    metadata: Mapping[str, str]
    task: str


_make_sample = maker_of(ScoredSample)


def sample_of(trajectory: Trajectory) -> ScoredSample:
    """The sample of a record; changes to it do not change the record. Raises ValueError if its entry is no JSON object."""
    entry = parse_entry(trajectory.entry)
    return _make_sample(
        prompt=trajectory.prompt,
        completion=trajectory.completion,
        entry=entry,
        token_ids=trajectory.tokens,
        num_generated=trajectory.num_generated,
        turn_rewards=trajectory.turn_rewards,
        finish_reason=trajectory.finish_reason,
        metadata=dict(trajectory.metadata),
        task=trajectory.task,
    )


Value = float | RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunction:
    """A reward function and its properties.

    `timeout_s` None: the application's. `origin`: where it can be imported from. `isolated`: it only runs in a scoring process, where a
    call that hangs can be ended. `at_timeout`: the value of a sample whose call had to be ended, or whose process died of it; None: it has
    none. `repeatable`: the same sample gets the same value at any time.
    """

    name: str
    version: str
    kind: RewardKind
    call: Callable[..., Any]
    timeout_s: float | None = None
    origin: str = ""
    isolated: bool = False
    at_timeout: float | None = None
    repeatable: bool = True

    def __call__(self, sample: Any) -> Any:
        """The function itself, so that a decorated one is still called as before."""
        return self.call(sample)


def reward(
    *,
    name: str,
    version: str = "1",
    timeout_s: float | None = None,
    batch: bool = False,
    isolated: bool = False,
    at_timeout: float | None = None,
    repeatable: bool = True,
) -> Callable[[Callable[..., Any]], RewardFunction]:
    """Make a reward of a function. `batch`: it takes a list of samples and returns as many values; the others as in `RewardFunction`."""

    def decorate(function: Callable[..., Any]) -> RewardFunction:
        kind = RewardKind.BATCH if batch else RewardKind.ASYNC if inspect.iscoroutinefunction(function) else RewardKind.SYNC
        origin = f"{function.__module__}:{function.__qualname__}"
        return RewardFunction(
            name=name,
            version=version,
            kind=kind,
            call=function,
            timeout_s=timeout_s,
            origin=origin,
            isolated=isolated,
            at_timeout=at_timeout,
            repeatable=repeatable,
        )

    return decorate


@reward(name="exact")
def exact(sample: ScoredSample) -> float:
    """1 if the completion, white space around it left out, is the entry's `answer`; else 0."""
    return float(sample.completion.strip() == str(sample.entry["answer"]).strip())


@reward(name="return")
def turn_return(sample: ScoredSample) -> float:
    """The sum of an episode's turn rewards; 0 for a single turn."""
    return float(sum(sample.turn_rewards))
