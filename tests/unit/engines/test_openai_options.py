"""[rollout.options] of the engine `openai`, and the command line of the server that it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_rollout.engines.openai_options import parse_options
from echo_rollout.engines.openai_server import command_line, server_environment
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

URL = "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        ({"url": "127.0.0.1:8000"}, "url is", "http://host:port"),
        ({"url": "http://me:secret@host"}, "no user, password", "api_key_file"),
        ({"url": URL, "api_key": "secret"}, "written into the run's record", "api_key_file"),
        ({"url": URL, "api_key_file": "a", "api_key_env": "b"}, "both given", "Leave one"),
        ({"url": URL, "modle": "x"}, "no option 'modle'", "'model'"),
        ({"url": URL, "weights": "mine"}, "weights is 'mine'", "external"),
        ({"url": URL, "requests": 0}, "requests is 0", "1 or more"),
        ({"url": URL, "requests": True}, "requests is True", "int"),
        ({"url": URL, "retries": -1}, "retries is -1", "0 or more"),
        ({"url": URL, "request_timeout_s": 0}, "request_timeout_s is 0", "above 0"),
        ({"url": URL, "request_timeout_s": float("nan")}, "request_timeout_s is nan", "above 0"),
        ({"url": URL, "server_folder": "/x"}, "nothing is copied into", "adapter_folder"),
        ({"model": "x"}, "model is for a server that runs already", "url"),
        ({"weights": "external"}, "weights is for a server that runs already", "url"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, object], sentence: str, hint: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_options(options)
    assert sentence in raised.value.message
    assert hint in raised.value.hint
    assert "secret" not in str(raised.value)


def test_arguments_of_a_server_of_our_own_are_kept_apart() -> None:
    own, arguments = parse_options({"requests": 8, "request_timeout_s": 30, "max_num_seqs": 16})
    assert (own.requests, own.request_timeout_s, arguments) == (8, 30.0, {"max_num_seqs": 16})


def test_a_key_that_is_not_where_it_should_be_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for options in ({"url": URL, "api_key_file": str(tmp_path / "none")}, {"url": URL, "api_key_env": "NO_SUCH_KEY"}):
        with pytest.raises(UserError, match=r"cannot be read|is not set"):
            parse_options(options)[0].api_key()
    assert parse_options({"url": URL})[0].api_key() == ""


def test_arguments_become_flags() -> None:
    line = command_line(
        {"model": "base", "enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 4, "hf_overrides": {"a": 1}}, port=7
    )
    assert line[:4] == ["--host", "127.0.0.1", "--port", "7"]
    assert " ".join(line[4:]) == '--model base --enforce-eager --no-enable-prefix-caching --max-num-seqs 4 --hf-overrides {"a": 1}'
    with pytest.raises(UserError, match="no flag of vLLM can carry"):
        command_line({"model": None}, port=7)


def test_only_the_routes_that_the_kind_of_weights_needs_are_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_SERVER_DEV_MODE"):
        monkeypatch.delenv(name, raising=False)
    lora, full = (server_environment({}, kind, "key") for kind in (WeightKind.LORA, WeightKind.FULL))
    assert "VLLM_SERVER_DEV_MODE" not in lora
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in full
    assert lora["VLLM_API_KEY"] == "key"


def test_the_model_runs_in_the_engine_s_process_only_where_both_switches_say_so() -> None:
    for executor, switch in (("uni", "0"), ("mp", "1"), (None, "1")):
        environment = server_environment({"distributed_executor_backend": executor}, WeightKind.LORA, "key")
        assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == switch
