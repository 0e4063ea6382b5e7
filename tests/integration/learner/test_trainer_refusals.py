"""What ends a trainer, and the sentence it ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks.process import ForkingProcess, Refused
from tests.integration.learner.test_trainer import deepspeed_file

pytestmark = pytest.mark.slow


def refusal(torch_process: ForkingProcess, base: Path, script: list[list[Any]], **arguments: Any) -> str:
    with pytest.raises(Refused) as refused:
        torch_process.run("train", base=str(base), script=script, **arguments)
    return str(refused.value)


@pytest.mark.parametrize(("kind", "ranks", "stage"), [("lora", 1, 0), ("full", 1, 0), ("lora", 2, 0), ("full", 2, 2)])
def test_a_policy_that_diverges(torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, ranks: int, stage: int) -> None:
    """An update with an absurd rate leaves weights under which no log-probability is a number."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    settings = {"kind": kind, "lr": 1e30, "deepspeed": own}
    said = refusal(torch_process, base, [["step", 1], ["step", 2], ["step", 3]], settings=settings, ranks=ranks, launched=ranks > 1)
    assert "is not finite" in said or "gradient norm is" in said
    assert "lower [learner] lr" in said


def test_a_rank_that_dies_is_named(torch_process: ForkingProcess, base: Path) -> None:
    said = refusal(torch_process, base, [["step", 1], ["kill_rank", 1], ["step", 2]], ranks=2)
    assert "Rank 1" in said
    assert "-9" in said


def test_a_deepspeed_file_that_it_refuses_itself(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": 2, "overlap_com": True}})
    said = refusal(torch_process, base, [["step", 1]], settings={"deepspeed": own})
    assert f"DeepSpeed refuses {own}" in said
    assert "overlap_com" in said


def test_compiled_layers_and_weights_that_are_spread(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": 3}})
    said = refusal(torch_process, base, [["step", 1]], settings={"deepspeed": own, "compile": True}, ranks=2)
    assert "compile does not go with ZeRO-3" in said


def test_a_users_file_is_merged_over_ours(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    """Offload and clipping are taken from it; what it does not name stays ours."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 1e-3})
    (step, _) = torch_process.run(
        "train", base=str(base), script=[["step", 1], ["snapshot", str(tmp_path / "own")]], settings={"deepspeed": own}
    )
    (plain, _) = torch_process.run(
        "train", base=str(base), script=[["step", 1], ["snapshot", str(tmp_path / "same")]], settings={"max_grad_norm": 1e-3}
    )
    assert step == pytest.approx(plain, rel=1e-4)


def test_a_folder_without_a_model(torch_process: ForkingProcess, tmp_path: Path) -> None:
    assert "is no model folder: it has no config.json" in refusal(torch_process, tmp_path, [])


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", "{", "model/config.json cannot be read"),
        ("config.json", '{"model_type": "nosuch"}', "model cannot be loaded"),
        ("model.safetensors", "cut off", "model cannot be loaded"),
    ],
)
def test_a_model_that_cannot_be_loaded(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, file: str, content: str, says: str
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    for path in base.iterdir():
        (broken / path.name).symlink_to(path)
    (broken / file).unlink()
    (broken / file).write_text(content, encoding="utf-8")
    assert f"{tmp_path}/{says}" in refusal(torch_process, broken, [])


def test_a_checkpoint_without_a_trainer_is_no_start(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    assert "There is no trainer state in" in refusal(torch_process, base, [["load", str(tmp_path)]])


def test_a_checkpoint_that_is_cut_off_is_no_start(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    torch_process.run("train", base=str(base), script=[["step", 1], ["save", str(saved)]])
    for path in saved.rglob("*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    assert f"The trainer state in {saved} cannot be read" in refusal(torch_process, base, [["load", str(saved)]])
