"""The engine `parallax` against a cluster in memory: what it can keep of the contract, and one sentence for whatever goes wrong."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("tokenizers", reason="prompts become text: install the extra 'rollout-cpu' or 'learner'")

from echo_rollout.engines import openai_client, parallax_cluster, parallax_engine
from echo_rollout.engines.engine import AnswerUnusable, EngineConfig, EngineError, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.engines.parallax_answers import ChatDialect
from echo_rollout.engines.parallax_engine import ParallaxEngine
from echo_rollout.engines.parallax_options import NAMES, parse_parallax_options
from echo_rollout.engines.weight_blocks import blocks_of
from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.records import ChatMessage, LogprobDistribution, LogprobSource, Sampling, WeightKind
from echo_tasks.prompts import PromptCodec
from tests.contract.engines import contract
from tests.unit.engines.fake_cluster import FakeCluster, write_chat_base
from tests.unit.engines.fake_server import MAX_LENGTH, write_base
from tests.unit.engines.weights import BASE, RANK, adapter_shapes, write_adapter, write_weights

PROMPT = (5, 9, 12)
FOUR = Sampling(max_new_tokens=4)
OPENAI, LEGACY, TEXT = ChatDialect.OPENAI, ChatDialect.LEGACY, ChatDialect.TEXT
PEERS = ["/ip4/127.0.0.1/tcp/4001/p2p/node"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat template that is the message, no transformers, and no pauses."""

    def decoder(base: Path) -> Callable[[Sequence[Sequence[int]]], list[str]]:
        return lambda rows: [" ".join(map(str, row)) for row in rows]

    def render(codec: PromptCodec, messages: Sequence[ChatMessage]) -> str:
        return messages[0].content

    monkeypatch.setattr(parallax_engine, "batch_decoder", decoder)
    monkeypatch.setattr(PromptCodec, "render", render)
    monkeypatch.setattr(openai_client, "_MOST_BACKOFF_S", 0.0)
    monkeypatch.setattr(parallax_cluster, "_LOOK_EVERY_S", 0.0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = write_base(tmp_path / "base")
    write_chat_base(folder)
    return folder


def versions(folder: Path, count: int) -> tuple[Snapshot, ...]:
    """Adapters 0 to `count` - 1, each of other bytes."""
    found = []
    for version in range(count):
        (folder / f"v{version}").mkdir(exist_ok=True)
        snapshot = write_adapter(folder / f"v{version}", adapter_shapes())
        file = snapshot.folder / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + bytes([version]))
        found.append(replace(snapshot, ref=SnapshotRef(version=version, sha256=f"sha-{version}")))
    return tuple(found)


def open_at(cluster: FakeCluster, base: Path, *, kind: WeightKind = WeightKind.LORA, **options: object) -> ParallaxEngine:
    """An engine for the cluster, not started."""
    url = "http://router" if len(cluster.schedulers) > 1 else "http://scheduler-0"
    config = EngineConfig(
        base=base, kind=kind, dtype="float32", max_length=MAX_LENGTH, lora_rank=RANK, concurrency=64,
        options={"url": url, "peers": PEERS, "retries": 1, **options},
    )  # fmt: skip
    return ParallaxEngine(config, transport=cluster.transport, open_store=lambda options: cluster.blocks)


def use(engine: ParallaxEngine, work: Callable[[ParallaxEngine], Awaitable[Any]]) -> Any:
    """Start the engine, do `work`, close it."""

    async def run() -> Any:
        try:
            await engine.start()
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize("num_schedulers", [1, 2], ids=["scheduler", "router"])
@pytest.mark.parametrize("dialect", [OPENAI, LEGACY])
def test_it_keeps_the_contract(base: Path, tmp_path: Path, dialect: ChatDialect, num_schedulers: int) -> None:
    cluster = FakeCluster(dialect, num_schedulers=num_schedulers)
    good = versions(tmp_path, 3)
    (tmp_path / "wide").mkdir()
    wide = write_adapter(tmp_path / "wide", adapter_shapes(rank=4), rank=4)

    async def keep(engine: ParallaxEngine) -> None:
        assert engine.capabilities.logprobs is LogprobSource.SAMPLER
        assert engine.capabilities.described()["version"] == "claimed"
        case = contract.Case(engine, good, (wide, replace(good[1], kind=WeightKind.FULL)), None, MAX_LENGTH)
        for behaviour in contract.BEHAVIOURS:
            await behaviour(case)

    use(open_at(cluster, base), keep)
    assert max(scheduler.most_at_once for scheduler in cluster.schedulers) <= 8 * num_schedulers
    assert cluster.blocks.is_closed


