"""Maps a model's parameters to the tensors in its files, which differ where transformers fuses several into one. Imports torch.

    in memory   experts.gate_up_proj [E, 2·I, H]
    in files    experts.0.gate_proj.weight [I, H], experts.0.up_proj.weight [I, H], experts.1.gate_proj.weight …

A mixture of experts is fused when it is loaded. Snapshots are written as the base's own files are, so that every engine loads them as it
loads the base.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_learner.training.weight_file import Slot, differing_names, stored_shapes
from echo_schemas.errors import UserError

_TIED = "lm_head.weight"


class StoredForm:
    """The stored tensors of all trained parameters of one model, by the parameters' names in the model."""

    def __init__(self, causal_lm: Any, parameters: Mapping[str, Slot], base: Path) -> None:
        """`parameters`: their slots in memory. Raises UserError if the files of `base` hold other tensors than would be written."""
        self._model = causal_lm
        self._slots = {name: self._parts_of(slot) for name, slot in parameters.items()}
        if self.is_fused:
            _refuse_others(base, self.shapes)

    @property
    def is_fused(self) -> bool:
        """Whether any parameter lies in the files as several tensors or under another name."""
        return any([part.name for part in parts] != [name] for name, parts in self._slots.items())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor in a file."""
        return {part.name: part.shape for parts in self._slots.values() for part in parts}

    def slots(self, name: str) -> list[Slot]:
        """The tensors of a parameter."""
        return self._slots[name]

    def tensors(self, name: str, parameter: Tensor) -> list[Tensor]:
        """The tensors of `slots(name)`; views where that is possible."""
        slots = self._slots[name]
        if len(slots) == 1 and tuple(parameter.shape) == slots[0].shape:
            return [parameter]
        parts = self._reverted(name, parameter.detach())
        return [parts[slot.name] for slot in slots]

    def _parts_of(self, slot: Slot) -> list[Slot]:
        parts = self._reverted(slot.name, torch.empty(slot.shape, dtype=slot.dtype, device="meta"))
        return [Slot(name, slot.dtype, tuple(part.shape)) for name, part in parts.items()]

    def _reverted(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        # Releases before transformers 5 fuse nothing.
        if importlib.util.find_spec("transformers.core_model_loading") is None:
            return {name: tensor}
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, Tensor] = revert_weight_conversion(self._model, {name: tensor})
        return found


def fused_tensors(folder: Path) -> Callable[[str], Tensor]:
    """A function that returns a parameter of the model in `folder` by its name in memory; loads the whole model."""
    from transformers import AutoModelForCausalLM

    state: dict[str, Tensor] = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True).state_dict()
    return state.__getitem__


def _refuse_others(base: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    from safetensors import safe_open

    own: dict[str, tuple[int, ...]] = {}
    for file in sorted(base.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            own |= stored_shapes(opened)
    if differing := [name for name in differing_names(own, shapes) if name != _TIED]:
        name = differing[0]
        raise UserError(
            f"The weights of {base} cannot be published as its files have them: {name} has the shape {own.get(name)} there and would have "
            f"{shapes.get(name)} ({len(differing)} differ).",
            hint='Set [policy] update = "lora".',
        )
