"""Kuhn poker: three cards, one chip of ante, one bet of one chip. The smallest game in which bluffing pays.

    Jack < Queen < King; each player antes one chip and gets a card. The first may check or bet; a bet may be called or folded to; after a
    check the second may bet. The higher card takes the pot.

Against the opponent `equilibrium` no player wins more than 1/18 of a chip per hand as second player, or loses less as first (Kuhn, 1950).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from echo_schemas.records import ChatMessage
from echo_tasks.options import amount, name_of, names_of
from echo_tasks.poker.episode import AnswerKind, HandEpisode, Table, WordedAction, read_answer, turn_text
from echo_tasks.task import AllTokens, Entry, Prompt

_CARDS = ("Jack", "Queen", "King")
PASS, BET = 0, 1
_STYLES = ("chat", "digits")
_RULES = (
    "You are playing Kuhn poker against one opponent. There are three cards: Jack, Queen and King; the King is the highest. Both have "
    "put in one chip and got one card. The first player checks or bets one chip. Who faces a bet calls it with one chip or folds. After a "
    "check the other may check or bet. Who does not fold and holds the higher card takes the pot. Win as many chips as you can.\n"
    "Actions: Check, Bet, Call, Fold."
)
_EQUILIBRIUM = {
    # (seat, facing a bet): chance of betting or calling with Jack, Queen and King; the member of Kuhn's family with alpha = 1/3.
    (0, False): (1 / 3, 0.0, 1.0),
    (0, True): (0.0, 2 / 3, 1.0),
    (1, False): (1 / 3, 0.0, 1.0),
    (1, True): (0.0, 1 / 3, 1.0),
}
OPPONENTS: Mapping[str, Callable[[int, int, bool], float]] = {
    "equilibrium": lambda seat, card, faces_bet: _EQUILIBRIUM[seat, faces_bet][card],
    "random": lambda _seat, _card, _faces_bet: 0.5,
    "call-station": lambda _seat, _card, faces_bet: float(faces_bet),
    "tight": lambda _seat, card, _faces_bet: float(card == len(_CARDS) - 1),
}
"""Name to the chance of betting or calling, given seat, card and whether there is a bet to pay."""


class KuhnPoker(AllTokens):
    """Hands of Kuhn poker against a scripted opponent, each in a seat of its own."""

    name = "kuhn-poker"
    rewards: Sequence[str] = ("return",)

    def __init__(self, *, opponents: str | Sequence[str] = "equilibrium", penalty: float = 1.0, style: str = "chat") -> None:
        """`opponents`: one or several of `OPPONENTS`, drawn anew for each hand. `penalty`: chips that a malformed or illegal answer costs
        on top of the hand. `style`: `chat`, or `digits` for a model that knows only digits: `201>` is the King (2), a check (0) and a bet
        (1), to be answered with 0 or 1. Raises UserError for options that make no game.
        """
        self._opponents = names_of("opponents", opponents, OPPONENTS)
        self._penalty = amount("penalty", penalty)
        self._is_chat = name_of("style", style, _STYLES) == "chat"

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The rules and the first state; the entry holds the `cards`, the policy's `seat`, the `opponent` and its `seed`."""
        name = f"{self.name}/{seed}/{seq}"
        rng = random.Random(name)
        entry = {
            "cards": rng.sample(range(len(_CARDS)), 2),
            "seat": rng.randrange(2),
            "opponent": rng.choice(self._opponents),
            "seed": name,
        }
        state = self._hand(entry).shown()
        if not self._is_chat:
            return Prompt(text=state, entry=entry)
        messages = (ChatMessage(role="system", content=_RULES), ChatMessage(role="user", content=turn_text(1, state)))
        return Prompt(messages=messages, entry=entry)

    def environment(self, entry: Entry) -> HandEpisode:
        """The hand of an entry. Raises ValueError if that is none."""
        return HandEpisode(self._hand(entry), penalty=self._penalty, show_turn=self._is_chat)

    def _hand(self, entry: Entry) -> KuhnHand:
        cards, seat, opponent = entry.get("cards"), entry.get("seat"), OPPONENTS.get(str(entry.get("opponent")))
        is_deal = isinstance(cards, Sequence) and len(cards) == 2 and all(card in (0, 1, 2) for card in cards) and cards[0] != cards[1]
        if not isinstance(cards, Sequence) or not is_deal or seat not in (0, 1) or opponent is None:
            message = f"No hand of Kuhn poker: {dict(entry)}"
            raise ValueError(message)
        return KuhnHand(cards, seat, opponent, seed=str(entry.get("seed")), is_chat=self._is_chat)


