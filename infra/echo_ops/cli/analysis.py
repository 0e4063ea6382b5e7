"""The libraries of the extras for analysts, which not every installation has."""

from __future__ import annotations

from importlib.util import find_spec

from echo_schemas.errors import UserError


def require_analysis(*modules: str, extra: str = "analysis") -> None:
    """Raises UserError if one of `modules` is not installed. None is imported."""
    for module in modules:
        if find_spec(module) is None:
            raise UserError(f"This needs {module}, which is not installed.", hint=f"Install the extra: pip install 'echoswarm[{extra}]'.")
