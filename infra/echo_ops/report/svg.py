"""Charts as inline SVG. Colours and fonts are the page's CSS classes, so one chart serves light, dark and paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 12, 34
_NUM_TICKS = 5

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart; `css` is its class."""

    points: Sequence[Point]
    css: str
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle in the chart's own units, with a tooltip."""

    x0: float
    x1: float
    y0: float
    y1: float
    css: str
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The range and label of both axes, and the size in pixels."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_label: str
    y_label: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    y_names: Sequence[str] = ()
    """Names of rows 0, 1, … from the top, instead of numbers."""

    def at(self, x: float, y: float) -> Point:
        left = _LEFT + (44 if self.y_names else 0)
        share_x = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        share_y = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return left + share_x * (self.width - left - _RIGHT), self.height - _BOTTOM - share_y * (self.height - _TOP - _BOTTOM)


def chart(frame: Frame, *, title: str, lines: Sequence[Line] = (), bars: Sequence[Bar] = (), marks: Sequence[float] = ()) -> str:
    """A whole `<svg>`. `marks` are horizontal lines at these values. Values that are not finite are left out."""
    label = escape(title, quote=True)
    parts = [f'<svg viewBox="0 0 {frame.width} {frame.height}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">']
    parts += _axes(frame)
    parts += [_bar(frame, bar) for bar in bars]
    for value in marks:
        (x0, y), (x1, _) = frame.at(frame.x[0], value), frame.at(frame.x[1], value)
        parts.append(f'<line class="mark" x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}"/>')
    for line in lines:
        points = [frame.at(x, y) for x, y in line.points if math.isfinite(x) and math.isfinite(y)]
        if line.dots:
            parts += [f'<circle class="{line.css}" cx="{x:.1f}" cy="{y:.1f}" r="2.2"/>' for x, y in points]
        elif points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="{line.css}" points="{path}"/>')
    parts.append("</svg>")
    return "".join(parts)


def ticks(low: float, high: float, count: int = _NUM_TICKS) -> list[float]:
    """Round numbers within [low, high], about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    magnitude: float = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_text(value: float) -> str:
    """Short: 0.25, 12, 3,000, 2e-05."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.0e}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.4g}"


def _axes(frame: Frame) -> list[str]:
    parts = []
    for value in ticks(*frame.x):
        x, y = frame.at(value, frame.y[0])
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{tick_text(value)}</text>')
    if frame.y_names:
        for row, name in enumerate(frame.y_names):
            x, y = frame.at(frame.x[0], frame.y[1] - row - 0.5)
            parts.append(f'<text class="tick" x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{escape(name)}</text>')
    else:
        for value in ticks(*frame.y, count=4):
            (x0, y), (x1, _) = frame.at(frame.x[0], value), frame.at(frame.x[1], value)
            parts.append(f'<line class="grid" x1="{x0:.1f}" y1="{y:.1f}" x2="{x1:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text class="tick" x="{x0 - 7:.1f}" y="{y + 4:.1f}" text-anchor="end">{tick_text(value)}</text>')
    middle = (frame.at(*[frame.x[0], frame.y[0]])[0] + frame.width - _RIGHT) / 2
    parts.append(f'<text class="label" x="{middle:.1f}" y="{frame.height - 4}" text-anchor="middle">{escape(frame.x_label)}</text>')
    if frame.y_label:
        y = (frame.height - _BOTTOM + _TOP) / 2
        parts.append(
            f'<text class="label" x="12" y="{y:.1f}" transform="rotate(-90 12 {y:.1f})" text-anchor="middle">{escape(frame.y_label)}</text>'
        )
    return parts


def _bar(frame: Frame, bar: Bar) -> str:
    (x0, y0), (x1, y1) = frame.at(bar.x0, bar.y0), frame.at(bar.x1, bar.y1)
    tip = f"<title>{escape(bar.tip)}</title>" if bar.tip else ""
    opacity = f' fill-opacity="{bar.opacity:.2f}"' if bar.opacity < 1 else ""
    size = f'width="{max(0.6, x1 - x0):.1f}" height="{max(0.0, y0 - y1):.1f}"'
    return f'<rect class="{bar.css}" x="{x0:.1f}" y="{y1:.1f}" {size}{opacity}>{tip}</rect>'
