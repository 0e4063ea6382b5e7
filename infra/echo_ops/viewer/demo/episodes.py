"""Episodes of real tasks, played by a scripted policy; more skill means fewer errors. Rewards and observations are the task's own."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo_tasks.catalogue import load_task
from echo_tasks.sokoban import Sokoban
from echo_tasks.sokoban.board import Move
from echo_tasks.task import Prompt, Task

_PIECE = re.compile(r"\s*\S+|\s+")
_MOST_TURNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """`answers[i]` is followed by `observations[i]`, the last one by nothing. `rewards`: of each turn."""

    entry: str
    prompt: str
    answers: tuple[str, ...]
    observations: tuple[str, ...]
    rewards: tuple[float, ...]


Play = Callable[[int, float, random.Random], Episode]
"""An answer to the prompt of a seq by a policy of some skill between 0 and 1."""


class Words:
    """A tokenizer that adds new words: a token is a word with the white space before it."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: list[str] = []

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; their texts joined are `text`."""
        found = []
        for word in _PIECE.findall(text):
            if word not in self._ids:
                self._ids[word] = len(self._words)
                self._words.append(word)
            found.append(self._ids[word])
        return found

    def pieces(self, ids: list[int]) -> list[str]:
        return [self._words[token] for token in ids]


def sokoban_player() -> tuple[dict[str, object], Play]:
    """The options of a task with one box, and its player, which follows the shortest solution with random errors."""
    options: dict[str, object] = {"size": [6, 6], "boxes": 1, "moves": [3, 8], "rounds": 2, "actions_per_round": 10}
    task = Sokoban(**options)  # type: ignore[arg-type]  # as a run's file has them

    @functools.lru_cache(maxsize=1)
    def asked(seq: int) -> tuple[Prompt, tuple[Move, ...]]:
        # Finding a board takes milliseconds, and all samples of a group have the same one.
        return task.prompt(0, seq), task.level(0, seq).solution

    def play(seq: int, skill: float, rng: random.Random) -> Episode:
        prompt, solution = asked(seq)
        plan = [move if rng.random() < skill else rng.choice(list(Move)) for move in solution]
        said = ["The box must go to the target.", "I walk around it first.", "Now I push."]
        answers = [f"{rng.choice(said)} <answer>{' || '.join(plan)}</answer>" if rng.random() < 0.4 + 0.6 * skill else "I see no way."]
        answers.append(f"Again. <answer>{' || '.join(rng.choices(list(Move), k=4))}</answer>")
        return _played(task, prompt, answers)

    return options, play


def kuhn_player() -> tuple[dict[str, object], Play]:
    """Hands of Kuhn poker: with skill the King bets and the Jack folds."""
    task = load_task("kuhn-poker")

    def play(seq: int, skill: float, rng: random.Random) -> Episode:
        prompt = task.prompt(0, seq)
        card = prompt.entry["cards"][prompt.entry["seat"]]
        wise = {0: ["Check", "Fold"], 1: ["Check", "Call"], 2: ["Bet", "Call"]}[card]
        actions = wise if rng.random() < skill else rng.choices(["Bet", "Check", "Call", "Fold", "All the chips"], k=2)
        return _played(task, prompt, [f"I hold a card. <answer>{action}</answer>" for action in actions])

    return {}, play


def _played(task: Task, prompt: Prompt, answers: Sequence[str]) -> Episode:
    environment = task.environment(prompt.entry)
    assert environment is not None, "the tasks of the demo take turns"
    environment.reset()
    given: list[str] = []
    seen: list[str] = []
    rewards: list[float] = []
    for number in range(_MOST_TURNS):
        given.append(answers[min(number, len(answers) - 1)])
        turn = environment.step(given[-1])
        rewards.append(turn.reward)
        seen.append(turn.observation)
        if turn.done:
            break
    text = prompt.text or "\n\n".join(message.content for message in prompt.messages)
    return Episode(
        entry=json.dumps(dict(prompt.entry)), prompt=text, answers=tuple(given), observations=tuple(seen), rewards=tuple(rewards)
    )  # fmt: skip
