"""The command line of a benchmark: its parser, and the file of its figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--json FILE`. `description`: the module's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def save(file: Path | None, figures: object) -> None:
    """Write the figures as JSON, if `--json` names a file."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
