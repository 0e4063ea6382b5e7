"""Unit tests wait for nothing outside the process: one that takes minutes hangs, and ends sooner than what starts processes may."""

from __future__ import annotations

from pathlib import Path

import pytest

_UNIT_S = 180
"""Seconds of one test: a hundred times the slowest on quiet cores."""
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_UNIT_S))
