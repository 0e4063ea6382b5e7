"""Common parts of the pages: a window of a long list, and numbers and texts for JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from echo_ops.harmless import harmless

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Window:
    """Entries [offset, offset + limit) of a list."""

    offset: int = 0
    limit: int = 50

    def of(self, items: Sequence[T]) -> Sequence[T]:
        return items[self.offset : self.offset + self.limit]

    def plain(self, total: int) -> Json:
        """The window for JSON, with the total number of entries."""
        return {"offset": self.offset, "limit": self.limit, "total": total}


def number(value: float | None) -> float | None:
    """`value`, or None for NaN and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def shown(text: str, most: int) -> Json:
    """The first `most` characters, with invisible ones made visible, and the length of the text."""
    return {"text": harmless(text[:most], keep_lines=True), "length": len(text), "is_cut": len(text) > most}
