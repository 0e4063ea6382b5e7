"""Poker hands as episodes: no-limit hold'em for chat models, Kuhn poker small enough for a tiny one; the rules are OpenSpiel's."""

from echo_tasks.poker.holdem import Poker
from echo_tasks.poker.kuhn import KuhnPoker

__all__ = ["KuhnPoker", "Poker"]
