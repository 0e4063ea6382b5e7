"""One model over two unequal devices of ours: the same numbers as in one process, and a sentence when a stage dies."""

from __future__ import annotations

import pytest

from tests.forks.process import ForkingProcess
from tests.thorough import only_thorough


@only_thorough
@pytest.mark.slow
def test_unequal_stages_generate_what_one_process_does_and_a_dead_one_is_said(vllm_process: ForkingProcess) -> None:
    found = vllm_process.run("split_model")
    assert found["layers"] == [[0], [1, 2]], "the second device is larger and faster"
    assert found["same_tokens"], "a seed gives other tokens over two stages"
    assert found["from_one_process"] <= 1e-5, found
    assert found["from_transformers"] <= 1e-4, found
    assert set(found["mixed"]) == {0}, "what ran when a version arrived keeps its own on every stage"
    assert all(said.startswith("vLLM has failed") for said in found["said"]), found["said"]
