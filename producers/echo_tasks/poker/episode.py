"""One hand as an episode in ECHO-2's form (appendix D): a state in words, an action in words, the change of the player's chips as reward.

Every text is an answer with a defined outcome: what is no action is the cheapest legal one (check, else fold) and costs the penalty.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Protocol

from echo_schemas.errors import UserError
from echo_tasks.task import Observation, Turn

OPENING, CLOSING = "<answer>", "</answer>"
FORM = "Always end with your action in this form: <answer>ACTION</answer>"
# The longest action with generous white space: what is longer is none, however long.
_MAX_ACTION = 64
_ACTION = re.compile(r"(fold|check|call|bet|raise|all[- ]?in)(?:\s+(?:to\s+)?([0-9]{1,9}|min|half[- ]pot|pot|max))?[.!]?")


class AnswerKind(StrEnum):
    """What an answer was, beside the action it led to."""

    FINE = "fine"
    ADJUSTED = "adjusted"
    """Not possible as said, but plainly meant: a raise beyond the limits, a call or a fold with nothing to pay. No penalty."""
    ILLEGAL = "illegal"
    """An action that the rules forbid here, such as a check when there is a bet to pay."""
    NO_ANSWER = "no_answer"
    UNKNOWN_ACTION = "unknown_action"


PENALISED = frozenset({AnswerKind.ILLEGAL, AnswerKind.NO_ANSWER, AnswerKind.UNKNOWN_ACTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """An action in words: `verb` is fold, check, call, raise or all-in; `amount` what stood behind it, digits or a named size."""

    verb: str
    amount: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What lies on the table as the player at `seat` sees it, for a picture. `stacks`: chips left, seat by seat; `said`: the betting."""

    hand: tuple[str, ...]
    board: tuple[str, ...]
    pot: int
    seat: int
    stacks: tuple[int, ...]
    said: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Hand(Protocol):
    """A hand of cards, seen from one player's seat; whenever it is not over, that player is to act."""

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left for the player to decide."""

    @property
    def net(self) -> float:
        """The player's chips against those before the hand: what is in the pot counts as gone until the hand is won."""

    def shown(self) -> str:
        """The state in words, as far as the player may see it."""

    def table(self) -> Table:
        """The same for a picture."""

    def play(self, answer: str) -> tuple[str, AnswerKind]:
        """Do what `answer` says, let the others act, and say what was done and what the answer was."""


def read_answer(text: str) -> Said | AnswerKind:
    """The action in the last `<answer>…</answer>` of `text`, upper or lower case. Time is linear in the text.

    Without its tags NO_ANSWER, with anything but an action between them UNKNOWN_ACTION. Tags within tags: the innermost answer counts.
    """
    closing = text.rfind(CLOSING)
    opening = text.rfind(OPENING, 0, closing) if closing >= 0 else -1
    if opening < 0:
        return AnswerKind.NO_ANSWER
    content = text[opening + len(OPENING) : text.index(CLOSING, opening)].strip().lower()
    found = _ACTION.fullmatch(content) if len(content) <= _MAX_ACTION else None
    if found is None:
        return AnswerKind.UNKNOWN_ACTION
    verb, amount = found[1].replace(" ", "-"), (found[2] or "").replace(" ", "-")
    verb = {"bet": "raise", "allin": "all-in"}.get(verb, verb)
    return Said(verb=verb, amount=amount)


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
        """Nothing: the prompt shows the state."""
        return Observation(text="")

    def table(self) -> Table:
        """What lies on the table now."""
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


def whole(name: str, value: Any, least: int, most: int) -> int:
    """An option that is a whole number. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"The option {name} is {value!r}; it takes whole numbers from {least} to {most}.")
    return value


def amount(name: str, value: Any) -> float:
    """An option that is a number of chips. Raises UserError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UserError(f"The option {name} is {value!r}; it takes a number of chips from 0 on.")
    return float(value)


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """An option that is one of some names. Raises UserError with the nearest one."""
    if value not in known:
        near = difflib.get_close_matches(str(value), known, n=1, cutoff=0.0)[0]
        raise UserError(f"The option {name} has {value!r}; it can be {', '.join(known)}.", hint=f"Did you mean {near!r}?")
    return str(value)


def names(name: str, value: Any, known: Mapping[str, Any]) -> tuple[str, ...]:
    """An option that is one or several of some names. Raises UserError with the nearest one."""
    given: Any = [value] if isinstance(value, str) else value
    if not isinstance(given, Sequence) or not given:
        raise UserError(f"The option {name} is {value!r}; it takes names out of {', '.join(known)}.")
    return tuple(choice(name, each, tuple(known)) for each in given)
