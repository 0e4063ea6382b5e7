"""The examples that the demo's models practise before a run, and the tokens they are written with.

An example is a conversation: prompts and answers in turn. Only the last answer is practised, because an earlier one may have failed. Does
not need torch.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_tasks.answers import CLOSING, OPENING
from echo_tasks.digits import END_OF_PROMPT, NUM_DIGITS, ReverseDigits, SortDigits
from echo_tasks.sokoban.board import SYMBOLS, Move, drawn, inside, moved
from echo_tasks.sokoban.episode import SEPARATOR
from echo_tasks.sokoban.generator import search_back, solution
from echo_tasks.sokoban.task import Sokoban

SOKOBAN_OPTIONS: Mapping[str, object] = {
    "size": [5, 5],
    "boxes": 1,
    "moves": [1, 6],
    "floor": [0.7, 1.0],
    "rounds": 2,
    "actions_per_round": 8,
    "reward": "success",
    "style": "board",
}
"""The boards of the demo."""
KNIGHTS_KNAVES_OPTIONS: Mapping[str, object] = {"n_people": 2, "depth_constraint": 2, "width_constraint": 2, "style": "brief"}
"""The puzzles of the demo."""
# Runs have seeds from 0 on, so they do not ask what was practised.
_SEED = -1
_NUM_PUZZLES = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Practice:
    """How a model practises a task. `tokens`: of its texts; `pattern`: finds them, longest first; `example(rng)`: a conversation, prompts
    and answers in turn; `target`: practise until an answer has this probability.
    """

    tokens: Sequence[str]
    pattern: str
    example: Callable[[random.Random], Sequence[str]]
    target: float

    def split(self, text: str) -> list[str]:
        """The tokens of `text`."""
        return re.findall(self.pattern, text, re.DOTALL)


def _digits(answer: Callable[[str], str]) -> Practice:
    def example(rng: random.Random) -> Sequence[str]:
        digits = "".join(rng.choices("0123456789", k=NUM_DIGITS))
        return digits + END_OF_PROMPT, answer(digits)

    return Practice(tokens=(*"0123456789", END_OF_PROMPT, *"+=:"), pattern=".", example=example, target=0.17)


def _sokoban() -> Practice:
    task = Sokoban(**SOKOBAN_OPTIONS)  # type: ignore[arg-type]
    between = f" {SEPARATOR} "

    def answer(moves: Sequence[Move]) -> str:
        return f"{OPENING}{between.join(moves)}{CLOSING}"

    def example(rng: random.Random) -> Sequence[str]:
        level = task.level(_SEED, rng.randrange(_NUM_PUZZLES))
        room, state = level.room, level.state
        shown = inside(drawn(room, state)) + "\n"
        if rng.random() < 0.5:
            return shown, answer(level.solution)
        plan = search_back(room, max_moves=task.recipe.max_moves)
        tried = rng.choices(list(Move), k=rng.randint(1, task.actions_per_round))
        for move in tried:
            if not room.is_solved(state):
                state = moved(room, state, room.deltas()[move])
        if room.is_solved(state) or state not in plan:
            return shown, answer(level.solution)
        return shown, answer(tried), inside(drawn(room, state)) + "\n", answer(list(solution(plan, state)))

    # An action is one token with what separates it from the one before.
    words = (OPENING, CLOSING, *(between + move for move in Move), *Move)
    pattern = "|".join(re.escape(word) for word in words) + "|."
    return Practice(tokens=(*words, *SYMBOLS, "\n"), pattern=pattern, example=example, target=0.2)


def _knights_knaves() -> Practice:
    from echo_tasks.knights_knaves import KnightsKnaves

    task = KnightsKnaves(**KNIGHTS_KNAVES_OPTIONS)  # type: ignore[arg-type]

    def example(rng: random.Random) -> Sequence[str]:
        prompt = task.prompt(_SEED, rng.randrange(_NUM_PUZZLES))
        return prompt.text, "".join(name + role for name, role in prompt.entry["roles"].items())

    return Practice(tokens=tuple("AB:;?()!&|>=+-"), pattern=".", example=example, target=0.5)


PRACTICES: Mapping[str, Callable[[], Practice]] = {
    "reverse": lambda: _digits(ReverseDigits().answer),
    "sort": lambda: _digits(SortDigits().answer),
    "sokoban": _sokoban,
    "knights-knaves": _knights_knaves,
}
"""By the name that `tiny_qwen3` is asked for."""
