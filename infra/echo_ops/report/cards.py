"""Cards of an HTML page, and the page around them: one file without scripts. Colours are CSS classes of `page.css`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

COLOURS = ("green", "blue", "violet", "amber", "red")
"""The colours of staleness 0, 1, …; the last one stands for all above."""


@dataclass(frozen=True, slots=True)
class Card:
    """One picture or table with a sentence about it. `svg` is markup of `svg.chart`; `legend`: (name, colour)s."""

    title: str
    text: str
    svg: str = ""
    legend: Sequence[tuple[str, str]] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    is_wide: bool = False


def fill_page(package: str, **values: Any) -> str:
    """The package's template `page.html.j2`, filled with `values`; it escapes all text."""
    environment = Environment(
        loader=PackageLoader(package, "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    css = resources.files("echo_ops.report").joinpath("page.css").read_text(encoding="utf-8")
    return environment.get_template("page.html.j2").render(css=css, **values)
