"""A task: prompts without end, an environment if it takes turns, and signals for the learner.

These are the three duties of a task adapter in ECHO-2 (§3): format prompts, judge answers, turn metadata into learner signals. Judging is a
reward function (`rewards`), because a reward may come from a process of its own, and later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from echo_schemas.records import ChatMessage, Trajectory

Entry = Mapping[str, Any]
"""The task's own JSON about one prompt: reference answer, seed, difficulty; part of the request and the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Either `messages` in chat form, or `text` for the tokenizer."""

    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    entry: Entry = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.text):
            message = "A prompt has either messages or text, not both and not neither."
            raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The environment's text before the policy acts. Its tokens are never trained."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one action. `observation` is shown next, unless `done`."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. If it has a method `close`, that is called when the episode is over, however it ended."""

    def reset(self) -> Observation:
        """The first observation; empty if the prompt holds everything."""

    def step(self, action: str) -> Turn:
        """Act."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """How the learner trains on a trajectory. `mask` bool [G]: generated tokens to train on, None: all; `weights` float32 [G]: factors of
    their advantages, None: 1.
    """

    mask: npt.NDArray[np.bool_] | None = None
    weights: npt.NDArray[np.float32] | None = None


ALL_TOKENS = Signals()
"""Train every generated token alike."""


class Task(Protocol):
    """A source of prompts. `name` is what configuration and records call it; `rewards` are the reward names it suggests."""

    name: str
    rewards: Sequence[str]

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The prompt of `seq`: a pure function, defined for every seq ≥ 0, so that any restart gets the same one."""

    def environment(self, entry: Entry) -> Environment | None:
        """The episode of a prompt; None for a task of a single turn."""

    def signals(self, trajectory: Trajectory) -> Signals:
        """How the learner trains on a trajectory."""


class AllTokens:
    """A task's base: every generated token is trained alike."""

    def signals(self, trajectory: Trajectory) -> Signals:
        del trajectory
        return ALL_TOKENS


class SingleTurn(AllTokens):
    """A task's base: no environment, every generated token trained."""

    def environment(self, entry: Entry) -> Environment | None:
        del entry
        return None


def reads_texts(task: Task) -> bool:
    """Whether the task's `signals` may look at the texts of a trajectory."""
    return getattr(type(task), "signals", None) is not AllTokens.signals
