"""The engine `openai` against a server in memory: it keeps the contract, and believes nothing that is not exactly what was asked for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from echo_rollout.engines import openai_client, openai_engine
from echo_rollout.engines.engine import AnswerUnusable, EngineError, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.engines.openai_client import ServerClient
from echo_rollout.engines.openai_engine import OpenAIEngine
from echo_rollout.engines.openai_options import ServerOptions
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobDistribution, LogprobSource, Sampling, WeightKind
from tests.contract.engines import contract
from tests.unit.engines.fake_server import KEY, MAX_LENGTH, URL, FakeServer, open_engine_at, write_base
from tests.unit.engines.weights import BASE, adapter_shapes, write_adapter, write_weights

PROMPT = (5, 9, 12)
FOUR = Sampling(max_new_tokens=4)
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer, which would load transformers, and no pauses."""

    def decoder(base: Path) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        return lambda rows: [" ".join(map(str, row)) for row in rows]

    monkeypatch.setattr(openai_engine, "batch_decoder", decoder)
    monkeypatch.setattr(openai_client, "_MOST_BACKOFF_S", 0.0)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


def adapters(folder: Path, count: int) -> tuple[Snapshot, ...]:
    """Versions 0 to `count` - 1."""
    found = []
    for version in range(count):
        (folder / f"v{version}").mkdir()
        snapshot = write_adapter(folder / f"v{version}", adapter_shapes())
        found.append(replace(snapshot, ref=SnapshotRef(version=version, sha256=f"sha-{version}")))
    return tuple(found)


def use(engine: OpenAIEngine, work: Callable[[OpenAIEngine], Awaitable[Any]]) -> Any:
    """Start the engine, do `work`, close it."""

    async def run() -> Any:
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize("has_token_route", [True, False])
def test_it_keeps_the_contract_by_either_route(server: FakeServer, base: Path, tmp_path: Path, has_token_route: bool) -> None:
    server.has_token_route = has_token_route
    versions = adapters(tmp_path, 3)
    (tmp_path / "wide").mkdir()
    wide = write_adapter(tmp_path / "wide", adapter_shapes(rank=4), rank=4)

    async def keep(engine: OpenAIEngine) -> None:
        assert engine.capabilities.logprobs is LogprobSource.SAMPLER
        assert engine.capabilities.proves_version
        case = contract.Case(engine, versions, (wide, replace(versions[1], kind=WeightKind.FULL)), None, MAX_LENGTH)
        for behaviour in contract.BEHAVIOURS:
            await behaviour(case)

    use(open_engine_at(server, base), keep)
    assert bool(server.asked(COMPLETIONS)) is True, "temperature is looked at by this route"
    assert (len(server.asked(GENERATE)) > 5) is has_token_route
    assert not server.adapters, "every adapter is unloaded at the end"


def test_every_version_has_a_name_of_its_own_and_every_request_says_how_it_samples(server: FakeServer, base: Path, tmp_path: Path) -> None:
    versions = adapters(tmp_path, 2)
    sampling = Sampling(max_new_tokens=4, temperature=0.7, seed=3, stop=("x",))

    async def work(engine: OpenAIEngine) -> None:
        for snapshot in (*versions, versions[0]):
            await engine.install(snapshot)
            (generation,) = await engine.generate(PROMPT, 1, sampling)
            assert generation.version_spans[0].version == snapshot.ref.version

    use(open_engine_at(server, base), work)
    names = [body["lora_name"] for body in server.asked("/v1/load_lora_adapter") if body["lora_name"]]
    assert len(set(names)) == 3
    assert sorted(server.unloaded) == sorted(names)
    body = server.asked(GENERATE)[-1]
    assert body["model"] == names[-1]
    assert body["token_ids"] == list(PROMPT)
    wanted = {"n": 1, "max_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 3, "stop": ["x"], "logprobs": 0}
    assert wanted.items() <= body["sampling_params"].items()
    assert body["sampling_params"]["repetition_penalty"] == 1.0


def _drop_choice(answer: dict[str, Any]) -> None:
    answer["choices"].pop()


def _same_index(answer: dict[str, Any]) -> None:
    answer["choices"][1]["index"] = 0


def _set_logprob(value: Any) -> Callable[[dict[str, Any]], None]:
    def change(answer: dict[str, Any]) -> None:
        logprobs = answer["choices"][0]["logprobs"]
        if "content" in logprobs:
            logprobs["content"][1]["logprob"] = value
        else:
            logprobs["token_logprobs"][1] = value

    return change


def _fewer_logprobs(answer: dict[str, Any]) -> None:
    for rows in answer["choices"][0]["logprobs"].values():
        rows.pop()


def _other_token(answer: dict[str, Any]) -> None:
    answer["choices"][0]["token_ids"][1] += 1


WRONG_ANSWERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "fewer choices": (_drop_choice, "returned 1 choices, and 2 were asked for"),
    "one choice twice": (_same_index, "choices"),
    "no choices": (lambda answer: answer.pop("choices"), "has no choices"),
    "another model": (lambda answer: answer.update(model="base"), "answers for 'base'"),
    "no token ids": (lambda answer: answer["choices"][0].pop("token_ids"), "no token ids"),
    "too many tokens": (lambda answer: answer["choices"][0].update(token_ids=[2] * 9), "9 tokens"),
    "no log-probabilities": (lambda answer: answer["choices"][0].pop("logprobs"), "0 log-probabilities for 3 tokens"),
    "fewer log-probabilities": (_fewer_logprobs, "2 log-probabilities for 3 tokens"),
    "a missing one": (_set_logprob(None), "None as a log-probability"),
    "not a number": (_set_logprob(float("nan")), "nan as a log-probability"),
    "minus infinity, as servers write it": (_set_logprob(-9999.0), "-9999.0 as a log-probability"),
    "above zero": (_set_logprob(0.5), "0.5 as a log-probability"),
    "other tokens than it scored": (_other_token, "scored other tokens"),
    "aborted": (lambda answer: answer["choices"][0].update(finish_reason="abort"), "stopped in the middle"),
    "another prompt": (lambda answer: answer["choices"][0].update(prompt_token_ids=[1]), "another prompt"),
}


