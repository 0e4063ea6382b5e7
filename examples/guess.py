"""A task around an environment in the gym's form. `echoswarm up --config examples/guess.toml`, with your own model in [policy] base."""

from __future__ import annotations

import random
from typing import Any

from echo_tasks.environments import GymTask


class HiddenNumber:
    """An environment as gymnasium has them: a number is hidden, and each guess is told whether it is too low or too high."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.hidden = random.Random(seed).randint(1, 20)
        return "I think of a number from 1 to 20.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == self.hidden:
            return "Right.", 1.0, True, False, {}
        return ("Too low." if action < self.hidden else "Too high."), -0.1, False, False, {}


class Guess(GymTask):
    """The task: ten lines."""

    name = "guess"
    rules = "Guess my number. Write each guess like this: <answer>7</answer>"
    max_turns = 6
    bad_answer = -0.2

    def make(self) -> Any:
        return HiddenNumber()

    def act(self, answer: str) -> Any:
        if not answer.isdecimal():
            raise ValueError("Write a number between the tags.")
        return int(answer)
