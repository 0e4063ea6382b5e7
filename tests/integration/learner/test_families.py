"""The learner's log-probabilities are those of the model's own forward pass, whatever a family does after its head."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forks.process import ForkingProcess, Refused

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "mixtral"),
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