@pytest.mark.parametrize("wrong", WRONG_ANSWERS)
@pytest.mark.parametrize("has_token_route", [True, False])
def test_an_answer_that_is_not_what_was_asked_for_is_refused_whole(
    server: FakeServer, base: Path, tmp_path: Path, wrong: str, has_token_route: bool
) -> None:
    server.has_token_route = has_token_route
    change, sentence = WRONG_ANSWERS[wrong]

    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        server.change = change
        with pytest.raises(AnswerUnusable, match=sentence):
            await engine.generate(PROMPT, 2, FOUR)
        server.change = lambda answer: None
        assert len(await engine.generate(PROMPT, 2, FOUR)) == 2, "the next answer is read as ever"

    use(open_engine_at(server, base), work)


def test_a_server_that_gives_nothing_usable_ends_the_worker(server: FakeServer, base: Path, tmp_path: Path) -> None:
    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        server.change = _drop_choice
        for _ in range(31):
            with pytest.raises(AnswerUnusable):
                await engine.generate(PROMPT, 2, FOUR)
        with pytest.raises(EngineError, match="32 answers in a row") as raised:
            await engine.generate(PROMPT, 2, FOUR)
        assert not isinstance(raised.value, AnswerUnusable)

    use(open_engine_at(server, base), work)


class BrokenStream(httpx.AsyncByteStream):
    """Half an answer, then the connection is gone."""

    async def __aiter__(self):  # type: ignore[no-untyped-def]  # an async generator of the base's kind
        yield b'{"choices": ['
        raise httpx.RemoteProtocolError("peer closed connection without sending complete message body")


@pytest.mark.parametrize(
    "failure",
    [
        lambda: httpx.Response(200, headers={"content-type": "application/json"}, stream=BrokenStream()),
        lambda: httpx.Response(200, headers={"content-type": "application/json"}, content=b'{"choices": ['),
        lambda: httpx.ConnectError("refused"),
        lambda: httpx.Response(503, json={"error": {"message": "busy"}}),
        lambda: httpx.Response(429),
        lambda: httpx.Response(500, text="engine died"),
    ],
    ids=["stops mid-stream", "half a body", "no connection", "503", "429", "500"],
)
def test_what_got_no_whole_answer_is_asked_again_and_then_given_up(
    server: FakeServer, base: Path, tmp_path: Path, failure: Callable[[], httpx.Response | Exception]
) -> None:
    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        server.failures = [failure()]
        assert len(await engine.generate(PROMPT, 2, FOUR)) == 2
        server.failures = [failure(), failure()]
        with pytest.raises(EngineError, match=r"gave no whole answer|answers 5|answers 429") as raised:
            await engine.generate(PROMPT, 2, FOUR)
        assert not isinstance(raised.value, AnswerUnusable)
        assert not server.failures

    use(open_engine_at(server, base), work)


@pytest.mark.parametrize("failure", [httpx.Response(400, json={"error": {"message": "bad"}}), httpx.ReadTimeout("too long")])
def test_what_would_fail_again_is_not_asked_again(
    server: FakeServer, base: Path, tmp_path: Path, failure: httpx.Response | Exception
) -> None:
    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        server.failures = [failure]
        with pytest.raises(EngineError, match=r"answers 400: bad|ReadTimeout"):
            await engine.generate(PROMPT, 2, FOUR)

    use(open_engine_at(server, base), work)


