"""What the stages of ZeRO (arXiv 1910.02054) do not go with. Pure."""

from __future__ import annotations

from echo_schemas.errors import UserError

SPREAD_WEIGHTS = 3
"""The stage at which each rank holds a part of the weights."""


def check_compile(*, is_wanted: bool, stage: object) -> None:
    """Raise UserError if layers are to be compiled that ZeRO gathers weights inside of."""
    if is_wanted and stage == SPREAD_WEIGHTS:
        raise UserError("[learner] compile does not go with ZeRO-3, which gathers weights inside of layers.", hint="Set compile = false.")
