"""Whether a mathematical answer is the reference: as text, as a number, else by math-verify. Imports math_verify, which takes a second.

math-verify computes what a model wrote, so every check has a bound of processor time and memory, and runs in a scoring process: an
answer that cannot be checked within it is wrong.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from echo_tasks.answers import OPENING, final_answer
from echo_tasks.bounds import OutOfBounds, bounded
from echo_tasks.math_answers import GSM8K_MARK, last_boxed
from echo_tasks.rewards import RewardResult, ScoredSample, reward

# Ten times what a hard but honest comparison takes.
CPU_S = 1.0
_MEMORY_BYTES = 1 << 30
# Against what hangs outside Python, where no signal is heard: then the pool kills the process.
_TIMEOUT_S = 10.0
# The longest answers of MATH have 160 characters.
_MAX_LENGTH = 1_000
# Where no form marks the answer, it is looked for in the last words.
_TAIL = 500
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_MARKUP = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[,;:!]|\\?\$")
# Not between two words or numbers: 1 2 is not 12.
_SPACE = re.compile(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])")
# math-verify's own limits are alarms in whole seconds of the wall clock. Ours hold instead.
_NO_ALARM_S = 86_400


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


def is_right(reference: str, answer: str) -> bool:
    """Whether two answers are the same number, set, interval, expression. Raises OutOfBounds if that is not found out in time."""
    if len(answer) > _MAX_LENGTH:
        return False
    ours, theirs = _compact(reference), _compact(answer)
    if ours == theirs:
        return bool(theirs)
    if _NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs):
        if _decimal(ours) == _decimal(theirs):
            return True
        if "." not in ours + theirs:
            return False
    with bounded(CPU_S, _MEMORY_BYTES):
        return bool(verify(_parsed_reference(reference), _parsed(f"${answer.strip().strip('$')}$"), timeout_seconds=_NO_ALARM_S))


def says(reference: str, words: str) -> bool:
    """Whether the last formula or number in `words` is the reference. Raises OutOfBounds if that is not found out in time."""
    with bounded(CPU_S, _MEMORY_BYTES):
        return bool(verify(_parsed_reference(reference), _parsed(words[-_TAIL:]), timeout_seconds=_NO_ALARM_S))


@lru_cache(maxsize=4_096)
def _parsed_reference(reference: str) -> list[Any]:
    return _parsed(f"${reference.strip().strip('$')}$")


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=_NO_ALARM_S)
    return found


def _compact(answer: str) -> str:
    return _SPACE.sub("", _MARKUP.sub("", answer)).removesuffix(".").replace("dfrac", "frac").replace("tfrac", "frac")


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))


@reward(name="math", timeout_s=_TIMEOUT_S, isolated=True, at_timeout=0.0)
def math(sample: ScoredSample) -> RewardResult:
    """1 if the answer is the entry's `answer`, else 0. Components: `stated`, it is marked as one; `ended`, its check was given up."""
    reference = str(sample.entry["answer"])
    answer = stated_answer(sample.completion)
    stated = float(answer is not None)
    try:
        right = says(reference, sample.completion) if answer is None else is_right(reference, answer)
    except (OutOfBounds, RecursionError):
        return RewardResult(value=0.0, components={"stated": stated, "ended": 1.0})
    return RewardResult(value=float(right), components={"stated": stated, "ended": 0.0})
