"""A model's size read from its files, and what vLLM is told of the plan. No vLLM."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from echo_core.layer_split import Device, LayerSplit, Stage
from echo_rollout.engines.pipeline import model_size, plan_split, set_stages, stage_arguments
from echo_schemas.errors import UserError
from tests.unit.engines.weights import BASE, write_tensors

TWO = LayerSplit((Stage(1, 0, 2), Stage(0, 2, 3)), 1.0)


def test_sizes_are_read_from_names_and_shapes() -> None:
    size = model_size({**BASE, "model.layers.1.mlp.up_proj.weight": (9, 9), "model.layers.11.mlp.up_proj.weight": (1, 1)}, "bfloat16")
    assert (size.num_layers, size.layer, size.embedding, size.head, size.bytes_per_parameter) == (12, 81, 40, 40, 2)
    assert model_size({**BASE, "lm_head.weight": (10, 8)}, "float32").head == 80


def test_a_model_of_other_names_is_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match="name no") as raised:
        model_size({"transformer.h.0.attn.weight": (4, 4)}, "float32")
    assert "pipeline_parallel_size" in raised.value.hint


def test_a_plan_is_made_from_the_model_s_files(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors", {**BASE, "model.layers.1.mlp.up_proj.weight": (6, 4)})
    assert plan_split(tmp_path, "float32", (Device(memory_gb=1, tflops=1),)).stages == (Stage(0, 0, 2),)
    with pytest.raises(UserError, match="do not fit"):
        plan_split(tmp_path, "float32", (Device(memory_gb=1e-8, tflops=1),))
    with pytest.raises(UserError, match="cannot be read"):
        plan_split(tmp_path / "none", "float32", (Device(memory_gb=1, tflops=1),))


def test_vllm_is_told_the_stages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    environ: dict[str, str] = {}
    assert stage_arguments(TWO, {}) == {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
    set_stages(TWO, num_gpus=0, environ=environ)
    assert environ == {"VLLM_PP_LAYER_PARTITION": "2,1"}
    assert "Stage 0: layers 0 to 1 on device 1" in caplog.text


def test_one_stage_is_no_pipeline() -> None:
    assert stage_arguments(LayerSplit((Stage(0, 0, 3),), 1.0), {}) == {}


@pytest.mark.parametrize(("visible", "shown"), [("", "1,0"), ("4,7,9", "7,4"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-a")])
def test_each_stage_gets_the_device_that_it_was_planned_for(visible: str, shown: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    set_stages(TWO, num_gpus=3, environ=environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == shown


def test_a_device_that_is_not_there_is_refused() -> None:
    environ: dict[str, str] = {}
    with pytest.raises(UserError, match="names at least 2 devices, and this worker sees 1"):
        set_stages(TWO, num_gpus=1, environ=environ)
    assert not environ


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_two_plans_exclude_one_another(option: str) -> None:
    with pytest.raises(UserError, match=option):
        stage_arguments(TWO, {option: 2})
