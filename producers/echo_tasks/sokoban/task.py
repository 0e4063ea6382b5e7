"""The task: boards without end, as a conversation for a chat model or as bare boards for a tiny one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from echo_schemas.errors import UserError
from echo_schemas.records import ChatMessage
from echo_tasks.options import name_of, whole_number
from echo_tasks.sokoban.board import SYMBOLS, Move, drawn, inside, read_board
from echo_tasks.sokoban.episode import SHAPED, SUCCESS, Payoff, SokobanEpisode
from echo_tasks.sokoban.generator import LARGEST_SIDE, Level, Recipe, make_level
from echo_tasks.task import AllTokens, Entry, Prompt

_PAYOFFS: Mapping[str, Payoff] = {"shaped": SHAPED, "success": SUCCESS}
_STYLES = ("chat", "board")


class Sokoban(AllTokens):
    """Push all boxes onto targets within a few rounds. The options' defaults are ECHO's configuration (`LargerSokoban6`)."""

    name = "sokoban"
    rewards: Sequence[str] = ("return",)

    def __init__(
        self,
        *,
        size: Sequence[int] = (6, 6),
        boxes: int = 2,
        moves: Sequence[int] = (1, 20),
        floor: Sequence[float] = (0.5, 0.9),
        rounds: int = 4,
        actions_per_round: int = 25,
        reward: str = "shaped",
        style: str = "chat",
    ) -> None:
        """`size`: width and height, walls included. `moves`: fewest and most moves of a board's shortest solution (ECHO's search depth is
        20). `floor`: share of inner cells without a wall, from and to. `reward`: `shaped` or `success`. `style`: `chat` gives messages,
        `board` the bare board within its outer walls, for a model that knows only boards. Raises UserError for options that make no board.
        """
        (width, height), (min_moves, max_moves), (low, high) = _pair("size", size), _pair("moves", moves), _pair("floor", floor)
        self.recipe = Recipe(
            width=whole_number("size", width, least=4, most=LARGEST_SIDE),
            height=whole_number("size", height, least=4, most=LARGEST_SIDE),
            boxes=whole_number("boxes", boxes, least=1),
            min_moves=whole_number("moves", min_moves, least=1, most=max_moves),
            max_moves=whole_number("moves", max_moves, least=1),
            floor=(low, high),
        )
        self.rounds = whole_number("rounds", rounds, least=1)
        self.actions_per_round = whole_number("actions_per_round", actions_per_round, least=1)
        self._payoff = _PAYOFFS[name_of("reward", reward, _PAYOFFS)]
        self._is_chat = name_of("style", style, _STYLES) == "chat"
        # Options without a board fail here, not at the first request.
        self.level(0, 0)

    def level(self, seed: int, seq: int) -> Level:
        """The board of (seed, seq) with a shortest solution; the same on every machine."""
        return make_level(random.Random(f"{self.name}/{seed}/{seq}"), self.recipe)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The rules and the board; the entry holds the `board` and `moves`, the length of its shortest solution."""
        level = self.level(seed, seq)
        board = drawn(level.room, level.state)
        entry = {"board": board, "moves": len(level.solution)}
        if not self._is_chat:
            return Prompt(text=self._shown(1, board), entry=entry)
        return Prompt(messages=(ChatMessage(role="user", content=f"{self._rules()}\n\n{self._shown(1, board)}"),), entry=entry)

    def environment(self, entry: Entry) -> SokobanEpisode:
        """An episode on the entry's board. Raises ValueError if that is none."""
        room, state = read_board(str(entry["board"]))
        return SokobanEpisode(
            room, state, rounds=self.rounds, actions_per_round=self.actions_per_round, payoff=self._payoff, show=self._shown
        )

    def _rules(self) -> str:
        symbols = ", ".join(f"{symbol} {meaning}" for symbol, meaning in SYMBOLS.items())
        return (
            "You are solving a Sokoban puzzle. Push every box onto a target. You push a box by walking into it from the opposite side; you "
            "cannot pull a box, nor push it through a wall or through another box.\n"
            f"Symbols: {symbols}.\n"
            f"Actions: {', '.join(Move)}.\n"
            f"You have {self.rounds} turns of at most {self.actions_per_round} actions. End each answer with your actions in order, "
            "separated by ||, in this form: <answer>Right || Right || Up</answer>"
        )

    def _shown(self, number: int, board: str) -> str:
        """The text before answer `number`."""
        return f"Turn {number} of {self.rounds}:\n{board}" if self._is_chat else f"{inside(board)}\n"


def _pair(name: str, value: Any) -> tuple[Any, Any]:
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2 or not all(isinstance(v, int | float) for v in value):
        raise UserError(f"[task.options] {name} = {value!r} is not two numbers.", hint=f"Write it as {name} = [a, b].")
    return value[0], value[1]
