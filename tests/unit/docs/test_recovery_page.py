"""The page on recovery quotes what is said, and its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from echo_ops.cli.main import app
from echo_settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recovery.md").read_text(encoding="utf-8")
QUOTED = re.findall(r'"([^"|]*…[^"|]*)"', PAGE)


def _said() -> str:
    code = "".join(path.read_text(encoding="utf-8") for folder in ("infra", "consumers") for path in (ROOT / folder).rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)
    return re.sub(r"%(\.\d)?[sdf]|\{[^{}]*\}", "…", joined)


@pytest.mark.parametrize("quoted", QUOTED)
def test_every_sentence_that_is_quoted_is_said(quoted: str) -> None:
    said = _said()
    for part in re.sub(r"\s+", " ", quoted).split("…"):
        assert part.strip(" .(,)") in said, f"nothing says {part!r}"


def test_there_are_sentences() -> None:
    assert len(QUOTED) > 15


def test_every_command_line_is_understood() -> None:
    root = typer.main.get_command(app)
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()]
    assert lines
    for line in lines:
        name, *words = shlex.split(line, comments=True)[1:]
        command = getattr(root, "commands", {})[name]
        command.make_context(name, words)


def test_every_setting_in_prose_exists() -> None:
    found = re.findall(r"`\[(\w+)\] (\w+)`", PAGE)
    assert found
    for section, key in found:
        model = Settings.model_fields[section].annotation
        assert isinstance(model, type)
        assert key in model.model_fields, f"[{section}] {key}"
