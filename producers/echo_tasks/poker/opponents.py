"""Scripted hold'em players, a function each: what a player sees → the action it takes. They know only what the rules show them.

random         any kind of action, raises of any size
call-station   checks, and calls every bet
tight          enters with good cards, goes on with a pair or better, bets half the pot
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from echo_tasks.poker.cards import rank_of, suit_of

FOLD, CALL = 0, 1
"""The ids of OpenSpiel; every id above is a raise, to so many chips put in over the whole hand."""
_TEN, _SEVEN, _ACE = 8, 5, 12
_FLUSH_DRAW = 4
# A bet is answered with a raise only if it costs less than this share of the chips behind.
_RERAISE_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a player sees. `to_call`: chips that it must still pay; `put_in`: chips that it has paid over the whole hand; raises go from
    `least` to `most`, both 0 if none is legal.
    """

    hole: Sequence[int]
    board: Sequence[int]
    pot: int
    to_call: int
    put_in: int
    least: int
    most: int


Opponent = Callable[[View, random.Random], int]


def play_randomly(view: View, rng: random.Random) -> int:
    """Fold, call or raise alike often; the size of a raise is spread evenly over its logarithm."""
    action = rng.choice([*([FOLD] if view.to_call else []), CALL, *([-1] if view.least else [])])
    return action if action >= 0 else round(view.least * (view.most / view.least) ** rng.random())


def always_call(view: View, rng: random.Random) -> int:
    """Check and call."""
    del view, rng
    return CALL


def play_tightly(view: View, rng: random.Random) -> int:
    """Good cards only, without a bluff."""
    del rng
    if not (_is_connected(view) if view.board else _is_good_start(view)):
        return FOLD if view.to_call else CALL
    is_dear = view.to_call > _RERAISE_SHARE * (view.most - view.put_in)
    if not view.least or is_dear:
        return CALL
    return min(view.most, max(view.least, view.put_in + view.to_call + (view.pot + view.to_call) // 2))


def _is_good_start(view: View) -> bool:
    """A pair from sevens on, two cards from tens on, or an ace with its suit."""
    low, high = sorted(map(rank_of, view.hole))
    is_suited = suit_of(view.hole[0]) == suit_of(view.hole[1])
    return (low == high and low >= _SEVEN) or low >= _TEN or (high == _ACE and is_suited)


def _is_connected(view: View) -> bool:
    """A pair or better with a card of its own, or four of a suit."""
    ranks, suits = [rank_of(card) for card in view.board], [suit_of(card) for card in (*view.hole, *view.board)]
    mine = [rank_of(card) for card in view.hole]
    return mine[0] == mine[1] or any(rank in ranks for rank in mine) or max(map(suits.count, suits)) >= _FLUSH_DRAW


OPPONENTS: Mapping[str, Opponent] = {"tight": play_tightly, "call-station": always_call, "random": play_randomly}
