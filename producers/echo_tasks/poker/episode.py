"""One hand as an episode in ECHO-2's form (appendix D): a state in words, an action in words, the change of the player's chips as reward.

Every text is an answer with a defined outcome: a text without an action counts as the cheapest legal one (check, else fold) and costs the
penalty.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from echo_tasks.answers import tagged
from echo_tasks.task import Observation, Turn

FORM = "Always end with your action in this form: <answer>ACTION</answer>"
# The longest action, with generous white space; longer text is no action.
_MAX_ACTION = 64
_ACTION = re.compile(r"(fold|check|call|bet|raise|all[- ]?in)(?:\s+(?:to\s+)?([0-9]{1,9}|min|half[- ]pot|pot|max))?[.!]?")


class AnswerKind(StrEnum):
    """How an answer was understood."""

    FINE = "fine"
    ADJUSTED = "adjusted"
    """Not possible as said, but its meaning is clear: a raise beyond the limits, a call or a fold with nothing to pay. No penalty."""
    ILLEGAL = "illegal"
    """An action that the rules forbid here, such as a check when there is a bet to pay."""
    NO_ANSWER = "no_answer"
    UNKNOWN_ACTION = "unknown_action"


PENALISED = frozenset({AnswerKind.ILLEGAL, AnswerKind.NO_ANSWER, AnswerKind.UNKNOWN_ACTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class WordedAction:
    """An action in words: `verb` is fold, check, call, raise or all-in; `amount` follows it: digits or a named size."""

    verb: str
    amount: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The table as the player at `seat` sees it, for a picture. `stacks`: chips left, seat by seat; `said`: the betting."""

    hand: tuple[str, ...]
    board: tuple[str, ...]
    pot: int
    seat: int
    stacks: tuple[int, ...]
    said: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Hand(Protocol):
    """A hand of cards, seen from one player's seat; whenever it is not over, that player is to act."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left for the player to decide."""

    @property
    def net(self) -> float:
        """The player's chips against those before the hand: chips in the pot count as lost until the hand is won."""

    def shown(self) -> str:
        """The state in words, as far as the player may see it."""

    def table(self) -> Table:
        """The same for a picture."""

    def play(self, answer: str) -> tuple[str, AnswerKind]:
        """Do the action in `answer`, and let the others act. Returns what was done, and how the answer was understood."""


def read_answer(text: str) -> WordedAction | AnswerKind:
    """The action in the last `<answer>…</answer>` of `text`, upper or lower case. NO_ANSWER without the tags, UNKNOWN_ACTION if the text
    between them is no action.
    """
    content = tagged(text)
    if content is None:
        return AnswerKind.NO_ANSWER
    content = content.strip().lower()
    found = _ACTION.fullmatch(content) if len(content) <= _MAX_ACTION else None
    if found is None:
        return AnswerKind.UNKNOWN_ACTION
    verb, amount = found[1].replace(" ", "-"), (found[2] or "").replace(" ", "-")
    verb = {"bet": "raise", "allin": "all-in"}.get(verb, verb)
    return WordedAction(verb=verb, amount=amount)


class HandEpisode:
    """A hand, one action a turn. The rewards of its turns add up to the hand's net chips less the penalties.

    Blinds and antes belong to the first turn. `scale`: chips of a reward of 1.
    """

    def __init__(self, hand: Hand, *, penalty: float, scale: float = 1.0, show_turn: bool = True) -> None:
        self._hand = hand
        self._penalty = penalty
        self._scale = scale
        self._show_turn = show_turn
        self._net = 0.0
        self._turn = 1
        self._is_over = hand.is_over

    def reset(self) -> Observation:
        """Empty: the prompt shows the state."""
        return Observation(text="")

    def table(self) -> Table:
        return self._hand.table()

    def step(self, action: str) -> Turn:
        """Act, and let the others act until it is this player's turn again or nothing is left to decide. Raises ValueError afterwards."""
        if self._is_over:
            message = "The hand is over: there is nothing left to decide."
            raise ValueError(message)
        done, verdict = self._hand.play(action)
        gained, self._net = self._hand.net - self._net, self._hand.net
        cost = self._penalty if verdict in PENALISED else 0.0
        self._turn += 1
        self._is_over = self._hand.is_over
        return Turn(
            observation="" if self._is_over else turn_text(self._turn, self._hand.shown()) if self._show_turn else self._hand.shown(),
            reward=(gained - cost) / self._scale,
            done=self._is_over,
            info={"action": done, "verdict": verdict.value, "chips": gained},
        )


def turn_text(number: int, state: str) -> str:
    """What a chat model is shown before turn `number`."""
    return f"Turn {number}\n{state}\n{FORM}"
