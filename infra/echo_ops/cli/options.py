"""Options that most commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file. Without it run.toml, if there is one, else defaults and environment."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeOptions:
    """Which records of the past, as it was typed; empty where nothing was given."""

    version: str = ""
    step: str = ""
    offsets: Sequence[str] = ()
    since: str = ""
    until: str = ""
    groups: Sequence[str] = ()
    worker: str = ""
    task: str = ""
    purpose: str = ""
    fate: str = ""
    sample: int | None = None
