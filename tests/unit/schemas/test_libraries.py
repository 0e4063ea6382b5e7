"""A library that is not installed is named, with what to type."""

from __future__ import annotations

import json

import pytest

from echo_schemas.errors import UserError
from echo_schemas.libraries import TASKS, is_installed, require_libraries


def test_a_library_that_is_missing_is_named_with_the_extra_that_has_it() -> None:
    require_libraries("The task 'math'", "json", install=TASKS)
    with pytest.raises(UserError, match=r"The task 'math' needs the library 'no_such_library', .*pip install 'echoswarm\[tasks\]'"):
        require_libraries("The task 'math'", "json", "no_such_library", install=TASKS)


def test_an_imported_module_without_a_spec_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "__spec__", None)
    assert is_installed("json")
