"""`[learner] compile`: a model's layers as programs of torch.compile, which joins the many small operations between matrix products.

Layer by layer, because all of them are one program, and because what the learner does around them (pieces of the head, gradient
checkpointing) stays as it is. Batches differ in rows and length, so both are variables of the program. Imports torch.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch

from echo_schemas.errors import UserError

# Programs of one layer: with and without gradient, with and without adapter, a batch of one row, layers of other kinds (as Gemma has).
_MOST_PROGRAMS = 64
_OFF = "Write [learner] compile = false."


def compile_layers(causal_lm: Any) -> None:
    """Compile each layer of `causal_lm`, a model of transformers with or without an adapter, at its first call.

    Raises UserError if this machine has no compiler, or the model no list of layers.
    """
    if not _has_compiler():
        raise UserError("[learner] compile is true, and this machine has no C compiler.", hint=f"Install gcc, for a CPU also g++. {_OFF}")
    language_model = causal_lm.get_base_model() if hasattr(causal_lm, "get_base_model") else causal_lm
    layers = getattr(language_model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise UserError(f"The layers of a model of the type {language_model.config.model_type} cannot be compiled one by one.", hint=_OFF)
    # Above it torch goes on without compiling, and says so in a warning only.
    torch._dynamo.config.recompile_limit = _MOST_PROGRAMS  # noqa: SLF001  its public place
    for layer in layers:
        layer.compile(dynamic=True)


def _has_compiler() -> bool:
    """For CUDA it compiles launchers of kernels, in C; for a CPU the kernels themselves, in C++."""
    own, *others = ("CC", "gcc", "cc", "clang") if torch.cuda.is_available() else ("CXX", "g++", "clang++")
    return any(shutil.which(name) for name in (os.environ.get(own), *others) if name)
