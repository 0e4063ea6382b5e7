"""Several faults in one run, at any call, with any interleaving of threads, records and learners; each run is told by its seed alone.

`ECHO_MODEL_SEED=n` plays that one; `ECHO_MODEL_RUNS=n` as many as you like.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from tests.model.scenarios import play_at_random
from tests.thorough import IS_THOROUGH

_NUM_RUNS = int(os.environ.get("ECHO_MODEL_RUNS", "400" if IS_THOROUGH else "10"))
_SEEDS = [int(os.environ["ECHO_MODEL_SEED"])] if "ECHO_MODEL_SEED" in os.environ else range(_NUM_RUNS)


@pytest.mark.slow
def test_a_run_survives_any_faults(model_folder: Path) -> None:
    for seed in _SEEDS:
        play_at_random(model_folder, seed)
