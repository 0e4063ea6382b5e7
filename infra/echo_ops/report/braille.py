"""Curves of braille dots: two columns and four rows of dots in each character. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

_BLANK = 0x2800
# Bit of the dot at (row, column) within a character.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_ROWS, _COLUMNS = 4, 2

Point = tuple[float, float]


class Canvas:
    """A grid of characters. Coordinates are fractions: x from the left, y from the bottom, both in [0, 1]."""

    def __init__(self, width: int, height: int) -> None:
        self._width, self._height = max(1, width), max(1, height)
        self._bits = [[0] * self._width for _ in range(self._height)]
        self._styles = [[""] * self._width for _ in range(self._height)]

    def dot(self, x: float, y: float, style: str) -> None:
        """One dot; the newest style wins its character."""
        column = min(self._width * _COLUMNS - 1, max(0, round(x * (self._width * _COLUMNS - 1))))
        row = min(self._height * _ROWS - 1, max(0, round((1 - y) * (self._height * _ROWS - 1))))
        self._bits[row // _ROWS][column // _COLUMNS] |= _DOTS[row % _ROWS][column % _COLUMNS]
        self._styles[row // _ROWS][column // _COLUMNS] = style

    def line(self, points: Sequence[Point], style: str) -> None:
        """Straight lines from each point to the next."""
        for (x0, y0), (x1, y1) in pairwise(points):
            count = max(1, round(abs(x1 - x0) * self._width * _COLUMNS), round(abs(y1 - y0) * self._height * _ROWS))
            for index in range(count + 1):
                share = index / count
                self.dot(x0 + (x1 - x0) * share, y0 + (y1 - y0) * share, style)
        if len(points) == 1:
            self.dot(*points[0], style)

    def rows(self) -> list[Text]:
        """The rows from the top."""
        rows = []
        for bits, styles in zip(self._bits, self._styles, strict=True):
            row = Text(no_wrap=True)
            start = 0
            for end in range(1, self._width + 1):
                if end == self._width or styles[end] != styles[start]:
                    row.append("".join(chr(_BLANK | bit) if bit else " " for bit in bits[start:end]), styles[start])
                    start = end
            rows.append(row)
        return rows
