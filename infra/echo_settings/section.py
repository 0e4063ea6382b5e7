"""What every section of the file is: a frozen model, strict about unknown keys."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

_PART_OF_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Section(BaseModel):
    """Frozen, and strict about unknown keys."""

    # No number that is none: nan compares with nothing, so no rule below would find it.
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


def without_credentials(address: str, belongs: str) -> str:
    """`address`, known to hold no user, password or query: addresses are published with the run. Raises ValueError, which says where
    credentials belong, and does not repeat them.
    """
    # fsspec chains addresses with "::".
    parts = [urlsplit(each if "://" in each else f"//{each}") for each in address.split("::")]
    if any("@" in part.netloc or part.query for part in parts):
        message = f"may hold no user, password or query, because it is published with the run; {belongs}"
        raise ValueError(message)
    return address


def part_of_key(name: str) -> str:
    """`name`, known to be fit for a record's key. Raises ValueError."""
    if not _PART_OF_KEY.fullmatch(name):
        message = f"{name!r} cannot be part of a key; use letters, digits, '.', '_' and '-'"
        raise ValueError(message)
    return name
