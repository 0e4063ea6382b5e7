"""Starts DeepSpeed: environment, settings, engine.

The environment must be complete before the import, or DeepSpeed looks for MPI and ends the process.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echo_learner.training.learning_rate import LearningRate
from echo_schemas.errors import UserError

# Steps between DeepSpeed's own log lines: none.
_NEVER = 1 << 60
_STAGES = (0, 1, 2, 3)
_FLOAT32 = "fp32"
# From this stage on gradients are spread over ranks, and DeepSpeed accumulates them in `grad_accum_dtype`.
_FIRST_STAGE_WITH_SUMS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The process's rank, the number of ranks and the address where they meet."""

    rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    local_rank: int = 0

    def environment(self) -> dict[str, str]:
        """The variables that torch and DeepSpeed read."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Settings of AdamW. `deepspeed`: a JSON file merged over our settings, or empty."""

    rate: LearningRate
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    deepspeed: str = ""


def engine_settings(config: OptimizerConfig, dtype: str) -> dict[str, Any]:
    """DeepSpeed's configuration: ours, overridden by the user's file. Raises UserError for a file that cannot be read or is not allowed."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # Every backward() accumulates and every step() is an update: micro-batches are cut by tokens, so their number varies.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": dtype == "bfloat16"},
        # For models of any type: a sum in bfloat16 stops growing once it is 256 times the addend.
        "data_types": {"grad_accum_dtype": _FLOAT32},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": _NEVER,
    }
    if not config.deepspeed:
        return settings
    own = _read_own(config.deepspeed)
    for name in ("optimizer", "scheduler", "train_batch_size", "gradient_accumulation_steps"):
        if name in own:
            raise UserError(
                f"{config.deepspeed} sets {name!r}, which the learner decides.",
                hint="Use [learner] lr, lr_schedule, warmup_steps, weight_decay, micro_batch_tokens, groups_per_step, and leave it out.",
            )
    merged = _merged(settings, own)
    _check(merged, config.deepspeed)
    return merged


def _read_own(path: str) -> dict[str, Any]:
    try:
        own = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UserError(f"The DeepSpeed file {path} cannot be read: {exc}.", hint="[learner] deepspeed names a JSON file.") from exc
    if not isinstance(own, dict):
        raise UserError(f"The DeepSpeed file {path} holds no JSON object.", hint='It looks like {"zero_optimization": {"stage": 2}}.')
    return own


def _check(settings: Mapping[str, Any], path: str) -> None:
    """Raise UserError for values of the wrong type among those that this module reads."""
    zero, clip = settings["zero_optimization"], settings["gradient_clipping"]
    if not isinstance(zero, dict) or zero.get("stage", 0) not in _STAGES:
        raise UserError(f"{path}: zero_optimization must be an object whose stage is 0, 1, 2 or 3, not {json.dumps(zero)}.")
    if isinstance(clip, bool) or not isinstance(clip, int | float) or clip < 0:
        raise UserError(f"{path}: gradient_clipping must be a number of at least 0, not {json.dumps(clip)}.")
    if not all(isinstance(settings.get(name, {}), dict) for name in ("bf16", "fp16", "data_types")):
        raise UserError(f"{path}: bf16, fp16 and data_types must be objects.")
    if settings.get("fp16", {}).get("enabled"):
        raise UserError(f"{path} asks for fp16, which the learner does not train in.", hint='Set [policy] dtype = "bfloat16".')


class Engine:
    """A DeepSpeed engine and the gradient norm of its last update, before clipping.

    Without ZeRO and in float32 DeepSpeed clips but does not return the norm, so a hook of the optimizer does both, after gradients are
    summed over ranks and before they are applied.
    """

    def __init__(self, engine: Any, trained: Sequence[nn.Parameter], own_clip: float | None, sums: Float32Sums | None) -> None:
        self.deepspeed = engine
        self._sums = sums
        self._norm: float | None = None
        if own_clip is not None:

            def clip(*_: Any) -> None:
                self._norm = float(torch.nn.utils.clip_grad_norm_(trained, own_clip, foreach=True))

            engine.optimizer.register_step_pre_hook(clip)

    def step(self) -> None:
        """Update the weights with the gradients since the last update."""
        if self._sums is not None:
            self._sums.hand_over()
        self.deepspeed.step()

    @property
    def grad_norm(self) -> float:
        """The norm of the last update; NaN if there was none."""
        norm = self.deepspeed.get_global_grad_norm() if self._norm is None else self._norm
        return math.nan if norm is None else float(norm)


class Float32Sums:
    """Takes the gradients of parameters in bfloat16 after each backward pass and adds them up in float32. One thread uses it."""

    def __init__(self, trained: Sequence[nn.Parameter]) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._take)

    def hand_over(self) -> None:
        """Set the parameters' gradients to the sums, rounded once, and begin anew."""
        for parameter, total in self._sums.items():
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()

    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.float()
        parameter.grad = None


def start_engine(model: nn.Module, settings: Mapping[str, Any], config: OptimizerConfig, place: RankPlace) -> Engine:
    """An engine around `model`, whose trainable parameters it optimises. Sets this process's distributed environment.

    Raises UserError if DeepSpeed refuses the user's file.
    """
    os.environ.update(place.environment())
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    if not torch.cuda.is_available():
        # One process or gloo needs no shared-memory kernel, which takes a minute to compile.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.rate.lr, weight_decay=config.weight_decay, foreach=True)
    stage, is_short = settings["zero_optimization"].get("stage", 0), settings["bf16"]["enabled"]
    is_plain = stage == 0 and not is_short
    given = {**settings, "gradient_clipping": 0.0} if is_plain else dict(settings)
    sums = None
    if stage < _FIRST_STAGE_WITH_SUMS:
        # DeepSpeed accumulates in the model's type there; with another type it refuses, or takes another optimizer.
        given["data_types"] = {name: value for name, value in settings["data_types"].items() if name != "grad_accum_dtype"}
        if is_short and settings["data_types"].get("grad_accum_dtype") == _FLOAT32:
            sums = Float32Sums(trained)
    try:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=trained, config=given)
    except (ValueError, TypeError, KeyError, AssertionError, NotImplementedError) as exc:
        if not config.deepspeed:
            raise
        raise UserError(f"DeepSpeed refuses {config.deepspeed}: {exc}", hint="Compare with its page on configuration.") from exc
    return Engine(engine, trained, settings["gradient_clipping"] if is_plain else None, sums)


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(ours)
    for name, value in theirs.items():
        below = merged.get(name)
        merged[name] = _merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged
