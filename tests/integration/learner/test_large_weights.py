"""Weights that ranks share are never whole anywhere but on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks.process import ForkingProcess
from tests.integration.learner.test_trainer import deepspeed_file

pytestmark = pytest.mark.slow


def test_a_snapshot_makes_one_parameter_whole_after_another(torch_process: ForkingProcess, base: Path, tmp_path: Path) -> None:
    """Under ZeRO-3 with no parameter too small to be spread."""
    own = deepspeed_file(tmp_path, {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})
    ((most, largest, num_bytes),) = torch_process.run(
        "train",
        base=str(base),
        script=[["snapshot_watched", str(tmp_path / "snapshot")]],
        settings={"kind": "full", "deepspeed": own},
        ranks=2,
        launched=True,
    )
    assert most == largest
    assert num_bytes > 5 * largest
