"""The libraries of the extra `analysis`, which not every installation has."""

from __future__ import annotations

from importlib.util import find_spec

from echo_schemas.errors import UserError


def require_analysis(*modules: str) -> None:
    """Raises UserError if one of `modules` is not installed. None is imported."""
    for module in modules:
        if find_spec(module) is None:
            raise UserError(f"This needs {module}, which is not installed.", hint="Install the extra: pip install 'echoswarm[analysis]'.")
