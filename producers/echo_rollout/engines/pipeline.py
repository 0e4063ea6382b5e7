"""One model over several unequal devices: vLLM's pipeline parallelism with stages of different sizes, planned by `echo_core.layer_split`.

vLLM reads from VLLM_PP_LAYER_PARTITION how many layers each stage has, and stage i runs on the i-th device that CUDA_VISIBLE_DEVICES shows.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from echo_core.layer_split import Device, LayerSplit, ModelSize, split_layers
from echo_rollout.engines.fitting import Shapes, base_shapes
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

PARTITION, VISIBLE = "VLLM_PP_LAYER_PARTITION", "CUDA_VISIBLE_DEVICES"
LAYER = re.compile(r"\.layers\.(\d+)\.")
"""In the name of a tensor: the number of its layer."""
_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"
_BYTES = {"float32": 4}
_HALF_BYTES = 2
# What the plan decides.
_PLANNED = ("pipeline_parallel_size", "tensor_parallel_size")


def plan_split(base: Path, dtype: str, devices: tuple[Device, ...]) -> LayerSplit:
    """Which layers of the model in the folder `base` each of the worker's devices holds.

    Raises UserError if they have no room for it, or the model's files do not show its layers.
    """
    return split_layers(devices, model_size(base_shapes(base), dtype))


def model_size(shapes: Shapes, dtype: str) -> ModelSize:
    """From the names and shapes of its tensors. Tied embeddings are held twice: by the first stage and by the last.

    Raises UserError for a model without `….layers.<number>.…`.
    """
    layers: Counter[int] = Counter()
    ends = {_HEAD: 0, _EMBEDDING: 0}
    for name, shape in shapes.items():
        found = LAYER.search(name)
        if found:
            layers[int(found[1])] += math.prod(shape)
        for end in ends:
            ends[end] += math.prod(shape) if name.endswith(end) else 0
    if not layers or not ends[_EMBEDDING]:
        raise UserError(
            "[rollout] devices: the model's files name no `layers.<number>` or no `embed_tokens`.",
            hint="Leave devices out for this model, or set pipeline_parallel_size in [rollout.options].",
        )
    return ModelSize(
        num_layers=max(layers) + 1,
        layer=max(layers.values()),
        embedding=ends[_EMBEDDING],
        head=ends[_HEAD] or ends[_EMBEDDING],
        bytes_per_parameter=_BYTES.get(dtype, _HALF_BYTES),
    )


def stage_arguments(split: LayerSplit, options: Mapping[str, object]) -> dict[str, Any]:
    """Of vLLM's EngineArgs. Raises UserError for options that would divide the model otherwise."""
    for name in _PLANNED:
        if name in options:
            raise UserError(f"[rollout] devices and {name} in [rollout.options] exclude one another.", hint="Leave one of them out.")
    if len(split.stages) == 1:
        return {}
    return {"pipeline_parallel_size": len(split.stages), "distributed_executor_backend": "mp"}


def set_stages(split: LayerSplit, *, num_gpus: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Tell vLLM by the environment, before it starts its processes. `num_gpus`: that this process sees; 0: the stages share the CPU.

    Raises UserError if a device of the plan is not there.
    """
    used = [stage.device for stage in split.stages]
    if num_gpus:
        if max(used) >= num_gpus:
            raise UserError(
                f"[rollout] devices names at least {max(used) + 1} devices, and this worker sees {num_gpus}.",
                hint="Describe those that CUDA_VISIBLE_DEVICES shows, in its order.",
            )
        visible = environ.get(VISIBLE, "").split(",")
        environ[VISIBLE] = ",".join(visible[device] if len(visible) == num_gpus else str(device) for device in used)
    environ[PARTITION] = ",".join(map(str, split.layer_counts))
    for number, stage in enumerate(split.stages):
        logger.info("Stage %d: layers %d to %d on device %d of [rollout] devices", number, stage.start, stage.end - 1, stage.device)
