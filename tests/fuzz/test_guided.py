"""What atheris is led by works without it: the examples pass, and a reader that errs is found."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz import guided


def test_every_example_is_read_alike(tmp_path: Path) -> None:
    guided.write_examples(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) > len(guided._READERS)
    for file in files:
        guided.judge(file.read_bytes())


def test_a_reader_that_errs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(read: Any) -> Any:
        return lambda data, at: dataclasses.replace(read(data, at), run_id="another")

    monkeypatch.setattr(guided, "_READERS", [(record, wrong(read)) for record, read in guided._READERS])
    guided.write_examples(tmp_path)
    first = min(tmp_path.iterdir()).read_bytes()
    with pytest.raises(AssertionError, match="is not"):
        guided.judge(first)