def test_a_look_that_is_not_answered_in_time_is_repeated(caplog: pytest.LogCaptureFixture) -> None:
    """A generation may take minutes, but a server that does not even say how it is stands in the log with its address."""
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) == 1:
            raise httpx.ReadTimeout("too long", request=request)
        return httpx.Response(200, json={"data": []})

    async def look() -> object:
        client = ServerClient(URL, ServerOptions(url=URL, retries=1), key="", transport=httpx.MockTransport(answer))
        try:
            return await client.get("/v1/models")
        finally:
            await client.close()

    assert asyncio.run(look()) == {"data": []}
    assert f"{URL}/v1/models gave no whole answer: ReadTimeout" in caplog.text
    assert asked[0].extensions["timeout"]["read"] == 30.0


@pytest.mark.parametrize("has_token_route", [True, False])
def test_more_stop_texts_than_the_completions_route_takes_are_not_sent_to_it(
    server: FakeServer, base: Path, tmp_path: Path, has_token_route: bool
) -> None:
    server.has_token_route = has_token_route

    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        five = replace(FOUR, stop=("a", "b", "c", "d", "e"))
        if has_token_route:
            assert len(await engine.generate(PROMPT, 2, five)) == 2
        else:
            with pytest.raises(EngineError, match="at most 4 stop texts, and 5 are asked for"):
                await engine.generate(PROMPT, 2, five)

    use(open_engine_at(server, base), work)


def test_no_more_requests_run_at_once_than_the_options_say(server: FakeServer, base: Path, tmp_path: Path) -> None:
    async def work(engine: OpenAIEngine) -> None:
        await engine.install(adapters(tmp_path, 1)[0])
        await asyncio.gather(*(engine.generate(PROMPT, 1, FOUR) for _ in range(20)))

    use(open_engine_at(server, base, requests=3), work)
    assert server.most_at_once == 3


def test_adapters_reach_a_server_elsewhere_by_a_shared_folder(server: FakeServer, base: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "as-seen").symlink_to(shared)

    async def work(engine: OpenAIEngine) -> None:
        first, second = adapters(tmp_path, 2)
        await engine.install(first)
        (path,) = server.adapters.values()
        assert Path(path).parent == tmp_path / "as-seen"
        assert (Path(path) / "adapter_model.safetensors").read_bytes() == (first.folder / "adapter_model.safetensors").read_bytes()
        await engine.install(second)

    use(open_engine_at(server, base, adapter_folder=str(shared), server_folder=str(tmp_path / "as-seen")), work)
    assert not list(shared.iterdir()), "copies go with their adapters"


