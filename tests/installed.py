"""Which of the packages that a test needs are not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec


def missing(*packages: str) -> list[str]:
    """Those of `packages` that cannot be imported, without importing any. One imported already (Faust then has no spec) is there."""
    return [package for package in packages if package not in sys.modules and find_spec(package) is None]
