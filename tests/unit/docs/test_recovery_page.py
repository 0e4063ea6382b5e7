"""The page on recovery quotes what is said, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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


def test_every_setting_in_prose_exists() -> None:
    found = re.findall(r"`\[(\w+)\] (\w+)`", PAGE)
    assert found
    for section, key in found:
        model = Settings.model_fields[section].annotation
        assert isinstance(model, type)
        assert key in model.model_fields, f"[{section}] {key}"
