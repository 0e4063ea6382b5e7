"""The demo tasks: rewrite six digits. Small enough to learn on a laptop, hard enough to show whether learning works.

reverse-digits   `416205>` is to be answered with `502614`
sort-digits      `416205>` is to be answered with `012456`
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from echo_tasks.task import Prompt, SingleTurn

NUM_DIGITS = 6
END_OF_PROMPT = ">"


class _Digits(SingleTurn):
    """Digits in, digits out. The prompt of (seed, seq) is the same on every machine."""

    name: str
    rewards: Sequence[str] = ("exact",)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """Six digits and `>`; the entry holds the `answer`."""
        digits = "".join(random.Random(f"{self.name}/{seed}/{seq}").choices("0123456789", k=NUM_DIGITS))
        return Prompt(text=digits + END_OF_PROMPT, entry={"answer": self.answer(digits)})

    def answer(self, digits: str) -> str:
        raise NotImplementedError


class ReverseDigits(_Digits):
    """`416205>` → `502614`."""

    name = "reverse-digits"

    def answer(self, digits: str) -> str:
        return digits[::-1]


class SortDigits(_Digits):
    """`416205>` → `012456`."""

    name = "sort-digits"

    def answer(self, digits: str) -> str:
        return "".join(sorted(digits))
