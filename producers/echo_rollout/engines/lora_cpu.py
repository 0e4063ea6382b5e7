"""LoRA on the CPU without copying weights per token; imported by the worker extension (`vllm_worker`). Imports vllm.

vLLM's own CPU functions gather a copy of the adapter's weights for every token of the batch, and give tokens without an adapter (index −1)
the last slot's. Here each adapter present in the batch is one matrix product over its own tokens, and tokens without one get nothing. GPU
kernels are not touched. Importing this module replaces the functions, before the worker loads its model.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import vllm.lora.ops.torch_ops as exported
import vllm.lora.ops.torch_ops.lora_ops as lora_ops
import vllm.lora.punica_wrapper.punica_cpu as punica_cpu
from torch import Tensor


def _groups(indices: Tensor) -> Iterator[tuple[int, Tensor | None]]:
    """The adapters present and the rows of each; None for all rows."""
    first = int(indices[0])
    if bool((indices == first).all()):
        yield first, None
        return
    for index in indices.unique().tolist():
        yield index, (indices == index).nonzero().squeeze(1)


def _product(inputs: Tensor, weights: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """inputs [B, i] times the transposed weights [o, i] of each row's adapter: [B, o]; zero for rows without one."""
    if weights.dim() == 4:
        weights = weights.squeeze(1)
    inputs = inputs.to(dtype)
    found: Tensor | None = None
    for index, rows in _groups(indices):
        if rows is None and index >= 0:
            return inputs @ weights[index].to(dtype).T
        if found is None:
            found = inputs.new_zeros(inputs.shape[0], weights.shape[1])
        if index >= 0:
            found[rows] = inputs[rows] @ weights[index].to(dtype).T
    assert found is not None
    return found


def bgmv_shrink(inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, scaling: float = 1.0) -> None:
    """output[:, :rank] = scaling · inputs · Aᵀ."""
    outputs = _product(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    output_tensor[:, : outputs.shape[1]] = outputs if scaling == 1.0 else scaling * outputs


def bgmv_expand(
    inputs: Tensor, lora_b_weights: Tensor, output_tensor: Tensor, lora_indices_tensor: Tensor, add_inputs: bool = True
) -> None:
    """output (+)= inputs · Bᵀ, over the columns that both have."""
    outputs = _product(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    limit = 1 if outputs.shape[0] == 1 and output_tensor.shape[0] != 1 else output_tensor.shape[0]
    width = min(outputs.shape[1], output_tensor.shape[1])
    _put(output_tensor[:, :width], outputs[:limit, :width], add_inputs)


def bgmv_expand_slice(
    inputs: Tensor,
    lora_b_weights: Tensor,
    output_tensor: Tensor,
    lora_indices_tensor: Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """The same over the columns [slice_offset, slice_offset + slice_size)."""
    outputs = _product(inputs, lora_b_weights, lora_indices_tensor, output_tensor.dtype)
    _put(output_tensor[:, slice_offset : slice_offset + slice_size], outputs, add_inputs)


def _put(target: Tensor, values: Tensor, add: bool) -> None:
    if add:
        target += values
    else:
        target[:] = values


for _module in (lora_ops, exported, punica_cpu):
    for _function in (bgmv_shrink, bgmv_expand, bgmv_expand_slice):
        setattr(_module, _function.__name__, _function)
