"""What vLLM is told, and what is made of its answers. No vLLM."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from echo_rollout.engines import vllm_arguments
from echo_rollout.engines.engine import EngineConfig, SnapshotRef
from echo_rollout.engines.vllm_arguments import capabilities_of, cores_of, engine_arguments, generations_of, max_rank, set_environment
from echo_schemas.errors import UserError
from echo_schemas.records import FinishReason, LogprobDistribution, LogprobSource, Sampling, VersionSpan, WeightKind

REF = SnapshotRef(version=3, sha256="3" * 64)


def config(*, kind: WeightKind = WeightKind.LORA, rank: int = 8, **options: object) -> EngineConfig:
    return EngineConfig(base=Path("base"), kind=kind, dtype="float32", max_length=64, lora_rank=rank, concurrency=4, options=options)


PROCESSED, RAW = capabilities_of(config()), capabilities_of(config(logprobs_mode="raw_logprobs"))


def decode(rows: Sequence[Sequence[int]]) -> list[str]:
    return [f"decoded {list(row)}" for row in rows]


def answer(tokens: list[int], *, reason: str | None, text: str = "") -> Any:
    logprobs = SimpleNamespace(logprobs=[-0.5 * token for token in tokens])
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason, text=text)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_user_s_options_win_and_ours_is_kept_from_vllm(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.setattr(vllm_arguments, "has_gpu", lambda: on_gpu)
    arguments = engine_arguments(config(max_num_seqs=7, in_process=True, gpu_memory_utilization=0.5))
    assert arguments["max_num_seqs"] == 7
    assert arguments["gpu_memory_utilization"] == 0.5
    assert "in_process" not in arguments
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["enable_prefix_caching"] is False
    assert ("kv_cache_memory_bytes" in arguments) is not on_gpu


@pytest.mark.parametrize(("given", "used"), [(None, "spawn"), ("fork", "fork")])
def test_vllms_processes_are_no_forks_of_the_worker(monkeypatch: pytest.MonkeyPatch, given: str | None, used: str) -> None:
    """A fork could not use the GPU that the worker has looked for."""
    for name, value in (("VLLM_WORKER_MULTIPROC_METHOD", given), ("VLLM_ENABLE_V1_MULTIPROCESSING", None)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    set_environment(in_process=False)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == used
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "1"


def test_adapters_are_asked_for_only_where_they_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "has_gpu", lambda: False)
    assert engine_arguments(config())["max_lora_rank"] == 8
    assert "enable_lora" not in engine_arguments(config(kind=WeightKind.FULL))


@pytest.mark.parametrize(("rank", "served"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (512, 512)])
def test_a_rank_is_served_under_the_next_that_vllm_has(rank: int, served: int) -> None:
    assert max_rank(config(rank=rank)) == served


def test_a_rank_above_vllm_s_is_refused() -> None:
    with pytest.raises(UserError, match="rank 512 at most"):
        max_rank(config(rank=513))


def test_an_answer_becomes_generations_under_its_version() -> None:
    output = SimpleNamespace(outputs=[answer([4, 1], reason="stop"), answer([5, 6, 7], reason="length")])
    first, second = generations_of(output, len(output.outputs), Sampling(max_new_tokens=3), REF, decode, PROCESSED)
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert (first.text, second.text) == ("decoded [4, 1]", "decoded [5, 6, 7]")
    assert first.token_ids.dtype == np.int32
    assert first.logprobs.dtype == np.float32
    assert first.logprobs.tolist() == [-2.0, -0.5]
    assert second.version_spans == (VersionSpan(start=0, end=3, version=3),)
    assert second.weights_sha256 == REF.sha256


def test_with_stop_texts_the_text_is_vllm_s_own_even_if_all_are_empty() -> None:
    sampling = Sampling(max_new_tokens=3, stop=("4",))
    output = SimpleNamespace(outputs=[answer([4], reason="stop"), answer([4], reason="stop")])
    assert [generation.text for generation in generations_of(output, 2, sampling, REF, decode, PROCESSED)] == ["", ""]


def test_an_answer_that_was_cut_off_or_is_empty_says_so() -> None:
    output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[], logprobs=None, finish_reason="abort", text="")])
    (generation,) = generations_of(output, len(output.outputs), Sampling(max_new_tokens=3), REF, decode, PROCESSED)
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.version_spans == ()
    assert generation.logprobs.size == generation.token_ids.size == 0


def test_at_temperature_zero_one_answer_is_that_of_all() -> None:
    output = SimpleNamespace(outputs=[answer([4, 1], reason="stop")])
    group = generations_of(output, 3, Sampling(max_new_tokens=3, temperature=0.0), REF, decode, PROCESSED)
    assert [generation.token_ids.tolist() for generation in group] == [[4, 1]] * 3


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("", set()), ("auto", set()), ("nobind", set()), ("0-1|2-3", set()), ("1-", set())],
)
def test_cores_are_read_as_vllm_writes_them(text: str, cores: set[int]) -> None:
    assert cores_of(text) == cores


@pytest.mark.parametrize(
    ("capabilities", "temperature", "source", "distribution"),
    [
        (PROCESSED, 0.7, LogprobSource.SAMPLER, LogprobDistribution.DRAWN),
        (RAW, 1.0, LogprobSource.SAMPLER, LogprobDistribution.FULL),
        (RAW, 0.7, LogprobSource.RECOMPUTED, LogprobDistribution.FULL),
    ],
)
def test_an_answer_says_of_which_distribution_its_log_probabilities_are(
    capabilities: Any, temperature: float, source: LogprobSource, distribution: LogprobDistribution
) -> None:
    output = SimpleNamespace(outputs=[answer([4, 1], reason="stop")])
    sampling = Sampling(max_new_tokens=3, temperature=temperature, top_p=0.9)
    (generation,) = generations_of(output, 1, sampling, REF, decode, capabilities)
    assert (generation.logprob_source, generation.logprob_distribution) == (source, distribution)
    assert generation.logprobs.any() == (source is LogprobSource.SAMPLER)


def test_a_mode_that_gives_logits_is_refused() -> None:
    with pytest.raises(UserError, match="'raw_logits', and the learner needs log-probabilities"):
        capabilities_of(config(logprobs_mode="raw_logits"))
