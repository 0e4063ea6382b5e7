"""Any environment with `reset` and `step` as a task: gymnasium's, the old gym's, a synchronous OpenEnv client, or one's own class.

    class Guess(GymTask):
        name = "guess"
        rules = "I think of a number below 100. Guess it: <answer>50</answer>"

        def make(self) -> Any:
            return GuessEnvironment(below=100)

        def act(self, answer: str) -> Any:
            return int(answer)

The results of `step` are recognised by their form: (observation, reward, terminated, truncated, info), (observation, reward, done, info),
or an object with `observation`, `reward` and `done` (or `terminated`, `truncated`).
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from echo_schemas.records import ChatMessage
from echo_tasks.answers import final_answer
from echo_tasks.task import AllTokens, Entry, Observation, Prompt, Turn

# gymnasium takes any whole number from 0 on, others a signed number of 32 bits.
_SEED_BITS = 31


class UnknownForm(TypeError):
    """The environment returned a result of no known form."""


class GymTask(AllTokens):
    """The base of a task around an environment. Set `name` and `rules`, write `make` and `act`; the rest can stay.

    `rules`: the first message to the policy. `max_turns`: an episode ends after so many answers. `bad_answer`: the reward of an answer
    that `act` refuses. `is_chat` False: the prompt is the rules as text, for a model without a chat template.
    """

    name: str
    rules: str
    rewards: Sequence[str] = ("return",)
    max_turns: int = 20
    bad_answer: float = 0.0
    is_chat: bool = True

    def make(self) -> Any:
        """A new environment, for one episode. It runs on a thread and may take its time; `close` is called if it has one."""
        raise NotImplementedError

    def act(self, answer: str) -> Any:
        """The action that an answer means. Raise ValueError, with what to say to the policy, for one that means none."""
        return answer

    def show(self, observation: Any) -> str:
        """An observation as the policy sees it."""
        return str(observation)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The rules; the entry holds the `seed` that the environment is reset with, another one for each (seed, seq)."""
        digest = hashlib.sha256(f"{self.name}/{seed}/{seq}".encode()).digest()
        entry = {"seed": int.from_bytes(digest[:4], "big") >> (32 - _SEED_BITS)}
        if self.is_chat:
            return Prompt(messages=(ChatMessage(role="user", content=self.rules),), entry=entry)
        return Prompt(text=self.rules, entry=entry)

    def environment(self, entry: Entry) -> GymEpisode:
        """The episode of a prompt. Nothing is made before it is reset."""
        return GymEpisode(self, int(entry["seed"]))


class GymEpisode:
    """One episode of a task's environment. Called from threads, one call at a time."""

    def __init__(self, task: GymTask, seed: int) -> None:
        self._task = task
        self._seed = seed
        self._environment: Any = None
        self._turns = 0

    def reset(self) -> Observation:
        """Make the environment and reset it, with the seed if it takes one. Raises what it raises."""
        self._environment = self._task.make()
        reset = self._environment.reset
        result = reset(seed=self._seed) if _takes_seed(reset) else reset()
        return Observation(text=self._task.show(_first_observation(result)))

    def step(self, action: str) -> Turn:
        """Act as the text's final answer says: between its last tags, or all of it. Raises UnknownForm, and what the environment raises."""
        self._turns += 1
        is_last = self._turns >= self._task.max_turns
        try:
            meant = self._task.act(final_answer(action))
        except ValueError as exc:
            return Turn(observation=f"{exc}", reward=self._task.bad_answer, done=is_last, info={"refused": True})
        observation, reward, done, info = _read_step(self._environment.step(meant))
        return Turn(observation=self._task.show(observation), reward=_number(reward), done=done or is_last, info=info)

    def close(self) -> None:
        """Close the environment, if it was made and can be closed."""
        environment, self._environment = self._environment, None
        if callable(getattr(environment, "close", None)):
            environment.close()


def _takes_seed(reset: Any) -> bool:
    try:
        parameters = inspect.signature(reset).parameters.values()
    except (TypeError, ValueError):
        # A function written in C, for example, has no signature.
        return False
    return any(parameter.name == "seed" or parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def _first_observation(result: Any) -> Any:
    """gymnasium returns (observation, info), OpenEnv an object with `observation`, the old gym the observation."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        return result[0]
    return getattr(result, "observation", result)


def _read_step(result: Any) -> tuple[Any, Any, bool, Mapping[str, Any]]:
    """Observation, reward, whether the episode is over, and info."""
    if isinstance(result, tuple) and len(result) in {4, 5}:
        observation, reward, *endings, info = result
        return observation, reward, any(endings), info if isinstance(info, Mapping) else {}
    endings = [getattr(result, name) for name in ("done", "terminated", "truncated") if hasattr(result, name)]
    if hasattr(result, "observation") and hasattr(result, "reward") and endings:
        return result.observation, result.reward, any(endings), {}
    kind = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    raise UnknownForm(
        f"step() returned {kind}, not (observation, reward, terminated, truncated, info), (observation, reward, done, info) or an object "
        "with observation, reward and done."
    )


def _number(reward: Any) -> float:
    """A reward as a finite number; OpenEnv returns None while there is none."""
    value = 0.0 if reward is None else float(reward)
    if not math.isfinite(value):
        raise UnknownForm(f"step() returned the reward {value}.")
    return value
