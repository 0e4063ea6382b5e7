"""The page on capacity: the plan that is shown is the one that the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from echo_ops.cli.main import app

PAGE = (Path(__file__).parents[3] / "docs" / "capacity.md").read_text(encoding="utf-8")


def test_the_plan_that_is_shown_is_printed_by_the_command_that_is_shown() -> None:
    command, output = re.findall(r"```(?:sh)?\n(.*?)```", PAGE, re.DOTALL)[:2]
    found = CliRunner().invoke(app, shlex.split(command.replace("\\\n", " "))[1:])
    assert found.exit_code == 0
    assert found.stdout == output
