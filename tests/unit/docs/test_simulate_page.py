"""The page on simulation: what it shows is what the command prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.simulation.file import ScenarioFile

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "simulate.md").read_text(encoding="utf-8")


def test_the_table_that_is_shown_is_printed_by_the_command_that_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, _, output = re.findall(r"```\n\$ (.*?)```", PAGE, re.DOTALL)[0].partition("\n")
    found = CliRunner().invoke(app, shlex.split(command)[1:])
    assert found.exit_code == 0
    assert found.stdout == output


def test_every_key_of_the_file_is_on_the_page() -> None:
    for name, field in ScenarioFile.model_fields.items():
        model = next(iter(getattr(field.annotation, "__args__", ())), field.annotation)
        keys = getattr(model, "model_fields", {})
        assert name == "staleness" or not keys or all(f"`{key}`" in PAGE for key in keys), name
