"""The whole learner with a real trainer: settings in, steps and snapshots out, and what it does when something gives way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_schemas.naming import Namespace
from tests.forks.process import ForkingProcess

pytestmark = pytest.mark.slow

Run = Callable[..., dict[str, Any]]

OWN_LOSS = '''
import torch
from echo_learner.losses.interface import LossInputs, LossOutputs

calls = 0


def reinforce(batch: LossInputs, *, scale: float = 1.0, breaks_at: int = 0) -> LossOutputs:
    """Plain policy gradient; from the `breaks_at`-th call on its loss is no number."""
    global calls
    calls += 1
    loss = -(scale * batch.advantages * batch.learner * batch.token_scales).sum()
    if breaks_at and calls >= breaks_at:
        loss = loss * float("nan")
    return LossOutputs(loss=loss, weights=torch.ones_like(batch.sampler), sums={})
'''


@pytest.fixture
def run(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> Run:
    """`run(steps, name=, sections=, …)`: see `run_jobs.run`; each name is a folder of checkpoints."""
    (tmp_path / "own_losses.py").write_text(OWN_LOSS, encoding="utf-8")

    def begin(steps: int, *, name: str = "run", sections: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
        folder = str(tmp_path / name)
        found: dict[str, Any] = torch_process.run(
            "run", folder=folder, base=str(base), steps=steps, sections=sections or {}, python_path=str(tmp_path), **arguments
        )
        return found

    return begin


@pytest.mark.parametrize("update", ["lora", "full"])
def test_a_session_that_starts_over_goes_on_bit_for_bit(run: Run, update: str) -> None:
    """The producer dies under version 2; the learner loads its checkpoint, publishes what it owed and trains the rest."""
    sections = {"policy": {"update": update}}
    quiet = run(3, name="quiet", sections=sections)
    claim_and_version_0 = 2
    disturbed = run(3, name="disturbed", sections=sections, dies_at_commit=claim_and_version_0 + 2)
    assert quiet["refused"] == disturbed["refused"] == ""
    assert disturbed["sessions"] == 2
    assert disturbed["published"] == quiet["published"] == [0, 1, 2, 3]
    assert disturbed["sha256"] == quiet["sha256"]
    assert len(set(quiet["sha256"])) == 4, "each step has changed the weights"
    assert [metrics["loss"] for metrics in disturbed["metrics"]] == [metrics["loss"] for metrics in quiet["metrics"]]
    config = json.loads(quiet["config"][0])
    assert config.get("base_model_name_or_path" if update == "lora" else "_name_or_path"), "a snapshot names its base"


@pytest.mark.kafka
def test_the_example_loads_a_published_adapter_from_the_log(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, kafka_bootstrap: str, namespace: Namespace
) -> None:
    found = torch_process.run("load_from_log", folder=str(tmp_path), base=str(base), bootstrap=kafka_bootstrap, namespace=namespace.name)
    assert found["version"] == 1
    assert found["equal"], "it is the checkpoint's adapter"
    assert found["largest"] > 0, "and it was trained"
    assert found["base"] == str(base)


def test_a_users_own_loss_trains_from_its_import_path(run: Run) -> None:
    losses = {}
    for scale in (1.0, 2.0):
        own = {"learner": {"loss": "own_losses:reinforce", "loss_options": {"scale": scale}}}
        found = run(1, name=f"scale-{scale}", sections=own)
        assert found["refused"] == ""
        losses[scale] = found["metrics"][0]["policy_loss"]
    assert losses[2.0] == pytest.approx(2 * losses[1.0], rel=1e-6)
    assert losses[1.0] != 0


def test_a_loss_that_is_no_number_ends_the_run_and_is_not_published(run: Run) -> None:
    own = {"learner": {"loss": "own_losses:reinforce", "loss_options": {"breaks_at": 2}, "micro_batch_tokens": 10_000}}
    found = run(3, sections=own)
    assert "gradient norm is nan" in found["refused"]
    assert "lower [learner] lr" in found["refused"]
    assert found["published"] == [0, 1]
    assert len(found["metrics"]) == 1
    assert found["checkpoints"] == ["v0", "v1"]


def test_probes_of_a_worker_agree_with_the_learner(run: Run) -> None:
    (metrics,) = run(1, probes=True)["metrics"]
    # Two of the probe, and one on which the worker's claim to serve this version was looked at (again after ten seconds).
    assert metrics["probe_samples"] >= 3
    assert metrics["probe_logprob_diff_max"] < 1e-5


def test_a_loss_that_nobody_knows_ends_before_anything_is_written(run: Run) -> None:
    found = run(1, sections={"learner": {"loss": "grpo_tiss"}})
    assert "Did you mean 'grpo_tis'" in found["refused"]
    assert found["published"] == []


def test_a_base_model_that_is_not_there(run: Run, tmp_path: Path) -> None:
    assert "There is no base model folder" in run(1, sections={"policy": {"base": str(tmp_path / "nowhere")}})["refused"]
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in run(1, sections={"policy": {"base": str(tmp_path / "empty")}})["refused"]
