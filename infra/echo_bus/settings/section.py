"""What every section of the file is: a frozen model, strict about unknown keys."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

_PART_OF_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Section(BaseModel):
    """Frozen, and strict about unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def part_of_key(name: str) -> str:
    """`name`, known to be fit for a record's key. Raises ValueError."""
    if not _PART_OF_KEY.fullmatch(name):
        message = f"{name!r} cannot be part of a key; use letters, digits, '.', '_' and '-'"
        raise ValueError(message)
    return name
