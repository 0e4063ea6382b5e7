"""The page on architecture names modules and classes that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
FOLDERS = ("schemas", "infra", "producers", "streams", "consumers", "tests")
PATHS = [f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
CODE = "".join(path.read_text(encoding="utf-8") for folder in FOLDERS[:-1] for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_/]+(?:\.py|/))`", PAGE))))
def test_every_module_that_is_named_exists(name: str) -> None:
    assert any(path.endswith(f"/{name}") for path in PATHS)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Z][a-z]+[A-Za-z]+)[.`]", PAGE))))
def test_every_class_that_is_named_exists(name: str) -> None:
    assert re.search(rf"class {name}\b", CODE)
