"""The reward of reasoning-gym's own scorers. Imports reasoning_gym, which takes seconds.

Nine of the scorers pass the answer to Python's `eval`, some through sympy. An answer that could do more than compute is not passed to them
and scores 0. Every call has bounds of time and memory, and runs in a scoring process.
"""

from __future__ import annotations

import re

from echo_tasks.answers import final_answer
from echo_tasks.bounds import OutOfBounds, bounded
from echo_tasks.procedural import score
from echo_tasks.rewards import RewardResult, ScoredSample, reward

CPU_S = 1.0
_MEMORY_BYTES = 1 << 30
_TIMEOUT_S = 30.0
# The longest reference answers, grids, have some thousand characters.
_MAX_LENGTH = 20_000
EVALUATED = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
# The functions in answers on integrals and polynomials.
_CIRCULAR = ("sin", "cos", "tan", "sec", "csc", "cot")
_FUNCTIONS = frozenset(
    {"abs", "Abs", "exp", "ln", "log", "sqrt"}
    | {prefix + name + suffix for name in _CIRCULAR for prefix in ("", "a") for suffix in ("", "h")}
)
_CALL = re.compile(r"(\w+)\s*\(")
# Dunders, attributes, calls of an expression's result, escapes and comments that hide one, keywords other than operators.
_SUSPICIOUS = re.compile(r"__|\.\s*[^\W\d]|[)\]}'\"]\s*\(|[\\#@:;{}`]|\b(?:lambda|for|if|import|yield|await|async)\b")


def only_computes(answer: str) -> bool:
    """Whether `answer`, as Python, can do no more than arithmetic, the functions of a pocket calculator, and lists of texts."""
    if not answer.isascii() or _SUSPICIOUS.search(answer):
        return False
    return all(name in _FUNCTIONS for name in _CALL.findall(answer))


@reward(name="reasoning-gym", timeout_s=_TIMEOUT_S, isolated=True, at_timeout=0.0)
def reasoning_gym_score(sample: ScoredSample) -> RewardResult:
    """The scorer's value for the final answer. 0 with the component `refused` if it is not passed on, or `ended` beyond the bounds."""
    answer, entry = final_answer(sample.completion), sample.entry
    if len(answer) > _MAX_LENGTH or (entry["dataset"] in EVALUATED and not only_computes(answer)):
        return RewardResult(value=0.0, components={"refused": 1.0, "ended": 0.0})
    try:
        with bounded(CPU_S, _MEMORY_BYTES):
            value = score(entry["dataset"], entry["config"], answer, entry)
    except (OutOfBounds, RecursionError):
        return RewardResult(value=0.0, components={"refused": 0.0, "ended": 1.0})
    return RewardResult(value=value, components={"refused": 0.0, "ended": 0.0})
