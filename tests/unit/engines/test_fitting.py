"""Snapshots that do not fit are refused with a sentence, from names and shapes alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from echo_rollout.engines.engine import Snapshot, SnapshotRejected
from echo_rollout.engines.fitting import check_fit, weight_shapes
from tests.unit.engines.weights import (
    BASE,
    HIDDEN,
    INNER,
    MAX_RANK,
    PREFIX,
    QUERY,
    RANK,
    UP,
    adapter_shapes,
    write_adapter,
    write_tensors,
    write_weights,
)


def refusal(snapshot: Snapshot) -> str:
    with pytest.raises(SnapshotRejected) as raised:
        check_fit(snapshot, BASE, max_rank=MAX_RANK)
    assert str(raised.value).startswith("Version 5 does not fit the base model: ")
    return str(raised.value)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "F64"])
def test_an_adapter_that_fits_passes_in_any_floating_type(tmp_path: Path, dtype: str) -> None:
    check_fit(write_adapter(tmp_path, adapter_shapes(), dtype=dtype), BASE, max_rank=MAX_RANK)


def test_an_adapter_of_some_layers_passes(tmp_path: Path) -> None:
    some = {name: shape for name, shape in adapter_shapes().items() if QUERY in name}
    check_fit(write_adapter(tmp_path, some), BASE, max_rank=MAX_RANK)


def test_a_rank_above_the_engine_s_is_refused(tmp_path: Path) -> None:
    too_high = MAX_RANK + 1
    assert f"its rank {too_high} is above the engine's {MAX_RANK}" in refusal(
        write_adapter(tmp_path, adapter_shapes(too_high), rank=too_high)
    )


def test_a_rank_that_is_not_the_tensors_is_refused(tmp_path: Path) -> None:
    message = refusal(write_adapter(tmp_path, adapter_shapes(RANK), rank=RANK + 1))
    assert f"has the shape ({RANK}, {HIDDEN}), and the base needs ({RANK + 1}, {HIDDEN})" in message


def test_a_target_module_that_the_base_does_not_have_is_refused(tmp_path: Path) -> None:
    other = f"{PREFIX}model.layers.1.mlp.up_proj"
    shapes = {**adapter_shapes(), f"{other}.lora_A.weight": (RANK, HIDDEN), f"{other}.lora_B.weight": (INNER, RANK)}
    assert f"the base has no layer for its tensor {other}.lora_A.weight" in refusal(write_adapter(tmp_path, shapes))


def test_layers_that_are_not_linear_and_tensors_that_are_not_lora_are_refused(tmp_path: Path) -> None:
    for name, shape in (
        ("model.norm.lora_A.weight", (RANK, HIDDEN)),
        ("model.embed_tokens.lora_embedding_A", (RANK, 10)),
        (f"{QUERY}.lora_magnitude_vector", (HIDDEN,)),
        (f"{QUERY}.bias", (HIDDEN,)),
    ):
        assert "the base has no layer for its tensor" in refusal(write_adapter(tmp_path, {**adapter_shapes(), PREFIX + name: shape}))


def test_a_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    shapes = {**adapter_shapes(), f"{PREFIX}{UP}.lora_B.weight": (INNER - 1, RANK)}
    assert f"has the shape ({INNER - 1}, {RANK}), and the base needs ({INNER}, {RANK})" in refusal(write_adapter(tmp_path, shapes))


@pytest.mark.parametrize("half", ["A", "B"])
def test_half_a_pair_is_refused(tmp_path: Path, half: str) -> None:
    shapes = adapter_shapes()
    del shapes[f"{PREFIX}{UP}.lora_{half}.weight"]
    assert f"is there without {PREFIX}{UP}.lora_{half}.weight" in refusal(write_adapter(tmp_path, shapes))


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    assert "holds I8 numbers" in refusal(write_adapter(tmp_path, adapter_shapes(), dtype="I8"))
    assert "holds I8 numbers" in refusal(write_weights(tmp_path, BASE, dtype="I8"))


def test_an_adapter_without_tensors_or_with_an_empty_one_is_refused(tmp_path: Path) -> None:
    assert "it holds no tensor" in refusal(write_adapter(tmp_path, {}))
    assert "has an empty tensor" in refusal(write_adapter(tmp_path, {**adapter_shapes(), "x": (0, 3)}))


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    snapshot = write_adapter(tmp_path, adapter_shapes())
    file, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    whole = file.read_bytes()
    for content in (whole[:-1], whole + b"x", whole[:20], b"", struct.pack("<Q", 4) + b"{{{{"):
        file.write_bytes(content)
        assert "its files cannot be read: adapter_model.safetensors is no whole safetensors file" in refusal(snapshot)
    file.write_bytes(whole)
    for text in ("", "[]", "{}", json.dumps({"r": "two"})):
        config.write_text(text)
        assert "its files cannot be read" in refusal(snapshot)
    config.unlink()
    assert "its files cannot be read" in refusal(snapshot)


def test_full_weights_must_be_the_base_s_tensors(tmp_path: Path) -> None:
    check_fit(write_weights(tmp_path, BASE), BASE, max_rank=0)
    short = {name: shape for name, shape in BASE.items() if "norm" not in name}
    assert "it lacks 1 of the model's 4 tensors, model.norm.weight for one" in refusal(write_weights(tmp_path, short))
    assert "the base has no tensor extra.weight" in refusal(write_weights(tmp_path, {**BASE, "extra.weight": (3,)}))
    assert "model.norm.weight has the shape (5,), and the base has (4,)" in refusal(
        write_weights(tmp_path, {**BASE, "model.norm.weight": (5,)})
    )


def test_a_tied_head_may_be_written_or_left_out(tmp_path: Path) -> None:
    head = {"lm_head.weight": (10, HIDDEN)}
    check_fit(write_weights(tmp_path, {**BASE, **head}), BASE, max_rank=0)
    check_fit(write_weights(tmp_path, BASE), {**BASE, **head}, max_rank=0)


def test_weights_in_several_files_are_read_together(tmp_path: Path) -> None:
    names = sorted(BASE)
    write_tensors(tmp_path / "model-00001-of-00002.safetensors", {name: BASE[name] for name in names[:2]})
    write_tensors(tmp_path / "model-00002-of-00002.safetensors", {name: BASE[name] for name in names[2:]}, dtype="I8")
    assert weight_shapes(tmp_path) == BASE
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        weight_shapes(tmp_path / "elsewhere")
