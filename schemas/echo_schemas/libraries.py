"""Libraries that not every machine has: whether one is installed, and the error if it is not."""

from __future__ import annotations

import importlib.util
import sys

from echo_schemas.errors import UserError

ANALYSIS = "'echoswarm[analysis]'"
LEARNER = "'echoswarm[learner]'"
SIGNATURES = "'echoswarm[signatures]'"
TASKS = "'echoswarm[tasks]'"


def is_installed(module: str) -> bool:
    """Whether `module` can be imported. It is not imported: that may take seconds."""
    # Faust removes the spec of its own module, and `find_spec` raises ValueError for an imported module without one.
    return module in sys.modules or importlib.util.find_spec(module) is not None


def require_libraries(what: str, *modules: str, install: str) -> None:
    """Raise UserError if one of `modules`, which `what` needs, is not installed. `install` is as in `library_missing`."""
    for module in modules:
        if not is_installed(module):
            raise library_missing(what, module, install)


def library_missing(what: str, module: str | None, install: str) -> UserError:
    """The error for `what`, which needs `module`. `install` follows `pip install` in the hint, and may name a way without the library."""
    return UserError(f"{what} needs the library {module!r}, which is not installed here.", hint=f"pip install {install}")
