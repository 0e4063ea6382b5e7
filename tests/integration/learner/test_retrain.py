"""The whole learner with a real trainer, and then its log trained again: on the same machine every byte is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forks.process import ForkingProcess

pytestmark = pytest.mark.slow


FALLING = {"lr_schedule": "cosine", "decay_steps": 12, "min_lr": 1e-5}


def train_again(torch_process: ForkingProcess, base: Path, folder: Path, *, sections: dict[str, Any], **arguments: Any) -> dict[str, Any]:
    """A run, and in another process the same from its log."""
    given = {"folder": str(folder / "run"), "base": str(base), "sections": sections}
    torch_process.run("train_to_file", **given)
    found: dict[str, Any] = torch_process.run("retrain_from_file", **given, **arguments)
    assert found["sessions"] == 2
    return found


@pytest.mark.parametrize(
    ("sections", "from_start", "start"),
    [
        ({"policy": {"update": "lora"}}, True, 0),
        ({"policy": {"update": "full"}, "learner": {"updates_per_step": 2, "kl": 0.01, "warmup_steps": 3, **FALLING}}, True, 0),
        ({"policy": {"update": "lora"}, "learner": {"updates_per_step": 2, "weight_decay": 0.01}}, False, 1),
    ],
    ids=["adapter from the base", "all weights, two updates, from the base", "adapter from a checkpoint"],
)
def test_every_version_comes_out_as_it_was_published(
    torch_process: ForkingProcess, base: Path, tmp_path: Path, sections: dict[str, Any], *, from_start: bool, start: int
) -> None:
    versions = "0..4" if from_start else "2..4"
    found = train_again(torch_process, base, tmp_path, versions=versions, sections=sections, from_start=from_start)
    assert found["start"] == start
    assert [(each["version"], each["match"], each["distance"]) for each in found["versions"]] == [
        (version, "identical", 0.0) for version in range(0 if from_start else 2, 5)
    ]
    assert len({each["sha256"] for each in found["versions"]}) == len(found["versions"]), "each step has changed the weights"


def test_with_another_number_of_ranks_the_weights_are_close(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    found = train_again(torch_process, base, tmp_path, versions="0..4", sections={}, from_start=True, ranks=2)
    assert [each["version"] for each in found["versions"]] == [0, 1, 2, 3, 4]
    assert {each["match"] for each in found["versions"]} <= {"identical", "within_tolerance"}
    assert max(each["distance"] for each in found["versions"]) < 0.02
