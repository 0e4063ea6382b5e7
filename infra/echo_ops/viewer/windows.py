"""What queries have in common: a window of a long list, and numbers and texts as JSON can carry them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from echo_ops.cli.harmless import harmless

Json = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Window:
    """Entries [offset, offset + limit) of a list."""

    offset: int = 0
    limit: int = 50

    def of(self, items: Sequence[T]) -> Sequence[T]:
        """What of `items` lies in it."""
        return items[self.offset : self.offset + self.limit]

    def plain(self, total: int) -> Json:
        """As JSON, with how many entries there are."""
        return {"offset": self.offset, "limit": self.limit, "total": total}


def number(value: float | None) -> float | None:
    """JSON has no NaN and no infinity."""
    return value if value is not None and math.isfinite(value) else None


def shown(text: str, most: int) -> Json:
    """The first `most` characters, invisible ones made visible, and how many there are."""
    return {"text": harmless(text[:most], keep_lines=True), "length": len(text), "is_cut": len(text) > most}
