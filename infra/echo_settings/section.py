"""The base of every section of the file, and checks that several sections share."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict

_PART_OF_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Section(BaseModel):
    """A frozen model that refuses unknown keys."""

    # No nan: every comparison with it is false, so no rule would refuse it.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def without_credentials(belongs: str, *, separator: str = "") -> AfterValidator:
    """Refuses an address with a user, password or query, because addresses are published with the run. `belongs` says in the error where to
    write them; the error does not repeat them. `separator`: between several addresses.
    """
    return AfterValidator(lambda text: _refuse_credentials(text, text.split(separator) if separator else [text], belongs))


def _refuse_credentials(text: str, addresses: list[str], belongs: str) -> str:
    # fsspec chains addresses with "::".
    parts = [urlsplit(each if "://" in each else f"//{each}") for address in addresses for each in address.split("::")]
    if any("@" in part.netloc or part.query for part in parts):
        raise ValueError(f"may hold no user, password or query, because it is published with the run; {belongs}")
    return text


def part_of_key(name: str) -> str:
    """Returns `name` if it can be part of a record's key. Raises ValueError."""
    if not _PART_OF_KEY.fullmatch(name):
        raise ValueError(f"{name!r} cannot be part of a key; use letters, digits, '.', '_' and '-'")
    return name


PartOfKey = Annotated[str, AfterValidator(part_of_key)]
