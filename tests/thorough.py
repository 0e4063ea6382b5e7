"""How much the tests try: a share each time, everything where `ECHO_THOROUGH` is set, as `make nightly` and `make chaos` do."""

from __future__ import annotations

import os

import pytest

IS_THOROUGH = bool(os.environ.get("ECHO_THOROUGH"))
only_thorough = pytest.mark.skipif(not IS_THOROUGH, reason="too long for each time: `make nightly` runs it")
# A quarter of the examples, the same ones each time, costs a quarter of the time; others, and many more, are for a thorough run.
_SHARE, _THOROUGH = 4, 10


def examples(number: int) -> int:
    """How many generated examples a property is tried with; `number`: as many as are worth the time of whoever changes its subject."""
    return number * _THOROUGH if IS_THOROUGH else max(5, number // _SHARE)