def test_full_weights_are_reloaded_and_labelled(server: FakeServer, base: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    snapshot = write_weights(tmp_path / "full", BASE)

    async def work(engine: OpenAIEngine) -> None:
        await engine.install(snapshot)
        assert len(await engine.generate(PROMPT, 2, FOUR)) == 2
        server.label = "somebody-else-s"
        with pytest.raises(AnswerUnusable, match="generated under somebody-else-s, and 5-555555555555 was asked for"):
            await engine.generate(PROMPT, 2, FOUR)
        server.reload_complaint = "lm_head does not hold the weights of the file"
        with pytest.raises(SnapshotRejected, match="lm_head does not hold"):
            await engine.install(snapshot)

    use(open_engine_at(server, base, kind=WeightKind.FULL), work)


def test_a_server_that_says_loaded_and_does_not_list_it_is_not_believed(server: FakeServer, base: Path, tmp_path: Path) -> None:
    first, second = adapters(tmp_path, 2)

    async def work(engine: OpenAIEngine) -> None:
        await engine.install(first)
        server.adapters = Forgetful(server.adapters)
        with pytest.raises(SnapshotRejected, match="does not list it"):
            await engine.install(second)
        assert engine.installed == first.ref

    use(open_engine_at(server, base), work)


class Forgetful(dict[str, str]):
    """Takes what it is given and has none of it."""

    def __setitem__(self, name: str, path: str) -> None:
        del name, path


def _options(**attributes: object) -> Callable[[FakeServer], None]:
    def set_all(server: FakeServer) -> None:
        for name, value in attributes.items():
            setattr(server, name, value)

    return set_all


@pytest.mark.parametrize(
    ("shape", "kind", "sentence", "hint"),
    [
        (_options(has_load_route=False), WeightKind.LORA, "cannot load adapters", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (_options(has_rpc_route=False), WeightKind.FULL, "cannot load full weights", "--worker-extension-cls"),
        (_options(gives_token_ids=False), WeightKind.LORA, "does not return the token ids", "another engine"),
        (_options(max_model_len=63), WeightKind.LORA, "takes 63 tokens", "--max-model-len 64"),
        (_options(key="other"), WeightKind.LORA, "answers 401", "server's log"),
    ],
)  # fmt: skip
def test_a_server_that_cannot_be_used_is_refused_at_the_start(
    server: FakeServer, base: Path, shape: Callable[[FakeServer], None], kind: WeightKind, sentence: str, hint: str
) -> None:
    shape(server)
    with pytest.raises(UserError, match=sentence) as raised:
        use(open_engine_at(server, base, kind=kind), lambda engine: engine.install(None))  # type: ignore[arg-type]  # never reached
    assert hint in raised.value.hint


def test_a_model_that_the_server_does_not_have_is_named_beside_those_it_has(server: FakeServer, base: Path) -> None:
    with pytest.raises(UserError, match="has no model 'bse'") as raised:
        use(open_engine_at(server, base, model="bse"), lambda engine: engine.close())
    assert "one of: base" in raised.value.hint


@pytest.mark.parametrize("has_token_route", [True, False])
def test_a_server_without_logprobs_says_so_and_leaves_them_to_the_learner(
    server: FakeServer, base: Path, tmp_path: Path, has_token_route: bool
) -> None:
    server.gives_logprobs = False
    server.has_token_route = has_token_route

    async def work(engine: OpenAIEngine) -> None:
        assert engine.capabilities.logprobs is LogprobSource.RECOMPUTED
        assert engine.capabilities.described()["logprobs"] == "recomputed"
        await engine.install(adapters(tmp_path, 1)[0])
        for generation in await engine.generate(PROMPT, 2, FOUR):
            assert generation.logprob_source is LogprobSource.RECOMPUTED
            assert not generation.logprobs.any()
            assert len(generation.logprobs) == len(generation.token_ids)

    use(open_engine_at(server, base), work)


@pytest.mark.parametrize("has_token_route", [True, False])
@pytest.mark.parametrize(
    ("shape", "distribution"),
    [
        (_options(), LogprobDistribution.DRAWN),
        (_options(is_whole=True), LogprobDistribution.FULL),
        (_options(is_processed=False), LogprobDistribution.FULL),
    ],
    ids=["drawn", "full", "before temperature"],
)
def test_a_server_s_logprobs_are_told_by_their_distribution(
    server: FakeServer,
    base: Path,
    tmp_path: Path,
    shape: Callable[[FakeServer], None],
    distribution: LogprobDistribution,
    has_token_route: bool,
) -> None:
    shape(server)
    server.has_token_route = has_token_route

    async def work(engine: OpenAIEngine) -> None:
        assert engine.capabilities.distribution is distribution
        await engine.install(adapters(tmp_path, 1)[0])
        for temperature in (1.0, 0.7):
            is_said = server.is_processed or temperature == 1.0
            for generation in await engine.generate(PROMPT, 2, replace(FOUR, temperature=temperature, top_p=0.9)):
                assert generation.logprob_distribution is distribution
                assert generation.logprob_source is (LogprobSource.SAMPLER if is_said else LogprobSource.RECOMPUTED)
                assert generation.logprobs.any() == is_said

    use(open_engine_at(server, base), work)


def test_weights_that_others_load_are_claimed_and_not_proved(server: FakeServer, base: Path, tmp_path: Path) -> None:
    server.has_load_route = False

    async def work(engine: OpenAIEngine) -> None:
        assert not engine.capabilities.proves_version
        assert engine.capabilities.described()["version"] == "claimed"
        await engine.install(adapters(tmp_path, 1)[0])
        (generation,) = await engine.generate(PROMPT, 1, FOUR)
        assert generation.version_spans[0].version == 0
        assert server.asked(GENERATE)[-1]["model"] == "base"

    use(open_engine_at(server, base, weights="external"), work)


def test_the_key_is_shown_to_the_server_and_to_nobody_else(
    server: FakeServer, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.DEBUG)
    server.key = KEY
    (tmp_path / "key").write_text(f"{KEY}\n")
    monkeypatch.setenv("SERVER_KEY", KEY)
    use(open_engine_at(server, base, api_key_file=str(tmp_path / "key")), lambda engine: asyncio.sleep(0))
    use(open_engine_at(server, base, api_key_env="SERVER_KEY"), lambda engine: asyncio.sleep(0))
    server.key = "another"
    with pytest.raises(UserError) as raised:
        use(open_engine_at(server, base, api_key_env="SERVER_KEY"), lambda engine: asyncio.sleep(0))
    assert KEY not in str(raised.value) + caplog.text
    assert URL in raised.value.message
