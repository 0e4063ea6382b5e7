"""A record's `entry`: the task's own JSON object (a reference answer, a seed …), for environments and reward functions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Below the limit of every library that walks, copies or pickles objects recursively; tasks use a handful.
_MOST_LEVELS = 64


def parse_entry(text: str) -> dict[str, Any]:
    """The JSON object in `text`. Raises ValueError, with a sentence, for any other text, and for an object nested more than 64 levels."""
    too_deep = f"The entry is nested more than {_MOST_LEVELS} levels deep."
    try:
        found = json.loads(text)
    except RecursionError as exc:
        raise ValueError(too_deep) from exc
    except ValueError as exc:
        message = f"The entry is not JSON: {exc}."
        raise ValueError(message) from exc
    if not isinstance(found, dict):
        message = f"The entry is {type(found).__name__}, not an object."
        raise ValueError(message)  # noqa: TRY004  the text is wrong, not the argument's type
    # Nearly every entry has too few brackets to be that deep.
    if text.count("[") + text.count("{") > _MOST_LEVELS and _levels(found) > _MOST_LEVELS:
        raise ValueError(too_deep)
    return found


def _levels(value: object) -> int:
    """The nesting depth of `value`, counted up to one above the limit."""
    level, number = [value], 0
    while number <= _MOST_LEVELS:
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return number
        number += 1
    return number


def _inside(value: object) -> list[Any]:
    """The lists and objects directly inside a list or an object."""
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return [inner for inner in held if isinstance(inner, (Mapping, list))]
