"""What a task is: prompts without end, an environment if it takes turns, and what its metadata means to the learner.

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
"""The task's own JSON about one prompt: reference answer, seed, difficulty; travels with the request and the trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked: `messages` in chat form, or `text` for the tokenizer as it is; exactly one of them."""

    messages: tuple[ChatMessage, ...] = ()
    text: str = ""
    entry: Entry = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.text):
            message = "A prompt has either messages or text, not both and not neither."
            raise ValueError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment shows before the policy acts. Its tokens are never trained."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one action led to. `observation` is shown next, unless `done`."""

    observation: str
    reward: float
    done: bool
    info: Mapping[str, Any] = field(default_factory=dict)


class Environment(Protocol):
    """One episode. If it has a method `close`, that is called when the episode is over, however it ended."""

    def reset(self) -> Observation:
        """The first observation; empty text if the prompt says it all."""

    def step(self, action: str) -> Turn:
        """Act."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """What the learner makes of a trajectory. `mask` bool [G]: generated tokens to train on; `weights` float32 [G]: factors of their
    advantages. None: all, and 1.
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
        """The prompt of `seq`: a pure function, defined for every seq ≥ 0, so that it can be asked again after any restart."""

    def environment(self, entry: Entry) -> Environment | None:
        """The episode of a prompt; None for a task of a single turn."""

    def signals(self, trajectory: Trajectory) -> Signals:
        """What the learner trains of a trajectory."""


class AllTokens:
    """A task's base: every generated token is trained alike."""

    def signals(self, trajectory: Trajectory) -> Signals:
        """All tokens alike."""
        del trajectory
        return ALL_TOKENS


class SingleTurn(AllTokens):
    """A task's base: no environment, every generated token trained."""

    def environment(self, entry: Entry) -> Environment | None:
        """None: one prompt, one answer."""
        del entry
        return None


def reads_texts(task: Task) -> bool:
    """Whether the task's `signals` may look at the texts of a trajectory."""
    return getattr(type(task), "signals", None) is not AllTokens.signals
