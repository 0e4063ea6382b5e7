"""Cards as OpenSpiel numbers them, rank by rank, and as people write them."""

from __future__ import annotations

RANKS, SUITS = "23456789TJQKA", "cdhs"
NUM_CARDS = len(RANKS) * len(SUITS)


def rank_of(card: int) -> int:
    """0 for a two, 12 for an ace."""
    return card // len(SUITS)


def suit_of(card: int) -> int:
    """Index into `SUITS`."""
    return card % len(SUITS)


def card_name(card: int) -> str:
    """`Ah` for the ace of hearts."""
    return RANKS[rank_of(card)] + SUITS[suit_of(card)]
