"""A user's own loss, found by import path and checked for the contract of the built-in ones."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from echo_learner.losses.config import CustomLoss
from echo_learner.losses.interface import LossInputs, LossOutputs
from echo_schemas.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckedLoss:
    """Calls a user's function with its options and checks what it returns."""

    path: str
    function: Callable[..., object]
    options: Mapping[str, object] = field(default_factory=dict)

    def __call__(self, batch: LossInputs, /) -> LossOutputs:
        """Raises UserError unless the answer is a LossOutputs with a scalar loss that can train the learner."""
        outputs = self.function(batch, **self.options)
        if not isinstance(outputs, LossOutputs):
            raise UserError(
                f"The loss {self.path} returned {type(outputs).__name__}.",
                hint="It must return a LossOutputs (echo_learner.losses.interface).",
            )
        if outputs.loss.dim() != 0:
            raise UserError(
                f"The loss {self.path} returned a loss of shape {tuple(outputs.loss.shape)}; it must be a scalar.",
                hint="Sum `per_token * batch.token_scales` over the tokens, or call ratios.reduce_loss.",
            )
        if batch.learner.requires_grad and not outputs.loss.requires_grad:
            raise UserError(
                f"The loss {self.path} does not depend on the learner, so nothing would be trained.",
                hint="Do not detach batch.learner everywhere.",
            )
        if outputs.weights.shape != batch.learner.shape or outputs.weights.requires_grad:
            raise UserError(f"The loss {self.path} must return weights of shape {tuple(batch.learner.shape)} without gradient.")
        sums: Mapping[str, object] = outputs.sums  # a user's function may have put anything there
        if any(not isinstance(total, Tensor) or total.dim() != 0 for total in sums.values()):
            raise UserError(f"The sums of the loss {self.path} must be 0-d tensors, one number each.")
        # Sums of every loss, which a user's function may leave out.
        return replace(outputs, sums={"policy_loss": outputs.loss.detach(), "weight": outputs.weights.sum(), **outputs.sums})


def load_custom_loss(custom: CustomLoss) -> CheckedLoss:
    """Import `module:attribute`: a function (batch, **options) -> LossOutputs.

    Raises UserError if it does not exist or cannot be called like this. Other errors inside the user's module are raised as they are.
    """
    module_name, _, attribute = custom.path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise UserError(
            f"The loss {custom.path} cannot be loaded: importing {module_name} failed ({exc}).",
            hint="Install the package that holds it, or add its folder to PYTHONPATH.",
        ) from exc
    function = getattr(module, attribute, None)
    if function is None:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        raise UserError(f"The module {module_name} has no {attribute!r}.", hint=f"Did you mean {near[0]!r}?" if near else "")
    if not callable(function) or inspect.isclass(function):
        raise UserError(f"The loss {custom.path} is not a function (batch, **options) -> LossOutputs.")
    try:
        inspect.signature(function).bind(None, **custom.options)
    except TypeError as exc:
        raise UserError(f"The loss {custom.path} cannot be called as (batch, {', '.join(custom.options) or 'no options'}): {exc}.") from exc
    return CheckedLoss(custom.path, function, custom.options)
