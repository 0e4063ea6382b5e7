"""LoRA on the CPU: a batch that mixes adapters gives every row its own, and a row without one none."""

from __future__ import annotations

import pytest

from tests.forks.process import ForkingProcess

_DIFFERENCE = 1e-4


def differences(vllm_process: ForkingProcess, *, stock: bool) -> dict[str, float]:
    """The largest difference from transformers and PEFT among the rows of each adapter."""
    found = vllm_process.run("mix_adapters", stock=stock)
    assert found["rows"] == 36, found
    if not stock:
        assert found["adapters_in_a_call"] == 3, "the adapters never met in one batch"
    measured: dict[str, float] = found["differences"]
    return measured


@pytest.mark.slow
def test_every_row_of_a_mixed_batch_has_its_own_adapter(vllm_process: ForkingProcess) -> None:
    for name, difference in differences(vllm_process, stock=False).items():
        assert difference <= _DIFFERENCE, f"the rows of {name} differ by {difference} from transformers and PEFT"


@pytest.mark.slow
def test_vllm_s_own_functions_give_rows_without_an_adapter_another_s(vllm_process: ForkingProcess) -> None:
    """What the replacement cures, and that the test above would see it. Once this fails, only speed speaks for the replacement."""
    assert differences(vllm_process, stock=True)["none"] > 1.0
