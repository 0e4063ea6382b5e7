"""What the trainer says about its weights, held against plain transformers and PEFT: snapshots, log-probabilities, the KL term."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.forks.process import ForkingProcess
from tests.integration.learner.test_trainer import deepspeed_file

pytestmark = pytest.mark.slow

TRAIN = [["step", 1], ["step", 2, 2]]


def flat(rows: list[list[float]]) -> Any:
    return np.concatenate([np.array(row) for row in rows])


@pytest.mark.parametrize(
    ("kind", "stage", "ranks", "temperature"),
    [("lora", 0, 1, 1.0), ("full", 0, 1, 1.0), ("lora", 0, 1, 0.7), ("lora", 3, 2, 1.0), ("full", 3, 2, 1.0), ("full", 2, 2, 1.0)],
)
def test_a_snapshot_loads_in_plain_libraries_and_means_the_same(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, stage: int, ranks: int, temperature: float
) -> None:
    """Under ZeRO-3 nobody holds whole weights to compare with, so the twin is a trainer on one rank."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    settings = {"kind": kind, "temperature": temperature}
    compare = [["logprobs", 5]]
    trained = torch_process.run("train", base=str(base), script=[*TRAIN, *compare], settings=settings)[-1]
    snapshot = [["snapshot", str(tmp_path / "snapshot"), 2]]
    torch_process.run(
        "train", base=str(base), script=[*TRAIN, *snapshot], settings={**settings, "deepspeed": own}, ranks=ranks, launched=ranks > 1
    )
    served = torch_process.run(
        "served_logprobs", base=str(base), kind=kind, snapshot=str(tmp_path / "snapshot"), seed=5, temperature=temperature
    )
    np.testing.assert_allclose(flat(served), flat(trained), atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_starting_weights_are_the_base_models(torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str) -> None:
    """Version 0: a fresh adapter changes nothing, and the same seed makes the same one."""
    script = [["logprobs", 5], ["snapshot", str(tmp_path / "first")]]
    first, first_sha256 = torch_process.run("train", base=str(base), script=script, settings={"kind": kind})
    untrained = torch_process.run("served_logprobs", base=str(base), kind="full", snapshot=str(base), seed=5, temperature=1.0)
    np.testing.assert_allclose(flat(first), flat(untrained), atol=1e-5)
    again = torch_process.run("train", base=str(base), script=[["snapshot", str(tmp_path / "again")]], settings={"kind": kind})
    assert again == [first_sha256]


@pytest.mark.parametrize(("kind", "stage", "ranks"), [("lora", 0, 1), ("full", 0, 1), ("lora", 3, 2), ("full", 3, 2)])
def test_the_kl_term_is_taken_to_the_starting_policy(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kind: str, stage: int, ranks: int
) -> None:
    """With an adapter the reference is the base without it; with full weights a frozen copy. The k3 estimate, computed again outside."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": stage}})
    settings = {"kind": kind, "kl": 0.2, "lr": 5e-3}
    run: dict[str, Any] = {"base": str(base), "settings": {**settings, "deepspeed": own}, "ranks": ranks, "launched": ranks > 1}
    script = [*TRAIN, ["snapshot", str(tmp_path / "now")], ["step", 5]]
    first, second, _, third = torch_process.run("train", script=script, **run)
    assert first["reference_kl"] == pytest.approx(0.0, abs=1e-9)
    assert second["reference_kl"] > 0
    logprobs = [
        flat(torch_process.run("served_logprobs", base=str(base), kind=of, snapshot=str(where), seed=5, temperature=1.0))
        for of, where in ((kind, tmp_path / "now"), ("full", base))
    ]
    mask = np.array(torch_process.run("batch_mask", seed=5))
    gap = (logprobs[1] - logprobs[0])[mask]
    assert third["reference_kl"] == pytest.approx(float((np.expm1(gap) - gap).mean()), rel=1e-3)
    assert third["loss"] > third["policy_loss"]


def test_a_strong_kl_term_holds_the_policy_back(torch_process: ForkingProcess, base: Path) -> None:
    script = [["step", 1]] * 8
    free, held = (torch_process.run("train", base=str(base), script=script, settings={"kl": coef, "lr": 5e-3})[-1] for coef in (1e-9, 5.0))
    assert held["reference_kl"] < 0.5 * free["reference_kl"]
