"""Engine and learner mean the same by a token's log-probability, in families of models that differ, under sampling that is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.forks.process import ForkingProcess
from tests.installed import missing
from tests.thorough import only_thorough

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma2", "gemma3_text", "granite", "cohere", "mixtral", "qwen3_moe")
# Those of the examples, and what differs most: caps, experts.
IN_VLLM = ("qwen3", "llama", "qwen2", "gemma2", "gemma3_text")
_DIFFERENCE = 1e-4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def both_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkingProcess]:
    """Where the engine on transformers runs beside the learner's model."""
    if absent := missing("torch", "transformers", "peft", "deepspeed"):
        pytest.skip(f"{', '.join(absent)} is not installed: install the extra 'learner'")
    with closing(ForkingProcess("tests.integration.engines.family_jobs", tmp_path_factory.mktemp("families"))) as process:
        yield process


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_on_transformers_and_the_learner_agree(both_process: ForkingProcess, family: str) -> None:
    check(both_process.run("engine_difference", engine="transformers", family=family))


@only_thorough
@pytest.mark.parametrize("family", IN_VLLM)
def test_vllm_and_the_learner_agree(vllm_process: ForkingProcess, family: str) -> None:
    check(vllm_process.run("engine_difference", engine="vllm", family=family))


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_replayed_experts_are_those_that_the_engine_went_to(both_process: ForkingProcess, family: str) -> None:
    """Routers that differ a little, as those of another version do, choose other experts, and every token behind them is another's."""
    found = both_process.run("replay_differences", family=family, dtype="float32", shifted=0.0)
    assert found["otherwise"] == 0
    assert max(found["own"], found["replayed"]) < _DIFFERENCE
    found = both_process.run("replay_differences", family=family, dtype="float32", shifted=0.02)
    assert found["otherwise"] > 0.01
    assert found["replayed"] < 0.9 * found["own"]


@only_thorough
def test_vllm_refuses_new_experts_on_a_processor(vllm_process: ForkingProcess) -> None:
    """It would go on computing with the old ones."""
    with pytest.raises(AssertionError, match=r"SnapshotRejected: .*vLLM does not load the weights of experts anew on a processor"):
        vllm_process.run("engine_difference", engine="vllm", family="qwen3_moe")


def check(found: dict[str, float]) -> None:
    assert found["tokens"] > 16
    assert found["largest"] < _DIFFERENCE
