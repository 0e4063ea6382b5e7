"""The pages on simulation and staleness: what they show is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.simulation.file import ScenarioFile

ROOT = Path(__file__).parents[3]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("simulate", "staleness")}
SHOWN = [part.partition("\n")[::2] for page in PAGES.values() for part in re.findall(r"```\n\$ (.*?)```", page, re.DOTALL)]


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=[command for command, _ in SHOWN])
@pytest.mark.slow
def test_what_is_shown_is_printed_by_the_command_that_is_shown(command: str, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = CliRunner().invoke(app, shlex.split(command)[1:])
    assert found.exit_code == 0
    assert found.stdout == output


def test_every_key_of_the_file_is_on_the_page() -> None:
    for name, field in ScenarioFile.model_fields.items():
        model = next(iter(getattr(field.annotation, "__args__", ())), field.annotation)
        keys = getattr(model, "model_fields", {})
        assert name == "staleness" or not keys or all(f"`{key}`" in PAGES["simulate"] for key in keys), name