class KuhnHand:
    """One hand from the policy's `seat`; the opponent's choices are drawn from `seed` and the hand so far."""

    def __init__(self, cards: Sequence[int], seat: int, opponent: Callable[[int, int, bool], float], *, seed: str, is_chat: bool) -> None:
        self._state = _game().new_initial_state()
        for card in cards:
            self._state.apply_action(card)
        self._cards = cards
        self._seat = seat
        self._opponent = opponent
        self._seed = seed
        self._is_chat = is_chat
        self._actions: list[int] = []
        self._let_opponent_act()

    @property
    def is_over(self) -> bool:
        return bool(self._state.is_terminal())

    @property
    def net(self) -> float:
        if self.is_over:
            return float(self._state.returns()[self._seat])
        return -1.0 - self._actions[self._seat :: 2].count(BET)

    def shown(self) -> str:
        if not self._is_chat:
            return f"{self._cards[self._seat]}{''.join(map(str, self._actions))}>"
        mine = self._said()
        legal = f"{_word(self._actions, PASS)} or {_word(self._actions, BET)}".title().replace("Or", "or")
        return (
            f"State: Hand: {_CARDS[self._cards[self._seat]]}, Pot: {2 + self._actions.count(BET)}, "
            f"Betting: {', '.join(mine) or 'none yet'}\nLegal: {legal}"
        )

    def table(self) -> Table:
        bets = [self._actions[seat::2].count(BET) for seat in range(2)]
        return Table(
            hand=(_CARDS[self._cards[self._seat]],),
            board=(),
            pot=2 + sum(bets),
            seat=self._seat,
            stacks=tuple(1 - bet for bet in bets),
            said=tuple(self._said()),
        )

    def _said(self) -> list[str]:
        return [f"{'You' if index % 2 == self._seat else 'Opponent'} {_word(self._actions[:index], action)}s"
                for index, action in enumerate(self._actions)]  # fmt: skip

    def play(self, answer: str) -> tuple[str, AnswerKind]:
        action, verdict = self._read(answer)
        done = _word(self._actions, action)
        self._apply(action)
        self._let_opponent_act()
        return done, verdict

    def _read(self, answer: str) -> tuple[int, AnswerKind]:
        if not self._is_chat:
            first = answer.strip()[:1]
            return (int(first), AnswerKind.FINE) if first in {"0", "1"} else (PASS, AnswerKind.UNKNOWN_ACTION)
        said = read_answer(answer)
        if isinstance(said, AnswerKind):
            return PASS, said
        return _meant(said, faces_bet=self._actions[-1:] == [BET])

    def _let_opponent_act(self) -> None:
        while not self.is_over and self._state.current_player() != self._seat:
            chance = self._opponent(1 - self._seat, self._cards[1 - self._seat], self._actions[-1:] == [BET])
            drawn = random.Random(f"{self._seed}/{self._actions}").random()
            self._apply(BET if drawn < chance else PASS)

    def _apply(self, action: int) -> None:
        self._state.apply_action(action)
        self._actions.append(action)


def _meant(said: WordedAction, *, faces_bet: bool) -> tuple[int, AnswerKind]:
    """The action that `said` means, and how it was understood."""
    if said.verb in {"raise", "all-in"}:
        return BET, AnswerKind.ADJUSTED if faces_bet else AnswerKind.FINE
    if said.verb == "call":
        return (BET, AnswerKind.FINE) if faces_bet else (PASS, AnswerKind.ADJUSTED)
    if said.verb == "check":
        return PASS, AnswerKind.ILLEGAL if faces_bet else AnswerKind.FINE
    return PASS, AnswerKind.FINE if faces_bet else AnswerKind.ADJUSTED


def _word(before: Sequence[int], action: int) -> str:
    """What `action` is called after the actions `before`."""
    if before[-1:] == [BET]:
        return "call" if action == BET else "fold"
    return "bet" if action == BET else "check"


@cache
def _game() -> Any:
    import pyspiel

    return pyspiel.load_game("kuhn_poker")
