"""The learner's log-probabilities are those of the model's own forward pass, whatever a family does after its head."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.forks.process import ForkingProcess, Refused

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "mixtral", "qwen3_moe"),
    *("gemma2", "gemma3_text", "granite", "hyperclovax", "cohere"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_models_own(torch_process: ForkingProcess, tmp_path: Path, family: str) -> None:
    difference = torch_process.run("family_difference", family=family, dtype="float32", folder=str(tmp_path / "model"))
    assert difference < 1e-5


def test_a_scaled_and_a_capped_head_in_bfloat16(torch_process: ForkingProcess, tmp_path: Path) -> None:
    for family in ("granite", "gemma2"):
        difference = torch_process.run("family_difference", family=family, dtype="bfloat16", folder=str(tmp_path / family))
        assert difference < 0.1, family


def test_a_head_that_nobody_knows_is_refused_by_name(torch_process: ForkingProcess, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"the type llama changes its logits after the head in a way.*Choose another \[policy\] base"):
        torch_process.run("load_with_shifted_logits", folder=str(tmp_path / "model"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_of_experts_is_published_as_its_own_files_are(torch_process: ForkingProcess, tmp_path: Path, family: str) -> None:
    base, first, again = (str(tmp_path / name) for name in ("base", "first", "again"))
    torch_process.run("write_family", family=family, folder=base)
    full = {"base": base, "settings": {"kind": "full"}}
    _, sha256 = torch_process.run("train", script=[["step", 1, 1], ["snapshot", first]], **full)
    shapes = [{name: tensor.shape for name, tensor in load_file(Path(folder) / "model.safetensors").items()} for folder in (base, first)]
    assert shapes[0] == shapes[1]
    assert any(".experts.1." in name for name in shapes[1]), "in memory the experts are one tensor"
    trained, untrained = (load_file(Path(folder) / "model.safetensors") for folder in (first, base))
    assert any((trained[name] != untrained[name]).any() for name in trained if ".experts.1." in name)
    # A fork begins from it, and publishes the same.
    assert torch_process.run("train", script=[["load_weights", first], ["snapshot", again]], **full)[1] == sha256


def test_an_adapter_of_a_mixture_leaves_the_experts_alone(torch_process: ForkingProcess, tmp_path: Path) -> None:
    """No engine serves one on tensors that hold all experts."""
    base, folder = str(tmp_path / "base"), tmp_path / "adapter"
    torch_process.run("write_family", family="qwen3_moe", folder=base)
    torch_process.run("train", base=base, script=[["step", 1, 1], ["snapshot", str(folder)]])
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in load_file(folder / "adapter_model.safetensors")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_weights_that_would_lie_in_other_files_than_the_base_s_are_refused(torch_process: ForkingProcess, tmp_path: Path) -> None:
    base = tmp_path / "base"
    torch_process.run("write_family", family="qwen3_moe", folder=str(base))
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.experts.0.extra.weight"] = next(iter(tensors.values()))
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    with pytest.raises(Refused, match=r"cannot be published as its files have them: model.layers.0.mlp.experts.0.extra.weight"):
        torch_process.run("train", base=str(base), script=[], settings={"kind": "full"})
