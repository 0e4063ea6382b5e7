"""Every command line on every page is one that the command line understands: its command, its options, its arguments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from echo_ops.cli.main import app

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# What a reader replaces: NAME, DIR/NAME.
_PLACEHOLDER = re.compile(r"\b[A-Z][A-Z_]*\b")
_LINE = re.compile(r"""^ *(?:\$ |(?:\w+=\S+ )+)?echoswarm ((?:[^"\n]|"[^"]*")+)""", re.MULTILINE)
_QUOTED = re.compile(r""""[^"]*"|'[^'\n]*'|<[^>\n]*>""")


def _whole(page: str) -> list[str]:
    """What follows `echoswarm` on the lines of blocks, without the remarks behind them."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    blocks.append("".join(line for line in page.splitlines(keepends=True) if line.startswith("    ")))
    # A line ends with a backslash where it goes on, and what is quoted may have several.
    found = [line for block in blocks for line in _LINE.findall(re.sub(r"\\\n *", "", block))]
    return [re.split(r"\s{2,}|\s#|\s[>|]\s", _QUOTED.sub("x", line))[0] for line in found]


def _named(page: str) -> list[str]:
    """The same in prose, where arguments may be left out."""
    prose = re.sub(r"^```\w*\n.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return [" ".join(_QUOTED.sub("x", found).split()) for found in re.findall(r"`echoswarm ([^`]+)`", prose)]


def _fault(line: str) -> str:
    """The name of the error by which the line is refused; empty if it is not. Typer's errors are click's or its own, by its release."""
    words = [word.split("|")[0] for word in shlex.split(line.replace("[", "").replace("]", ""))]
    command: Any = typer.main.get_command(app)
    context = command.make_context("echoswarm", [], resilient_parsing=True)
    try:
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        if not hasattr(command, "commands"):
            command.make_context(command.name, words, parent=context)
    except Exception as exc:  # see above
        return type(exc).__name__
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_line_is_understood(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for line, is_whole in [*((line, True) for line in _whole(text)), *((line, False) for line in _named(text))]:
        allowed = {""}
        if not is_whole:
            allowed |= {"MissingParameter", "BadOptionUsage"}
        if _PLACEHOLDER.search(line):
            allowed |= {"BadParameter", "UsageError"}
        assert "…" in line or _fault(line) in allowed, f"echoswarm {line}"


def test_there_are_command_lines() -> None:
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(_whole(text)) for text in texts) > 90
    assert sum(len(_named(text)) for text in texts) > 100


@pytest.mark.parametrize("line", ["dlq lists", "dlq list --why bad", "runs show a b", "topics render --format word", "nothing"])
def test_a_line_that_is_none_is_found(line: str) -> None:
    assert _fault(line) in {"KeyError", "NoSuchOption", "UsageError", "BadParameter"}
