"""Whether a mathematical answer is the reference: as text, as a number, else by math-verify. Imports math_verify, which takes a second.

math-verify computes a model's answer, so every check has bounds of processor time and memory, and runs in a scoring process. An answer
that cannot be checked within them is wrong.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from math_verify import parse, verify

from echo_tasks.answers import OPENING, final_answer
from echo_tasks.bounds import OutOfBounds, bounded
from echo_tasks.math_answers import GSM8K_MARK, last_boxed
from echo_tasks.rewards import RewardResult, ScoredSample, reward

# Ten times the time of a hard but honest comparison.
CPU_S = 1.0
_MEMORY_BYTES = 1 << 30
# Wall clock, on a machine that may be busy; ends code that hangs outside Python, where no signal is handled.
_TIMEOUT_S = 30.0
# The longest answers of MATH have 160 characters.
_MAX_LENGTH = 1_000
# An answer that is not marked is searched in the last words.
_TAIL = 500
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", re.ASCII)
_QUOTIENT = re.compile(r"(-?)(?:\\frac\{(\d+)\}\{(\d+)\}|(\d+)/(\d+))", re.ASCII)
_MARKUP = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!]|\\?\$")
# White space, but not between two words or numbers: 1 2 is not 12.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
# Switches off math-verify's own limits, which are alarms in whole seconds of the wall clock.
_NO_ALARM_S = 86_400
_KEPT = 4_096
_EVERY_KIND = (("\\frac{\\pi}{2}", "\\pi/2"), ("2\\sqrt{3}", "\\sqrt{12}"), ("x^2+2x+1", "(x+1)^2"), ("\\{1,2\\}", "\\{2, 1\\}"))


def stated_answer(completion: str) -> str | None:
    """The last answer that is marked as one: in <answer> tags, in \\boxed{}, or behind ####. None if there is no mark."""
    text = final_answer(completion) if OPENING in completion else completion
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if OPENING in completion:
        return text
    _, mark, rest = text.rpartition(GSM8K_MARK)
    return rest.strip().partition("\n")[0].strip() if mark else None


def is_right(reference: str, answer: str) -> bool | None:
    """Whether two answers are the same number, set, interval, expression. None if the bounds do not suffice to tell."""
    if len(answer) > _MAX_LENGTH:
        return False
    ours, theirs = _compact(reference), _compact(answer)
    if ours == theirs:
        return bool(theirs)
    number, other = _rational(ours), _rational(theirs)
    if number is not None and other is not None:
        if number == other:
            return True
        # A decimal may be rounded; math-verify decides how much is accepted.
        if "." not in ours + theirs:
            return False
    return _verified(reference, _in_math(answer))


def says(reference: str, words: str) -> bool | None:
    """Whether the last formula or number in `words` is the reference. None if the bounds do not suffice to tell."""
    return _verified(reference, words[-_TAIL:])


# Cached, because the answers to one prompt are often the same, also the hostile ones.
@lru_cache(maxsize=_KEPT)
def _verified(reference: str, text: str) -> bool | None:
    _warm_up()
    try:
        with bounded(CPU_S, _MEMORY_BYTES):
            return _is_verified(_parsed_reference(reference), text)
    except (OutOfBounds, RecursionError):
        return None


@cache
def _warm_up() -> None:
    """Load what SymPy and the parser need for their first root, polynomial and set: a second that no answer should pay for."""
    for reference, text in _EVERY_KIND:
        _is_verified(_parsed(_in_math(reference)), _in_math(text))


def _is_verified(reference: list[Any], text: str) -> bool:
    return bool(verify(reference, _parsed(text), timeout_seconds=_NO_ALARM_S))


@lru_cache(maxsize=_KEPT)
def _parsed_reference(reference: str) -> list[Any]:
    return _parsed(_in_math(reference))


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=_NO_ALARM_S)
    return found


def _in_math(answer: str) -> str:
    return f"${answer.strip().strip('$')}$"


def _compact(answer: str) -> str:
    return _SPACE.sub("", _MARKUP.sub("", answer)).removesuffix(".").replace("dfrac", "frac").replace("tfrac", "frac")


def _rational(compact: str) -> Fraction | None:
    """A number written in digits, or as a quotient of whole ones; None for anything else."""
    if _NUMBER.fullmatch(compact):
        return Fraction(compact.replace(",", ""))
    found = _QUOTIENT.fullmatch(compact)
    if found is None:
        return None
    sign, above, below, upper, lower = found.groups()
    denominator = int(below or lower)
    return Fraction(int(sign + (above or upper)), denominator) if denominator else None


@reward(name="math", timeout_s=_TIMEOUT_S, isolated=True, at_timeout=0.0)
def math(sample: ScoredSample) -> RewardResult:
    """1 if the answer is the entry's `answer`, else 0. Components: `stated`, it is marked as one; `ended`, its check was given up."""
    reference = str(sample.entry["answer"])
    answer = stated_answer(sample.completion)
    right = says(reference, sample.completion) if answer is None else is_right(reference, answer)
    components = {"stated": float(answer is not None), "ended": float(right is None)}
    return RewardResult(value=float(right or False), components=components)
