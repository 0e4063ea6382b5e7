"""reasoning-gym's data sets as functions of (seed, seq), and their scorers. Imports reasoning_gym, which takes seconds.

reasoning-gym makes item i of a data set from the number seed + i, so that two data sets with near seeds share most of their items. Here
every seed has numbers of its own, one for each seq: no item of one seed is asked under another.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from echo_schemas.errors import UserError
from echo_tasks.options import nearest

with warnings.catch_warnings():
    # One of its libraries has escapes in strings about which Python warns at its compilation.
    warnings.simplefilter("ignore", SyntaxWarning)
    from reasoning_gym.factory import DATASETS

# Kafka's and Avro's seqs are longs.
_SEQ_BITS = 63
# Some generators fail at some numbers. Then 2**4 other numbers are tried, which no other item uses.
_ATTEMPT_BITS = 4
# Seeds of NumPy's old generator have 32 bits.
_NARROW = frozenset({"pool_matrix"})
_NARROW_BITS = 32
# Their configuration holds objects, which a run's file cannot.
_UNSUPPORTED = frozenset({"composite"})
# Their scorers compare tuples; JSON turns these into lists.
_TUPLES = frozenset({"arc_agi", "rearc"})
_OWN_FIELDS = frozenset({"seed", "size"})


def dataset_names() -> list[str]:
    """Every supported data set."""
    return sorted(set(DATASETS) - _UNSUPPORTED)


def check_dataset(name: str, config: Mapping[str, Any]) -> None:
    """Raises UserError for an unknown data set or field, and for a value that the data set refuses."""
    if name not in DATASETS or name in _UNSUPPORTED:
        raise UserError(f"reasoning-gym has no data set {name!r} that can be asked for by name.", hint=nearest(name, dataset_names()))
    known = [field.name for field in fields(DATASETS[name][1]) if field.name not in _OWN_FIELDS]
    for field in config:
        if field not in known:
            raise UserError(f"The data set {name!r} has no field {field!r}.", hint=nearest(field, known))
    try:
        _made(name, config, 0)
    except Exception as exc:  # a data set checks its own configuration, by assertions and otherwise
        raise UserError(f"The data set {name!r} refuses {dict(config)}: {type(exc).__name__}: {exc}.") from exc


def item(name: str, config: Mapping[str, Any], seed: int, seq: int) -> dict[str, Any]:
    """Item `seq` of the data set under `seed`: `question`, `answer`, `metadata`, as JSON gives them back.

    Raises UserError if none can be made with this configuration.
    """
    why = ""
    for attempt in range(2**_ATTEMPT_BITS):
        try:
            made = _made(name, config, number_of(name, seed, seq, attempt))[0]
        except (ValueError, IndexError, RuntimeError, AssertionError) as exc:
            why = f"{type(exc).__name__}: {exc}"
            continue
        # Metadata may hold NumPy's scalars and other numbers of their own kind.
        plain: dict[str, Any] = json.loads(json.dumps(made, default=_plain))
        return plain
    raise UserError(f"The data set {name!r} makes no items with {dict(config)}: {why}.", hint="Ask for easier ones, or for harder ones.")


def number_of(name: str, seed: int, seq: int, attempt: int = 0) -> int:
    """The number from which reasoning-gym makes the item; unique, except for data sets whose seeds have 32 bits."""
    # Negative seeds are put between the others, because generators take −3 for 3.
    stream = 2 * seed if seed >= 0 else -2 * seed - 1
    number = (((stream << _ATTEMPT_BITS) + attempt) << _SEQ_BITS) + seq
    if name not in _NARROW:
        return number
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[: _NARROW_BITS // 8], "big")


def score(name: str, config: Mapping[str, Any], answer: str, entry: Mapping[str, Any]) -> float:
    """The score of `answer` by the data set's own scorer, mostly 0 to 1. Raises the scorer's errors."""
    scorer = _scorer(name, json.dumps(config, sort_keys=True))
    known = {"question": entry.get("question", ""), "answer": entry["answer"], "metadata": entry["metadata"]}
    return float(scorer.score_answer(answer, _with_tuples(known) if name in _TUPLES else known))


@cache
def _scorer(name: str, config: str) -> Any:
    return _made(name, json.loads(config), 0)


def _made(name: str, config: Mapping[str, Any], number: int) -> Any:
    """The data set with one item, made from `number`: some data sets make all items at once, or none beyond their size."""
    dataset, kind = DATASETS[name]
    values = {field: tuple(value) if isinstance(value, list) else value for field, value in config.items()}
    return dataset(kind(**values, seed=number, size=1))


def _with_tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_with_tuples(one) for one in value)
    if isinstance(value, dict):
        return {key: _with_tuples(one) for key, one in value.items()}
    return value


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)