def test_every_node_has_the_bytes_of_the_version_and_old_blocks_are_forgotten(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()
    first, second = versions(tmp_path, 2)

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(first)
        (before,) = await engine.generate(PROMPT, 1, FOUR)
        await engine.install(second)
        (after,) = await engine.generate(PROMPT, 1, FOUR)
        assert before.token_ids.tolist() != after.token_ids.tolist(), "the nodes compute with what they fetched"

    use(open_at(cluster, base), work)
    wanted = {name: block for names, block in blocks_of(second.folder) for name in names}
    for node in cluster.scheduler.nodes:
        assert node.weights == wanted
        assert node.version == 1
    assert set(cluster.blocks.held.values()) == set(wanted.values())


def test_blocks_are_safetensors_files_of_a_layer_each(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    snapshot = write_weights(tmp_path / "full", {**BASE, "model.layers.1.mlp.up_proj.weight": (6, 4)})
    found = {tuple(names): block for names, block in blocks_of(snapshot.folder)}
    assert sorted(len(names) for names in found) == [1, 1, 1, 2]
    for names, block in found.items():
        (length,) = struct.unpack("<Q", block[:8])
        header = json.loads(block[8 : 8 + length])
        assert tuple(header) == names
        assert len(block) == 8 + length + max(entry["data_offsets"][1] for entry in header.values())


def test_each_dialect_is_found_out_and_says_what_it_knows(base: Path, tmp_path: Path) -> None:
    for dialect, source in ((OPENAI, LogprobSource.SAMPLER), (LEGACY, LogprobSource.SAMPLER), (TEXT, LogprobSource.RECOMPUTED)):
        cluster = FakeCluster(dialect)

        async def work(engine: ParallaxEngine, source: LogprobSource = source) -> Any:
            assert engine.capabilities.logprobs is source
            await engine.install(versions(tmp_path, 1)[0])
            (generation,) = await engine.generate(PROMPT, 1, replace(FOUR, temperature=0.5))
            assert generation.logprob_source is source
            return generation

        generation = use(open_at(cluster, base), work)
        assert generation.token_ids.tolist()[-1] == 1, "the end token is part of the answer"
        assert len(generation.logprobs) == len(generation.token_ids) == 4
        assert generation.logprobs[0] == pytest.approx(-1.0 if source is LogprobSource.SAMPLER else 0.0)


def test_log_probabilities_before_temperature_are_used_at_temperature_1_alone(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()

    def flat(answer: dict[str, Any]) -> None:
        for entry in (answer["choices"][0].get("logprobs") or {}).get("content", []):
            entry["logprob"] = -0.5
            entry["top_logprobs"] = [{"token": each["token"], "logprob": -0.5 * (1 + n)} for n, each in enumerate(entry["top_logprobs"])]

    cluster.scheduler.change = flat

    async def work(engine: ParallaxEngine) -> None:
        assert engine.capabilities.before_temperature
        await engine.install(versions(tmp_path, 1)[0])
        (generation,) = await engine.generate(PROMPT, 1, replace(FOUR, temperature=0.7))
        assert generation.logprob_source is LogprobSource.RECOMPUTED
        assert not generation.logprobs.any()
        (generation,) = await engine.generate(PROMPT, 1, FOUR)
        assert generation.logprob_source is LogprobSource.SAMPLER
        assert generation.logprob_distribution is LogprobDistribution.FULL

    use(open_at(cluster, base), work)


def _choice(**changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer["choices"][0].update(changed)


def _usage(**changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer["usage"].update(changed)


def _message(**changed: object) -> Callable[[dict[str, Any]], object]:
    return lambda answer: answer["choices"][0]["message"].update(changed)


WRONG: dict[str, tuple[ChatDialect, Callable[[dict[str, Any]], object], str]] = {
    "no choice": (OPENAI, lambda answer: answer.pop("choices"), "does not have one choice"),
    "two choices": (TEXT, lambda answer: answer["choices"].append({}), "does not have one choice"),
    "broken off": (TEXT, _choice(finish_reason="abort"), r"stopped in the middle of an answer \(abort\)"),
    "an error in the middle": (LEGACY, _choice(finish_reason="error"), r"stopped in the middle of an answer \(error\)"),
    "another template": (OPENAI, _usage(prompt_tokens=7), "read a prompt of 7 tokens, and 3 were sent"),
    "another prompt": (OPENAI, lambda answer: answer.update(prompt_token_ids=[1]), "another prompt"),
    "no token ids": (OPENAI, _choice(token_ids=None), "no token ids"),
    "log-probabilities of others": (OPENAI, _choice(token_ids=[2, 2, 2, 1]), "scored other tokens"),
    "no log-probabilities": (OPENAI, _choice(logprobs=None), "0 log-probabilities for 4 tokens"),
    "another version": (LEGACY, lambda answer: answer.update(weight_version=3), "generated under version 3, and 0 was asked for"),
    "no version": (LEGACY, lambda answer: answer.pop("weight_version"), "generated under version None, and 0"),
    "no probabilities": (LEGACY, _choice(probs=None), "0 log-probabilities for 4 tokens"),
    "a probability of 0": (LEGACY, _choice(probs=[{"a": 0.0}] * 4), "-inf as a log-probability"),
    "a probability above 1": (LEGACY, _choice(probs=[{"a": 1.5}] * 4), "0.405.* as a log-probability"),
    "text of other tokens": (TEXT, _usage(completion_tokens=3), "has 4 tokens, and the cluster says that it drew 3"),
    "a text without a number": (TEXT, lambda answer: answer.pop("usage"), "says that it drew None"),
    "a text that no token has": (TEXT, _message(content="Ω"), "do not decode to its text"),
    "a text taken apart": (TEXT, _message(reasoning_content="hm"), "reasoning_content"),
    "no text": (TEXT, _choice(message=None), "has no text"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_an_answer_that_is_not_what_was_asked_for_is_refused(base: Path, tmp_path: Path, wrong: str) -> None:
    dialect, change, sentence = WRONG[wrong]
    cluster = FakeCluster(dialect)

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        cluster.scheduler.change = change
        with pytest.raises(AnswerUnusable, match=sentence):
            await engine.generate(PROMPT, 2, FOUR)
        cluster.scheduler.change = lambda answer: None
        assert len(await engine.generate(PROMPT, 2, FOUR)) == 2, "the next answer is read as ever"

    use(open_at(cluster, base), work)


def test_an_answer_of_half_a_json_is_asked_for_again_and_then_said(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()

    def half() -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "application/json"}, content=b'{"choices": [')

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        cluster.scheduler.failures = [half()]
        assert len(await engine.generate(PROMPT, 1, FOUR)) == 1
        cluster.scheduler.failures = [half(), half()]
        with pytest.raises(EngineError, match=r"gave no whole answer.*is available with 2 of 2 nodes ready"):
            await engine.generate(PROMPT, 1, FOUR)

    use(open_at(cluster, base), work)


def test_a_node_that_leaves_while_it_generates_is_in_the_sentence(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        cluster.scheduler.nodes[1].is_ready = False
        with pytest.raises(EngineError, match=r"answers 503: Server is not ready.* is waiting with 1 of 2 nodes ready\."):
            await engine.generate(PROMPT, 2, FOUR)
        cluster.scheduler.nodes[1].is_ready = True
        assert len(await engine.generate(PROMPT, 2, FOUR)) == 2

    use(open_at(cluster, base), work)


def test_a_refit_that_never_ends_is_an_error_and_nobody_says_which_version_is_served(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()
    # The first refit is done when it is first looked at, before any time limit.
    cluster.scheduler.heartbeats_late = 0
    first, second = versions(tmp_path, 2)

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(first)
        cluster.scheduler.nodes[1].is_stuck = True
        with pytest.raises(EngineError, match=r"Not all nodes have version 1 after 0\.01 s: the cluster's time stamps are") as raised:
            await engine.install(second)
        assert not isinstance(raised.value, SnapshotRejected), "the old version is not in force at every node"

    use(open_at(cluster, base, refit_timeout_s=0.01), work)


def test_a_refit_that_one_scheduler_does_not_take_names_it(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster(num_schedulers=2)
    cluster.schedulers[1].refit_failure = httpx.Response(500, json={"data": "Sever not ready"})

    async def work(engine: ParallaxEngine) -> None:
        with pytest.raises(EngineError, match=r"Version 0 reached 1 of 2 schedulers, not http://scheduler-1\."):
            await engine.install(versions(tmp_path, 1)[0])

    use(open_at(cluster, base), work)


def test_weights_that_change_while_it_generates_cost_the_group(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster()

    def refit_behind_our_back() -> None:
        for node in cluster.scheduler.nodes:
            node.stamp += 5.0

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        cluster.scheduler.before_answer = refit_behind_our_back
        with pytest.raises(AnswerUnusable, match="weights changed while it generated"):
            await engine.generate(PROMPT, 2, FOUR)
        with pytest.raises(EngineError, match="Another program has changed the cluster's weights since version 0") as raised:
            await engine.generate(PROMPT, 2, FOUR)
        assert not isinstance(raised.value, AnswerUnusable)

    use(open_at(cluster, base), work)


def test_weights_that_others_load_are_only_noted(base: Path, tmp_path: Path) -> None:
    cluster = FakeCluster(LEGACY)

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 2)[1])
        (generation,) = await engine.generate(PROMPT, 1, FOUR)
        assert generation.version_spans[0].version == 1

    use(open_at(cluster, base, weights="external", peers=[]), work)
    assert not cluster.scheduler.refit


def test_stop_texts_are_refused_where_their_tokens_are_lost(base: Path, tmp_path: Path) -> None:
    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        with pytest.raises(EngineError, match=r"Leave \[rollout\] stop empty"):
            await engine.generate(PROMPT, 1, replace(FOUR, stop=("b",)))

    use(open_at(FakeCluster(TEXT), base), work)


def test_a_prompt_that_the_template_does_not_make_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptCodec, "render", lambda codec, messages: f"a{messages[0].content.strip('c')}b")

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        assert len(await engine.generate((2, 9, 3), 1, FOUR)) == 1
        assert cluster.scheduler.asked[-1]["messages"] == [{"role": "user", "content": "h"}]
        for prompt in ((9, 3), (2, 4, 3)):
            with pytest.raises(AnswerUnusable, match="cannot be sent as a chat message"):
                await engine.generate(prompt, 1, FOUR)

    cluster = FakeCluster(LEGACY)
    cluster.scheduler.template_tokens = 2
    use(open_at(cluster, base), work)


def test_a_cluster_that_is_not_ready_says_what_it_waits_for(base: Path) -> None:
    cluster = FakeCluster()
    cluster.scheduler.nodes[0].is_ready = False
    with pytest.raises(UserError, match=r"not ready after 0\.01 s\. The scheduler at http://scheduler-0 is waiting with 1 of 2") as raised:
        use(open_at(cluster, base, start_timeout_s=0.01), lambda engine: asyncio.sleep(0))
    assert "parallax join" in raised.value.hint


def test_a_server_that_is_no_cluster_is_refused(base: Path) -> None:
    cluster = FakeCluster()

    async def other(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"object": "list"})

    engine = open_at(cluster, base)
    engine._transport = httpx.MockTransport(other)
    with pytest.raises(UserError, match="does not answer as a Parallax scheduler does"):
        use(engine, lambda engine: asyncio.sleep(0))


def test_a_dialect_that_the_cluster_does_not_speak_is_named(base: Path) -> None:
    with pytest.raises(UserError, match="parallax-legacy: The server's answer has no token ids"):
        use(open_at(FakeCluster(TEXT), base, dialect="parallax-legacy"), lambda engine: asyncio.sleep(0))


@pytest.mark.parametrize(("num_lost", "is_found"), [(9, True), (10, False)])
def test_the_first_texts_may_be_of_other_tokens(base: Path, num_lost: int, *, is_found: bool) -> None:
    """A token without a text of its own, as half a letter is: nothing is known about the cluster then."""
    cluster, lost = FakeCluster(TEXT), 0

    def lose(answer: dict[str, Any]) -> None:
        nonlocal lost
        if answer["choices"][0]["finish_reason"] != "error" and lost < num_lost:
            lost += 1
            answer["choices"][0]["message"]["content"] = "h"

    cluster.scheduler.change = lose
    engine = open_at(cluster, base, dialect="parallax-head")
    if is_found:
        use(engine, lambda engine: asyncio.sleep(0))
    else:
        with pytest.raises(UserError, match="parallax-head: The answer's text has"):
            use(engine, lambda engine: asyncio.sleep(0))


@pytest.mark.parametrize(
    ("options", "sentence", "hint"),
    [
        ({"urll": "http://a"}, "no option 'urll'", "Did you mean 'url'?"),
        ({}, "url is missing", "http://host:port"),
        ({"url": "a:1", "peers": PEERS}, "url is 'a:1'", "http://host:port"),
        ({"url": "http://a"}, "peers is empty", "external"),
        ({"url": "http://a", "peers": "x"}, "peers is 'x'", "type list"),
        ({"url": "http://a", "peers": PEERS, "dialect": "sse"}, "dialect is 'sse'", "openai-vllm, parallax-legacy, parallax-head"),
        ({"url": "http://a", "peers": PEERS, "refit_timeout_s": 0}, "refit_timeout_s is 0", "above 0"),
        ({"url": "http://a", "peers": PEERS, "api_key": "x"}, "api_key would be written", "api_key_file"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, object], sentence: str, hint: str) -> None:
    with pytest.raises(UserError, match=sentence) as raised:
        parse_parallax_options(options)
    assert hint in raised.value.hint


def test_options_have_their_defaults() -> None:
    found = parse_parallax_options({"url": "http://a", "peers": PEERS})
    assert (found.server.retries, found.peers) == (8, tuple(PEERS))
    assert math.isfinite(found.refit_timeout_s)
    assert set(NAMES) >= {"url", "peers", "weights"}


def no_template(codec: PromptCodec, messages: Sequence[ChatMessage]) -> str:
    raise InvalidRecord(InvalidReason.HANDLER_REFUSED, "The chat template of base refused the messages: there is none.")


def test_a_model_that_no_message_can_be_sent_to_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for render, sentence in (
        (no_template, "needs a chat template: .* there is none"),
        (lambda codec, messages: "abc", "leaves a user's message out"),
        (lambda codec, messages: messages[0].content * 2, "No token of the model can be sent"),
    ):
        monkeypatch.setattr(PromptCodec, "render", render)
        with pytest.raises(UserError, match=sentence):
            use(open_at(FakeCluster(), base), lambda engine: asyncio.sleep(0))


def test_the_end_token_is_the_one_that_the_cluster_names_or_the_usual_one(base: Path, tmp_path: Path) -> None:
    (base / "config.json").write_text(json.dumps({"vocab_size": 32, "eos_token_id": [1, 31]}))
    cluster = FakeCluster(TEXT)

    async def work(engine: ParallaxEngine) -> None:
        await engine.install(versions(tmp_path, 1)[0])
        for reason, end in ((None, 1), (31, 31), (7, 1)):
            cluster.scheduler.change = _choice(stop_reason=reason)
            (generation,) = await engine.generate(PROMPT, 1, FOUR)
            assert generation.token_ids.tolist()[-1] == end

    use(open_at(cluster, base), work)
    (base / "config.json").write_text(json.dumps({"vocab_size": 32}))
    with pytest.raises(UserError, match="does not say `eos_token_id`"):
        use(open_at(cluster, base), lambda engine: asyncio.sleep(0))
