"""LoRA on the CPU: a batch that mixes adapters gives every row its own, and a row without one none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]
_DIFFERENCE = 1e-4


def differences(*arguments: str) -> dict[str, float]:
    """The largest difference from transformers and PEFT among the rows of each adapter."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, "-m", "tests.integration.engines.mixed_adapters", *arguments]
    done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    told = done.stdout[-3_000:] + done.stderr[-3_000:]
    assert done.returncode == 0, told
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == 36, told
    if not arguments:
        assert found["adapters_in_a_call"] == 3, "the adapters never met in one batch"
    measured: dict[str, float] = found["differences"]
    return measured


@pytest.mark.slow
def test_every_row_of_a_mixed_batch_has_its_own_adapter() -> None:
    for name, difference in differences().items():
        assert difference <= _DIFFERENCE, f"the rows of {name} differ by {difference} from transformers and PEFT"


@pytest.mark.slow
def test_vllm_s_own_functions_give_rows_without_an_adapter_another_s() -> None:
    """What the replacement cures, and that the test above would see it. Once this fails, only speed speaks for the replacement."""
    assert differences("stock")["none"] > 1.0
