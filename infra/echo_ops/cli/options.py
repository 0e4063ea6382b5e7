"""Options that most commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="Configuration file. Without it run.toml, if there is one, else defaults and environment."),
]
