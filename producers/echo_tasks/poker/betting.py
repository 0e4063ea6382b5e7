"""The table's numbers, and the legal action that an action in words means."""

from __future__ import annotations

from dataclasses import dataclass

from echo_tasks.poker.episode import AnswerKind, Said
from echo_tasks.poker.opponents import CALL, FOLD, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Players and chips. Seats are numbered in the order of the blinds; with two players the second one has the button."""

    num: int
    stack: int
    small_blind: int
    big_blind: int

    def position(self, seat: int) -> str:
        """The name of a seat."""
        if self.num == 2:
            return ("big blind", "button and small blind")[seat]
        if seat < 2:
            return ("small blind", "big blind")[seat]
        return "button" if seat == self.num - 1 else f"{self.num - 1 - seat} before the button"

    def game(self) -> str:
        """OpenSpiel's name of the game. With two players the big blind sits first and the other one opens (the ACPC's reversed blinds)."""
        is_heads_up = self.num == 2
        blinds = [self.big_blind, self.small_blind] if is_heads_up else [self.small_blind, self.big_blind, *[0] * (self.num - 2)]
        return (
            f"universal_poker(betting=nolimit,bettingAbstraction=fullgame,numPlayers={self.num},numRounds=4,"
            f"blind={' '.join(map(str, blinds))},firstPlayer={2 if is_heads_up else 3} 1 1 1,numSuits=4,numRanks=13,numHoleCards=2,"
            f"numBoardCards=0 3 1 1,stack={' '.join([str(self.stack)] * self.num)})"
        )


def meant(said: Said, view: View, street_start: int) -> tuple[int, AnswerKind]:
    """The legal action nearest to `said`. `street_start`: the player's chips in the pot before this round of betting."""
    if said.verb == "fold":
        return (FOLD, AnswerKind.FINE) if view.to_call else (CALL, AnswerKind.ADJUSTED)
    if said.verb == "check":
        return (FOLD, AnswerKind.ILLEGAL) if view.to_call else (CALL, AnswerKind.FINE)
    if said.verb == "call":
        return CALL, AnswerKind.FINE if view.to_call else AnswerKind.ADJUSTED
    if not view.least:
        return CALL, AnswerKind.FINE if said.verb == "all-in" else AnswerKind.ADJUSTED
    if said.verb == "all-in":
        return view.most, AnswerKind.FINE
    to = _size(said.amount, view, street_start)
    fitting = min(view.most, max(view.least, to))
    is_as_said = bool(said.amount) and (fitting == to or not said.amount.isdigit())
    return fitting, AnswerKind.FINE if is_as_said else AnswerKind.ADJUSTED


def _size(amount: str, view: View, street_start: int) -> int:
    """Chips put in over the whole hand after a raise of this size."""
    if amount.isdigit():
        return street_start + int(amount)
    share = {"half-pot": 0.5, "pot": 1.0}.get(amount)
    if share is None:
        return view.most if amount == "max" else view.least
    return view.put_in + view.to_call + int(share * (view.pot + view.to_call))
