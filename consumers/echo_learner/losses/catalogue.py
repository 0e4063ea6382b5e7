"""The losses by name: from a name and options in a run's file to a checked config, and from that to a Loss.

`parse_loss` needs no torch, so the supervisor and the command line refuse a wrong name before any process starts.
`build_loss` imports it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from pydantic import TypeAdapter, ValidationError

from echo_learner.losses.config import (
    Cispo,
    CustomLoss,
    DecoupledPpo,
    Dppo,
    GrpoClip,
    GrpoTis,
    Gspo,
    IcePop,
    LossConfig,
    ReferenceKl,
    SequenceMask,
    TokenTis,
)
from echo_schemas.errors import UserError

if TYPE_CHECKING:
    from echo_learner.losses.interface import Loss


DEFAULT_LOSS = "grpo_tis"

_LOSSES: Mapping[str, type[LossConfig]] = {
    DEFAULT_LOSS: GrpoTis,
    "grpo_clip": GrpoClip,
    "cispo": Cispo,
    "token_tis": TokenTis,
    "icepop": IcePop,
    "sequence_mask": SequenceMask,
    "decoupled_ppo": DecoupledPpo,
    "dppo": Dppo,
    "gspo": Gspo,
}
# The name of each config's function in `functions`, which imports torch.
_FUNCTIONS: Mapping[type[LossConfig], str] = {config: name for name, config in _LOSSES.items()} | {TokenTis: "cispo"}


def loss_names() -> tuple[str, ...]:
    """The built-in losses, the default first."""
    return tuple(_LOSSES)


def parse_loss(name: str, options: Mapping[str, object] | None = None) -> LossConfig | CustomLoss:
    """The config of a built-in loss, or a CustomLoss for `module:attribute`.

    Raises UserError, which names the nearest name or option.
    """
    options = options or {}
    module, colon, attribute = name.partition(":")
    if colon:
        if not (attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))):
            raise UserError(f"{name!r} is not an import path.", hint="Write it as 'package.module:function'.")
        return CustomLoss(path=name, options=dict(options))
    config = _LOSSES.get(name)
    if config is None:
        raise UserError(
            f"There is no loss {name!r}.",
            hint=f"{_nearest(name, loss_names())} Your own is named by import path, 'package.module:function'.",
        )
    known = tuple(option.name for option in fields(config))
    for option in options:
        if option not in known:
            raise UserError(f"The loss {name!r} has no option {option!r}.", hint=_nearest(option, known))
    try:
        adapter: TypeAdapter[LossConfig] = TypeAdapter(config)
        return adapter.validate_python(dict(options))
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"The option {where!r} of the loss {name!r} is {first['input']!r}: {first['msg']}.") from exc


def build_loss(config: LossConfig | CustomLoss, reference_kl: ReferenceKl | None = None) -> Loss:
    """The loss that `config` describes, with the KL term around it when its coefficient is above 0. Imports torch."""
    from echo_learner.losses import functions
    from echo_learner.losses.custom import load_custom_loss
    from echo_learner.losses.reference_kl import WithReferenceKl

    loss: Loss
    if isinstance(config, CustomLoss):
        loss = load_custom_loss(config)
    else:
        loss = partial(getattr(functions, _FUNCTIONS[type(config)]), config=config)
    if reference_kl is not None and reference_kl.coef > 0:
        loss = WithReferenceKl(loss, reference_kl)
    return loss


def _nearest(name: str, known: tuple[str, ...]) -> str:
    # What others call by a name's first part is that, not a name with one letter changed.
    begun = [each for each in known if each.startswith(f"{name.lower()}_")]
    near = begun or difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.0)
    return f"Did you mean {near[0]!r}? There are: {', '.join(known)}."
