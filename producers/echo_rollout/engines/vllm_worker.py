"""What EchoSwarm adds to vLLM's worker: quick LoRA on the CPU, pipeline stages there, and a reload of all weights that is checked. Imports
vllm.

vLLM imports this module, named by `worker_extension_cls`, before it loads the model, and mixes the class into its worker.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from echo_rollout.engines.pipeline import LAYER

if not torch.cuda.is_available():
    import echo_rollout.engines.lora_cpu  # noqa: F401  importing it replaces the functions

logger = logging.getLogger(__name__)

# Rows of random numbers put through a packed layer, whose weights cannot be read back.
_PROBE_ROWS = 2
_RELATIVE_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class WorkerExtension:
    """Methods that `collective_rpc` calls by name, so that no code travels between processes."""

    def echo_check(self) -> str:
        """Proves that this class is mixed in."""
        return "ok"

    def echo_prepare_stage(self) -> list[int]:
        """Make the tensors that take what the stage before computed; returns the layers that this stage holds. A GPU's runner makes them
        in its trial run; a CPU's has none, and its first batch would fail."""
        worker: Any = self
        runner = worker.model_runner
        if not torch.cuda.is_available() and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )
        found = (LAYER.search(name) for name, _ in runner.get_model().named_parameters())
        return sorted({int(layer[1]) for layer in found if layer})

    def echo_reload(self, folder: str) -> str:
        """Load all weights in `folder`; returns what is wrong with the result, or an empty text."""
        worker: Any = self
        weights: dict[str, Tensor] = {}
        for file in sorted(Path(folder).glob("model*.safetensors")):
            weights |= safetensors.torch.load_file(file)
        if not torch.cuda.is_available() and any(".experts." in name for name in weights):
            # vLLM would go on computing with packed copies of the old weights.
            return 'vLLM does not load the weights of experts anew on a processor: use the engine "transformers", or update = "lora"'
        worker.reload_weights(weights_path=folder)
        model = worker.model_runner.get_model()
        _repack_tied_head(model)
        with torch.inference_mode():
            return next(differences(model, weights), "")


def _repack_tied_head(model: Any) -> None:
    """On a CPU a reload leaves the packed copy of tied embeddings in the output layer as it was."""
    head: Any = getattr(model, "lm_head", None)
    head = getattr(head, "base_layer", head)
    if not getattr(model.config, "tie_word_embeddings", False) or not hasattr(head, "cpu_linear"):
        return
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    dispatch_cpu_unquantized_gemm(head, remove_weight=False)


def differences(model: Any, weights: Mapping[str, Tensor]) -> Iterator[str]:
    """A sentence for each layer that does not hold, or does not compute with, its weights [out, in] of the file."""
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    compared = 0
    for name, module in model.named_modules():
        wanted = _wanted(name, weights, packed)
        loaded = getattr(module, "weight", None)
        if wanted is None or not isinstance(loaded, Tensor):
            continue
        if loaded.shape == wanted.shape:
            compared += 1
            if not torch.equal(loaded.detach(), wanted.to(loaded.device, loaded.dtype)):
                yield f"{name} does not hold the weights of the file"
        linear = getattr(module, "cpu_linear", None)
        if linear is not None and wanted.dim() == 2:
            compared += 1
            if not _computes(linear, loaded, wanted):
                yield f"{name} does not compute with the weights of the file"
    if not compared:
        yield "no layer could be compared with the file"


def _wanted(name: str, weights: Mapping[str, Tensor], packed: Mapping[str, Sequence[str]]) -> Tensor | None:
    prefix, _, leaf = name.rpartition(".")
    names = [f"{prefix}.{part}.weight" if prefix else f"{part}.weight" for part in packed.get(leaf, (leaf,))]
    if names == [_HEAD] and _HEAD not in weights:
        names = [_EMBEDDING]
    parts = [weights[part] for part in names if part in weights]
    if len(parts) != len(names):
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _computes(linear: Any, loaded: Tensor, wanted: Tensor) -> bool:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_PROBE_ROWS, wanted.shape[1], generator=generator).to(loaded.dtype)
    found = linear(probe, loaded, None)[:, : wanted.shape[0]].float()
    expected = probe.float() @ wanted.to(loaded.dtype).float().T
    return bool((found - expected).norm() <= _RELATIVE_DIFFERENCE.get(loaded.dtype, 3e-2) * expected.norm())
