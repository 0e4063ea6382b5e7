"""The price of a worker from a file that another program keeps up to date (a spot price). It is read before each heartbeat."""

from __future__ import annotations

import math
from pathlib import Path

from echo_runtime.notices import Notices
from echo_schemas.errors import UserError

_HINT = "Write one number into it, the price of an hour, such as 0.35."
# A price is a few characters; of a larger file no more is read.
_MOST_BYTES = 1024


class PriceFile:
    """The number in a file. Used from the heartbeat's thread."""

    def __init__(self, path: Path, notices: Notices) -> None:
        """Raises UserError if the file has no price yet."""
        self._path = path
        self._notices = notices
        self._price = read_price(path)

    def now(self) -> float:
        """The price in the file; while the file has none, the last one, with a notice."""
        try:
            self._price = read_price(self._path)
            self._notices.clear("price")
        except UserError as exc:
            self._notices.say("price", f"{exc} The price stays {self._price:g}. {exc.hint}")
        return self._price


def read_price(path: Path) -> float:
    """The price in a file. Raises UserError if there is none."""
    try:
        with path.open(encoding="utf-8") as file:
            price = float(file.read(_MOST_BYTES))
    except OSError as exc:
        raise UserError(f"The price file {path} cannot be read: {exc.strerror}.", hint=_HINT) from exc
    except ValueError as exc:
        raise UserError(f"The price file {path} holds no number.", hint=_HINT) from exc
    if not (math.isfinite(price) and price >= 0):
        raise UserError(f"The price file {path} holds {price:g}, which is no price.", hint=_HINT)
    return price
