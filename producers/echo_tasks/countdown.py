"""Countdown: reach a target with some numbers, each used at most once, by + - * / and parentheses.

chat, text   Use the numbers 3, 8, 25 … to make 131.      <answer>(25 - 8) * 8 - 5</answer>
brief        3 8 25=131?                                  25*3+8*7

Python's own parser reads an expression, which is then evaluated as exact fractions. Anything that the rules do not allow, such as a power
or a call, is refused before it is computed, so the cost of an answer is linear in its length.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from echo_schemas.errors import UserError
from echo_tasks.answers import INSTRUCTION, Form, Style, asked, final_answer
from echo_tasks.options import one_of, whole_number
from echo_tasks.rewards import RewardResult, ScoredSample, reward
from echo_tasks.task import Prompt, SingleTurn

# Enough for an expression of all numbers of a puzzle, and within the depth of the parser's stack.
_MAX_LENGTH = 400
_MAX_NUMBERS = 12
_NUMBER = re.compile(r"\d+")
# The right side of an answer that is an equation, `25*3+8=83`; it is cut off.
_RIGHT_SIDE = re.compile(r"=\s*-?\d+\s*$")
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})
# About every third draw gives a target within the bounds.
_MAX_DRAWS = 1_000


class NotAllowed(ValueError):
    """The expression breaks the rules; the message tells how."""


class Countdown(SingleTurn):
    """`min_numbers` to `max_numbers` numbers up to `max_value`, and a target that all of them together reach, within its bounds."""

    name = "countdown"
    rewards: Sequence[str] = ("countdown", "answer-format")

    def __init__(
        self,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_value: int = 99,
        min_target: int = 10,
        max_target: int = 100,
        style: str = "chat",
    ) -> None:
        """Raises UserError for numbers that contradict one another, or an unknown style."""
        least = whole_number("min_numbers", min_numbers, least=2, most=_MAX_NUMBERS)
        self._sizes = (least, whole_number("max_numbers", max_numbers, least=least, most=_MAX_NUMBERS))
        self._max_value = whole_number("max_value", max_value, least=1)
        lowest = whole_number("min_target", min_target, least=0)
        self._targets = (lowest, whole_number("max_target", max_target, least=lowest))
        self._form = one_of("style", style, Form)
        if self._form is Form.BRIEF:
            self.rewards = ("countdown",)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The puzzle of (seed, seq); the entry holds `numbers`, `target` and one `answer`. Raises UserError if no draw gives a target."""
        rng = random.Random(f"{self.name}/{seed}/{seq}")
        for _ in range(_MAX_DRAWS):
            drawn = self._draw(rng)
            if drawn is not None:
                break
        else:
            raise UserError(
                f"The task 'countdown' found no target from {self._targets[0]} to {self._targets[1]} with numbers up to {self._max_value}.",
                hint="Widen the targets, or change the numbers.",
            )
        numbers, target, answer = drawn
        entry = {"numbers": numbers, "target": target, "answer": answer}
        if self._form is Form.BRIEF:
            return Prompt(text=f"{' '.join(map(str, numbers))}={target}?", entry=entry)
        question = (
            f"Use the numbers {', '.join(map(str, numbers))} to make {target}. Each number may be used at most once. "
            "Only +, -, *, / and parentheses are allowed."
        )
        return asked(question, entry, Style(self._form), f"{INSTRUCTION} The answer is an expression such as (1 + 2) / 3.")

    def _draw(self, rng: random.Random) -> tuple[list[int], int, str] | None:
        """Numbers, target and answer: random numbers joined in random pairs until one is left. None if the target is out of bounds."""
        numbers = [rng.randint(1, self._max_value) for _ in range(rng.randint(*self._sizes))]
        parts = [_Part(number, str(number)) for number in numbers]
        while len(parts) > 1:
            a, b = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            parts.append(rng.choice(_joined(a, b)))
        target = parts[0].value
        if not self._targets[0] <= target <= self._targets[1]:
            return None
        return numbers, target, parts[0].text.removeprefix("(").removesuffix(")")


@dataclass(frozen=True, slots=True)
class _Part:
    """A whole number and its expression."""

    value: int
    text: str


def _joined(a: _Part, b: _Part) -> list[_Part]:
    """The parts that one operation makes of two, with values that are whole numbers from 0 on."""
    high, low = (a, b) if a.value >= b.value else (b, a)
    found = [
        _Part(a.value + b.value, f"({a.text} + {b.text})"),
        _Part(high.value - low.value, f"({high.text} - {low.text})"),
        _Part(a.value * b.value, f"({a.text} * {b.text})"),
    ]
    if low.value and not high.value % low.value:
        found.append(_Part(high.value // low.value, f"({high.text} / {low.text})"))
    return found


def value_of(expression: str, numbers: Sequence[int]) -> Fraction:
    """The value of `expression`, exactly.

    Raises NotAllowed for what is no expression of whole numbers, + - * / and parentheses, for a number that is not among `numbers` or is
    used more often, for a division by zero, and for more than 400 characters. Costs no more than its length.
    """
    if len(expression) > _MAX_LENGTH:
        raise NotAllowed(f"longer than {_MAX_LENGTH} characters")
    text = " ".join(_RIGHT_SIDE.sub("", expression.translate(_SIGNS)).split())
    if not re.fullmatch(r"[\d +*/()-]+", text, re.ASCII):
        raise NotAllowed("not only numbers, + - * / and parentheses")
    used = Counter(_NUMBER.findall(text))
    unknown = used - Counter(map(str, numbers))
    if unknown:
        raise NotAllowed(f"the number {next(iter(unknown))} is not there, or not so often")
    try:
        tree = ast.parse(text, mode="eval")
        return _evaluated(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as exc:
        raise NotAllowed("no expression") from exc
    except ZeroDivisionError as exc:
        raise NotAllowed("a division by zero") from exc


_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv
}  # fmt: skip


def _evaluated(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(number)):
            return Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_evaluated(left), _evaluated(right))
    raise NotAllowed("another operation than + - * /")


@reward(name="countdown")
def countdown(sample: ScoredSample) -> RewardResult:
    """1 if the final answer is an expression by the rules whose value is the target, else 0. The component `valid`: it keeps the rules."""
    try:
        value = value_of(final_answer(sample.completion), sample.entry["numbers"])
    except NotAllowed:
        return RewardResult(value=0.0, components={"valid": 0.0})
    return RewardResult(value=float(value == sample.entry["target"]), components={"valid": 1.0})
