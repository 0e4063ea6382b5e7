"""No-limit Texas hold'em, a hand at a time, on OpenSpiel's `universal_poker`.

All samples of a group get the same cards, board included, and opponents that answer the same play alike: only the policy's play differs.
A hand that ends before the policy has to decide is dealt anew.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from echo_schemas.records import ChatMessage
from echo_tasks.options import amount, name_of, names_of, whole_number
from echo_tasks.poker.cards import NUM_CARDS, card_name
from echo_tasks.poker.episode import AnswerKind, HandEpisode, Table, WordedAction, read_answer, turn_text
from echo_tasks.poker.opponents import CALL, FOLD, OPPONENTS, View
from echo_tasks.task import AllTokens, Entry, Prompt

_NUM_BOARD = 5
_STREETS = {0: "preflop", 3: "flop", 4: "turn", 5: "river"}
_UNITS = ("chips", "big-blinds")


class Poker(AllTokens):
    """Hands of no-limit hold'em against scripted opponents. The options' defaults are ECHO-2's six-handed table."""

    name = "poker"
    rewards: Sequence[str] = ("return",)

    def __init__(
        self,
        *,
        players: int = 6,
        opponents: str | Sequence[str] = ("tight", "call-station", "random"),
        stack: int = 1000,
        small_blind: int = 10,
        big_blind: int = 20,
        penalty: float | None = None,
        unit: str = "chips",
    ) -> None:
        """`players`: seats, the policy's included. `opponents`: one or several of `OPPONENTS`, drawn anew for each seat and hand.
        `penalty`: chips that a malformed or illegal answer costs on top of the hand; None: a big blind. `unit`: `chips` or `big-blinds`,
        what a reward of 1 is. Raises UserError for options that make no game.
        """
        self._opponents = names_of("opponents", opponents, OPPONENTS)
        big = whole_number("big_blind", big_blind, least=2, most=10**6)
        self._seats = Seats(
            num=whole_number("players", players, least=2, most=10),
            stack=whole_number("stack", stack, least=2 * big, most=10**6),
            small_blind=whole_number("small_blind", small_blind, least=1, most=big),
            big_blind=big,
        )
        self._penalty = float(big) if penalty is None else amount("penalty", penalty)
        self._scale = float(big) if name_of("unit", unit, _UNITS) == "big-blinds" else 1.0

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The rules and the first state; the entry holds the `cards` (two for each seat, then the board), the policy's `seat`, the
        `opponents` seat by seat and their `seed`.
        """
        for attempt in itertools.count():
            name = f"{self.name}/{seed}/{seq}/{attempt}"
            rng = random.Random(name)
            entry = {
                "cards": rng.sample(range(NUM_CARDS), 2 * self._seats.num + _NUM_BOARD),
                "seat": rng.randrange(self._seats.num),
                "opponents": rng.choices(self._opponents, k=self._seats.num),
                "seed": name,
            }
            hand = self._hand(entry)
            if not hand.is_over:
                break
        rules = ChatMessage(role="system", content=self._rules())
        return Prompt(messages=(rules, ChatMessage(role="user", content=turn_text(1, hand.shown()))), entry=entry)

    def environment(self, entry: Entry) -> HandEpisode:
        """The hand of an entry. Raises ValueError if that is none for this table."""
        return HandEpisode(self._hand(entry), penalty=self._penalty, scale=self._scale)

    def _hand(self, entry: Entry) -> HoldemHand:
        cards, seat, opponents, num = entry.get("cards"), entry.get("seat"), entry.get("opponents"), self._seats.num
        is_hand = (
            isinstance(cards, Sequence)
            and len(cards) == 2 * num + _NUM_BOARD
            and all(card in range(NUM_CARDS) for card in cards)
            and len(set(cards)) == len(cards)
            and seat in range(num)
            and isinstance(opponents, Sequence)
            and len(opponents) == num
            and all(name in tuple(OPPONENTS) for name in opponents)
        )
        if not is_hand:
            message = f"No hand of hold'em for {num} players: {dict(entry)}"
            raise ValueError(message)
        return HoldemHand(self._seats, entry)

    def _rules(self) -> str:
        seats = self._seats
        return (
            f"You are playing one hand of no-limit Texas hold'em with {seats.num} players, {seats.stack} chips each, blinds "
            f"{seats.small_blind} and {seats.big_blind}. Win as many chips as you can.\n"
            "Actions: Fold; Check; Call; Raise N, which puts your bets of this round up to N chips in all; Raise min, Raise half-pot, "
            "Raise pot; All-in. A size beyond the limits counts as the nearest one that is legal."
        )


class HoldemHand:
    """One hand of an entry, from the policy's seat. Opponents' random choices are drawn from the entry's seed and the hand so far."""

    def __init__(self, seats: Seats, entry: Mapping[str, Any]) -> None:
        self._seats = seats
        self._cards: Sequence[int] = entry["cards"]
        self._seat: int = entry["seat"]
        self._opponents: Sequence[str] = entry["opponents"]
        self._seed = str(entry.get("seed"))
        self._state = _game(seats).new_initial_state()
        self._num_dealt = 0
        self._street_start = [0] * seats.num
        self._said: list[str] = []
        self._folded = False
        self._go_on()

    @property
    def is_over(self) -> bool:
        return self._folded or bool(self._state.is_terminal())

    @property
    def net(self) -> float:
        if self._state.is_terminal():
            return float(self._state.returns()[self._seat])
        return 0.0 - self._put_in()[self._seat]

    def shown(self) -> str:
        view, mine = self._view(self._seat), self._street_start[self._seat]
        stacks = ", ".join(
            f"{'you' if seat == self._seat else f'seat {seat + 1}'} {self._seats.stack - chips}"
            for seat, chips in enumerate(self._put_in())
        )
        raises = f", Raise {view.least - mine} to {view.most - mine}" if view.least else ""
        stay = f"Fold, Call {view.to_call}" if view.to_call else "Check"
        return (
            f"State: Hand: [{_listed(view.hole)}], Board: [{_listed(view.board)}], Pot: {view.pot}, To call: {view.to_call}\n"
            f"You are seat {self._seat + 1} of {self._seats.num} ({self._seats.position(self._seat)}). Stacks: {stacks}\n"
            f"Betting: {'; '.join(self._said) or 'none yet'}\n"
            f"Legal: {stay}{raises}"
        )

    def table(self) -> Table:
        put_in = self._put_in()
        return Table(
            hand=tuple(map(card_name, self._cards[2 * self._seat : 2 * self._seat + 2])),
            board=tuple(map(card_name, self._cards[2 * self._seats.num : self._num_dealt])),
            pot=sum(put_in),
            seat=self._seat,
            stacks=tuple(self._seats.stack - chips for chips in put_in),
            said=tuple(self._said),
        )

    def play(self, answer: str) -> tuple[str, AnswerKind]:
        view, said = self._view(self._seat), read_answer(answer)
        if isinstance(said, AnswerKind):
            action, verdict = (FOLD if view.to_call else CALL), said
        else:
            action, verdict = meant(said, view, self._street_start[self._seat])
        done = self._apply(action, view)
        if action == FOLD:
            self._folded = True
        else:
            self._go_on()
        return done, verdict

    def _go_on(self) -> None:
        """Deal cards and let opponents act, until the policy is to act or the hand is decided."""
        while not self._state.is_terminal():
            if self._state.is_chance_node():
                self._deal()
            elif (player := self._state.current_player()) == self._seat:
                return
            else:
                view = self._view(player)
                rng = random.Random(f"{self._seed}/{player}/{'; '.join(self._said)}")
                self._apply(OPPONENTS[self._opponents[player]](view, rng), view)

    def _deal(self) -> None:
        if self._num_dealt >= 2 * self._seats.num:
            self._street_start = self._put_in()
        self._state.apply_action(self._cards[self._num_dealt])
        self._num_dealt += 1

    def _apply(self, action: int, view: View) -> str:
        player = self._state.current_player()
        done = "fold" if action == FOLD else f"raise to {action - self._street_start[player]}"
        if action == CALL:
            done = f"call {view.to_call}" if view.to_call else "check"
        who = "you" if player == self._seat else f"seat {player + 1}"
        self._said.append(f"{_STREETS[len(view.board)]} {who}: {done}")
        self._state.apply_action(action)
        return done

    def _view(self, player: int) -> View:
        put_in, legal = self._put_in(), self._state.legal_actions()
        raises = legal[-1] > CALL
        first = 0 if legal[0] > FOLD else 1
        return View(
            hole=self._cards[2 * player : 2 * player + 2],
            board=self._cards[2 * self._seats.num : self._num_dealt],
            pot=sum(put_in),
            to_call=max(put_in) - put_in[player],
            put_in=put_in[player],
            least=legal[first + 1] if raises else 0,
            most=legal[-1] if raises else 0,
        )

    def _put_in(self) -> list[int]:
        chips: list[int] = self._state.to_dict()["player_contributions"]
        return chips


def _listed(cards: Sequence[int]) -> str:
    return ", ".join(map(card_name, cards))


@cache
def _game(seats: Seats) -> Any:
    import pyspiel

    return pyspiel.load_game(seats.game())


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Players and chips. Seats are numbered in the order of the blinds; with two players the second one has the button."""

    num: int
    stack: int
    small_blind: int
    big_blind: int

    def position(self, seat: int) -> str:
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


def meant(said: WordedAction, view: View, street_start: int) -> tuple[int, AnswerKind]:
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
