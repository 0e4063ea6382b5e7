"""The libraries of the extras `analysis` and `lakehouse`, which not every installation has."""

from __future__ import annotations

from importlib.util import find_spec

from echo_schemas.errors import UserError


def require_analysis(*modules: str, extra: str = "analysis") -> None:
    """Raise UserError if one of `modules` is not installed. Imports none of them."""
    for module in modules:
        if find_spec(module) is None:
            raise UserError(f"This needs {module}, which is not installed.", hint=f"Install the extra: pip install 'echoswarm[{extra}]'.")
