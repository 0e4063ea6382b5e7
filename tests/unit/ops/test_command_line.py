"""Every command that `--help` lists runs a function that is there."""

from __future__ import annotations

from importlib import metadata

import pytest
import typer.main
from typer.testing import CliRunner

from echo_ops.cli.main import _COMMANDS, _GROUPS, app


@pytest.mark.parametrize("words", _COMMANDS)
def test_a_command_has_a_function_and_options(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"])
    assert shown.exit_code == 0, shown.output
    assert f" {words} " in shown.output


def test_every_group_has_commands() -> None:
    assert {words.rpartition(" ")[0] for words in _COMMANDS} == {*_GROUPS, ""}
    assert set(vars(typer.main.get_command(app))["commands"]) == {words.split()[0] for words in _COMMANDS}


def test_the_release_is_told() -> None:
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"echoswarm {metadata.version('echoswarm')}\n")
