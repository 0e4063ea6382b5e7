"""Engines by name: what is wrong with a name, a library or a class is said in a sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from echo_core.layer_split import Device
from echo_rollout.engines.catalogue import check_devices, check_engine, check_promises, open_engine, prefetch
from echo_rollout.engines.engine import EngineConfig
from echo_rollout.engines.openai_engine import OpenAIEngine
from echo_rollout.engines.scripted import ScriptedEngine
from echo_rollout.engines.transformers_engine import TransformersEngine, choose_device
from echo_rollout.engines.vllm_inprocess import VllmInProcess
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind
from echo_settings.sections import RolloutSettings


def config(**options: object) -> EngineConfig:
    return EngineConfig(
        base=Path("base"), kind=WeightKind.LORA, dtype="float32", max_length=64, lora_rank=8, concurrency=4, options=options
    )


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that are said to be not installed; all others are, wherever this test runs."""
    names: set[str] = set()
    monkeypatch.setattr("echo_schemas.libraries.is_installed", lambda name: name not in names)
    return names


def refusal(name: str, **options: object) -> UserError:
    with pytest.raises(UserError) as raised:
        open_engine(name, config(**options))
    return raised.value


@pytest.mark.parametrize(("wrong", "near"), [("vlm", "vllm"), ("Transformer", "transformers"), ("trasnformers", "transformers")])
def test_an_unknown_name_gets_the_nearest(wrong: str, near: str) -> None:
    error = refusal(wrong)
    assert f"There is no engine {wrong!r}" in error.message
    assert error.hint is not None
    assert f"Did you mean {near!r}?" in error.hint
    prefetch(wrong)


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [
        ("vllm", "vllm", "echoswarm[rollout-cpu]"),
        ("vllm", "transformers", "echoswarm[rollout]"),
        ("transformers", "peft", "echoswarm[learner]"),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(missing: set[str], name: str, module: str, extra: str) -> None:
    missing.add(module)
    error = refusal(name)
    assert f"needs the library {module!r}" in error.message
    assert error.hint is not None
    assert extra in error.hint


def test_vllm_runs_in_this_process_or_beside_it_as_the_option_says() -> None:
    assert isinstance(open_engine("vllm", config(in_process=True)), VllmInProcess)
    assert "in_process is 'yes'" in refusal("vllm", in_process="yes").message


def test_transformers_takes_a_device_and_nothing_else() -> None:
    for options in ({}, {"device": "auto"}, {"device": "cuda:1"}, {"device": "mps"}):
        assert isinstance(open_engine("transformers", config(**options)), TransformersEngine)
    assert "has no option 'max_num_seqs'" in refusal("transformers", max_num_seqs=3).message
    for wrong in ("gpu", "cuda:", "cuda:x", 0, "mps:0"):
        error = refusal("transformers", device=wrong)
        assert f"device is {wrong!r}" in error.message
        assert "cuda:<number>" in error.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.7, "top_p": 0.95}, "With [rollout] top_p, top_k or min_p it has to"),
        ({"temperature": 0.7}, "gives no log-probabilities for the tokens that it draws."),
        ({"temperature": 0.7, "missing_logprobs": "recompute"}, ""),
        ({"top_p": 0.95}, ""),
    ],
)
def test_raw_logprobs_of_another_temperature_are_refused_before_anything_starts(changes: dict[str, Any], said: str) -> None:
    """They are of temperature 1, so at another one they are not of what is drawn."""
    rollout = RolloutSettings(options={"logprobs_mode": "raw_logprobs"}, **changes)
    if not said:
        check_promises("vllm", rollout, None)
        return
    with pytest.raises(UserError, match=re.escape(said)):
        check_promises("vllm", rollout, None)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("transformers", {"max_num_seqs": 3}, "has no option 'max_num_seqs'"),
        ("openai", {"url": "host:8000"}, "url is 'host:8000'"),
        ("parallax", {"peers": ["/ip4/10.0.0.1/tcp/1/p2p/x"]}, "url is missing"),
        ("parallax", {"url": "http://host:3001"}, "peers is empty"),
        ("parallax", {"url": "http://host:3001", "weights": "external", "peer": []}, "has no option 'peer'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        check_engine(name, options)


@pytest.mark.parametrize(
    ("wanted", "num_cuda", "has_mps", "chosen"),
    [
        ("auto", 2, False, "cuda"),
        ("auto", 0, True, "mps"),
        ("auto", 0, False, "cpu"),
        ("auto", 1, True, "cuda"),
        ("cpu", 2, True, "cpu"),
        ("cuda:1", 2, False, "cuda:1"),
        ("cuda", 1, False, "cuda"),
        ("mps", 0, True, "mps"),
    ],
)
def test_the_device_is_the_wanted_one_or_the_best(wanted: str, num_cuda: int, has_mps: bool, chosen: str) -> None:
    assert choose_device(wanted, num_cuda=num_cuda, has_mps=has_mps) == chosen


@pytest.mark.parametrize(
    ("wanted", "num_cuda", "has_mps", "there"),
    [("cuda", 0, True, "mps, cpu"), ("cuda:2", 2, False, "cuda:0, cuda:1, cpu"), ("mps", 1, False, "cuda:0, cpu")],
)
def test_a_device_that_is_not_there_is_refused_with_those_that_are(wanted: str, num_cuda: int, has_mps: bool, there: str) -> None:
    with pytest.raises(UserError, match=f"no device '{wanted}'") as raised:
        choose_device(wanted, num_cuda=num_cuda, has_mps=has_mps)
    assert there in raised.value.hint


def test_openai_wants_vllm_only_where_it_is_to_start_it(missing: set[str]) -> None:
    missing.add("vllm")
    assert isinstance(open_engine("openai", config(url="http://127.0.0.1:8000")), OpenAIEngine)
    error = refusal("openai")
    assert "needs the library 'vllm'" in error.message
    assert "url = " in error.hint


def test_only_vllm_and_one_s_own_split_a_model_over_devices() -> None:
    devices = (Device(memory_gb=8, tflops=30),)
    check_devices("vllm", devices)
    check_devices("mine.py:Engine", devices)
    check_devices("openai", ())
    with pytest.raises(UserError, match="'openai' does not split a model"):
        open_engine("openai", replace(config(url="http://127.0.0.1:8000"), devices=devices))


def test_parallax_wants_lattica_only_where_it_is_to_give_the_cluster_its_weights(missing: set[str]) -> None:
    missing.add("lattica")
    open_engine("parallax", config(url="http://127.0.0.1:3001", weights="external"))
    error = refusal("parallax")
    assert "needs the library 'lattica'" in error.message
    assert "external" in error.hint


def test_one_s_own_engine_is_opened_by_path_or_file(tmp_path: Path) -> None:
    assert isinstance(open_engine(f"{__name__}:made", config()), ScriptedEngine)
    file = tmp_path / "mine.py"
    file.write_text("from echo_rollout.engines.scripted import ScriptedEngine\n\ndef made(config):\n    return ScriptedEngine()\n")
    assert isinstance(open_engine(f"{file}:made", config()), ScriptedEngine)


def test_what_is_no_engine_is_refused() -> None:
    assert "is no engine but tuple" in refusal("echo_rollout.engines.catalogue:_MEMBERS").message
    assert "it lacks capabilities, installed, in_use, start" in refusal(f"{__name__}:nothing").message
    error = refusal("echo_rollout.engines.scripted:ScriptedEngin")
    assert error.hint is not None
    assert "ScriptedEngine" in error.hint
    assert "no_such_module" in str(refusal("no_such_module:Engine"))


def made(config: EngineConfig) -> ScriptedEngine:
    del config
    return ScriptedEngine()


def nothing(config: EngineConfig) -> Any:
    del config
    return object()
