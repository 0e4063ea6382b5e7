"""What every engine must do, as one coroutine a behaviour. A test runs them against an engine that is started already."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from echo_rollout.engines.engine import Engine, EngineError, Generation, Snapshot, SnapshotRejected, Switch
from echo_schemas.records import FinishReason, Sampling

PROMPT = (5, 9, 12, 7)
END = 1
LONG = Sampling(max_new_tokens=40)
Behaviour = Callable[["Case"], Awaitable[None]]
_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """A started engine, three versions for it, one that is broken, and one of the wrong shape. `base` None: it has no model."""

    engine: Engine
    versions: tuple[Snapshot, ...]
    refused: tuple[Snapshot, ...]
    expected: Callable[[Snapshot, list[int], Sampling], list[float]] | None
    max_length: int
    base: Path | None = None


async def nothing_before_the_first_version(case: Case) -> None:
    assert case.engine.installed is None
    with pytest.raises(EngineError, match="No version is installed yet"):
        await case.engine.generate(PROMPT, 1, Sampling(max_new_tokens=4))


async def generations_carry_version_and_sha(case: Case) -> None:
    for snapshot in case.versions:
        await case.engine.install(snapshot)
        assert case.engine.installed == snapshot.ref
        assert case.engine.in_use == {snapshot.ref.version}
        for generation in await case.engine.generate(PROMPT, 3, Sampling(max_new_tokens=4)):
            _is_under(generation, snapshot)


async def logprobs_equal_a_plain_forward(case: Case) -> None:
    for snapshot in case.versions[:2]:
        await case.engine.install(snapshot)
        for sampling in (Sampling(max_new_tokens=12, temperature=0.7), Sampling(max_new_tokens=12)):
            groups = await asyncio.gather(*(case.engine.generate(PROMPT, 4, sampling) for _ in range(3)))
            for generation in (each for group in groups for each in group):
                _is_likely_as_said(case, snapshot, generation, sampling)


async def a_version_arrives_while_generations_run(case: Case) -> None:
    old, new = case.versions[:2]
    await case.engine.install(old)
    before = [asyncio.ensure_future(case.engine.generate(PROMPT, 4, LONG)) for _ in range(6)]
    await asyncio.sleep(0)
    installing = asyncio.ensure_future(case.engine.install(new))
    await asyncio.sleep(0)
    await installing
    if case.engine.capabilities.switch is Switch.DRAINS:
        assert all(each.done() for each in before)
    after = await asyncio.gather(*(case.engine.generate(PROMPT, 4, LONG) for _ in range(3)))
    for generation in (each for group in await asyncio.gather(*before) for each in group):
        _is_under(generation, old)
        _is_likely_as_said(case, old, generation, LONG)
    for generation in (each for group in after for each in group):
        _is_under(generation, new)
    assert case.engine.in_use == {new.ref.version}


async def a_bad_snapshot_changes_nothing(case: Case) -> None:
    good = case.versions[0]
    await case.engine.install(good)
    for snapshot in case.refused:
        with pytest.raises(SnapshotRejected, match=r"\.$"):
            await case.engine.install(snapshot)
        assert case.engine.installed == good.ref
        sampling = Sampling(max_new_tokens=8)
        (generation,) = await case.engine.generate(PROMPT, 1, sampling)
        _is_under(generation, good)
        _is_likely_as_said(case, good, generation, sampling)


async def bad_prompts_fail_alone(case: Case) -> None:
    await case.engine.install(case.versions[0])
    good = asyncio.ensure_future(case.engine.generate(PROMPT, 1, Sampling(max_new_tokens=4)))
    for prompt, sentence in (
        ((), "empty"),
        ((5, 9_999), "vocabulary"),
        ((-1,), "vocabulary"),
        ((5,) * case.max_length, "above the engine"),
    ):
        with pytest.raises(EngineError, match=sentence):
            await case.engine.generate(prompt, 1, Sampling(max_new_tokens=4))
    assert len(await good) == 1


async def bad_sampling_fails_alone(case: Case) -> None:
    await case.engine.install(case.versions[0])
    good = asyncio.ensure_future(case.engine.generate(PROMPT, 1, Sampling(max_new_tokens=4)))
    for sampling in (Sampling(max_new_tokens=4, temperature=-1.0), Sampling(max_new_tokens=4, top_p=0.0), Sampling(max_new_tokens=0)):
        with pytest.raises(EngineError, match=r"sampling\."):
            await case.engine.generate(PROMPT, 1, sampling)
    assert len(await good) == 1


async def truncated_sampling_says_what_it_drew_from(case: Case) -> None:
    await case.engine.install(case.versions[0])
    samplings = [
        Sampling(max_new_tokens=12, **truncation)
        for truncation in ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"top_k": 8, "top_p": 0.8, "min_p": 0.05, "temperature": 0.8})
    ]
    # Together, so that rows with different bounds share a batch.
    groups = await asyncio.gather(*(case.engine.generate(PROMPT, 8, sampling) for sampling in samplings))
    for sampling, group in zip(samplings, groups, strict=True):
        for generation in group:
            _is_likely_as_said(case, case.versions[0], generation, sampling)


async def temperature_zero_takes_the_most_likely(case: Case) -> None:
    await case.engine.install(case.versions[0])
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    first, *others = await case.engine.generate(PROMPT, 3, sampling)
    _is_likely_as_said(case, case.versions[0], first, sampling)
    if case.expected is not None:
        assert all(other.token_ids.tolist() == first.token_ids.tolist() for other in others)


async def a_seed_repeats_a_group_of_different_members(case: Case) -> None:
    await case.engine.install(case.versions[0])
    sampling = Sampling(max_new_tokens=20, seed=7)
    group, again = [[each.token_ids.tolist() for each in await case.engine.generate(PROMPT, 4, sampling)] for _ in range(2)]
    assert group == again
    assert len({tuple(tokens) for tokens in group}) == 4


async def stop_texts_cut_the_text_and_keep_the_tokens(case: Case) -> None:
    if case.expected is None:
        return
    await case.engine.install(case.versions[0])
    stops = ("b", "cd")
    groups = await asyncio.gather(*(case.engine.generate(PROMPT, 16, replace(LONG, stop=stops)) for _ in range(2)))
    cut = 0
    for generation in (each for group in groups for each in group):
        whole = _text(generation.token_ids.tolist())
        ends = [whole.find(stop) for stop in stops if stop in whole]
        assert generation.text == (whole[: min(ends)] if ends else whole)
        if ends:
            cut += 1
            assert generation.finish_reason is FinishReason.STOP
            assert whole.endswith(stops), "it went on after a stop text"
        _is_likely_as_said(case, case.versions[0], generation, LONG)
    assert cut, "no answer came to a stop text: the model of this test is wrong"


async def an_answer_that_is_all_stop_text_is_empty_and_has_its_token(case: Case) -> None:
    if case.expected is None:
        return
    await case.engine.install(case.versions[0])
    likeliest = replace(LONG, temperature=0.0)
    (first,) = await case.engine.generate(PROMPT, 1, replace(likeliest, max_new_tokens=1))
    assert first.text, "the likeliest first token has no text: the model of this test is wrong"
    for generation in await case.engine.generate(PROMPT, 8, replace(likeliest, stop=(first.text,))):
        assert generation.text == ""
        assert generation.finish_reason is FinishReason.STOP
        assert len(generation.logprobs) == len(generation.token_ids) >= 1


async def an_answer_may_reach_the_greatest_length(case: Case) -> None:
    await case.engine.install(case.versions[0])
    prompt = (PROMPT * case.max_length)[: case.max_length - 5]
    for generation in await case.engine.generate(prompt, 8, Sampling(max_new_tokens=5)):
        assert 1 <= len(generation.token_ids) <= 5
        assert (generation.finish_reason is FinishReason.LENGTH) == (len(generation.token_ids) == 5 and generation.token_ids[-1] != END)


async def more_than_a_batch_holds_is_served_too(case: Case) -> None:
    await case.engine.install(case.versions[0])
    groups = await asyncio.gather(*(case.engine.generate(PROMPT, 50, Sampling(max_new_tokens=2)) for _ in range(3)))
    assert [len(group) for group in groups] == [50, 50, 50]


async def answers_end_by_end_token_or_length(case: Case) -> None:
    await case.engine.install(case.versions[0])
    groups = await asyncio.gather(*(case.engine.generate(PROMPT, 16, LONG) for _ in range(4)))
    for generation in (each for group in groups for each in group):
        if generation.finish_reason is FinishReason.LENGTH:
            assert len(generation.token_ids) == LONG.max_new_tokens
        else:
            assert generation.finish_reason is FinishReason.STOP
            assert generation.token_ids.size > 0
    if case.expected is not None:
        ended = [each.token_ids[-1] for group in groups for each in group if each.finish_reason is FinishReason.STOP]
        assert ended, "no answer of 64 came to an end token: the model of this test is wrong"
        assert set(ended) == {END}
    (short,) = await case.engine.generate(PROMPT, 1, Sampling(max_new_tokens=1))
    assert len(short.token_ids) == 1


async def a_cancelled_generation_leaves_nothing(case: Case) -> None:
    await case.engine.install(case.versions[0])
    waiting = asyncio.ensure_future(case.engine.generate(PROMPT, 8, LONG))
    await asyncio.sleep(0)
    # An engine without a model may have answered already.
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
    await case.engine.install(case.versions[1])
    (generation,) = await case.engine.generate(PROMPT, 1, Sampling(max_new_tokens=4))
    _is_under(generation, case.versions[1])
    assert case.engine.in_use == {case.versions[1].ref.version}


async def close_fails_what_runs_and_may_be_repeated(case: Case) -> None:
    await case.engine.install(case.versions[0])
    waiting = [asyncio.ensure_future(case.engine.generate(PROMPT, 16, LONG)) for _ in range(8)]
    await asyncio.sleep(0)
    await case.engine.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=120)
    assert all(isinstance(outcome, list | EngineError) for outcome in outcomes)
    await case.engine.close()
    with pytest.raises(EngineError, match="closed"):
        await case.engine.generate(PROMPT, 1, LONG)


BEHAVIOURS: tuple[Behaviour, ...] = (
    nothing_before_the_first_version,
    generations_carry_version_and_sha,
    logprobs_equal_a_plain_forward,
    a_version_arrives_while_generations_run,
    a_bad_snapshot_changes_nothing,
    bad_prompts_fail_alone,
    bad_sampling_fails_alone,
    truncated_sampling_says_what_it_drew_from,
    temperature_zero_takes_the_most_likely,
    a_seed_repeats_a_group_of_different_members,
    stop_texts_cut_the_text_and_keep_the_tokens,
    an_answer_that_is_all_stop_text_is_empty_and_has_its_token,
    an_answer_may_reach_the_greatest_length,
    more_than_a_batch_holds_is_served_too,
    answers_end_by_end_token_or_length,
    a_cancelled_generation_leaves_nothing,
    close_fails_what_runs_and_may_be_repeated,
)
"""In this order against one engine: the first needs it fresh, the last ends it."""


def _is_under(generation: Generation, snapshot: Snapshot) -> None:
    assert generation.weights_sha256 == snapshot.ref.sha256
    assert [(span.start, span.end, span.version) for span in generation.version_spans] == [
        (0, len(generation.token_ids), snapshot.ref.version)
    ]


def _is_likely_as_said(case: Case, snapshot: Snapshot, generation: Generation, sampling: Sampling) -> None:
    """Each token's log-probability is that of a plain forward, under the distribution that it was drawn from."""
    assert len(generation.logprobs) == len(generation.token_ids)
    if case.expected is not None:
        wanted = case.expected(snapshot, generation.token_ids.tolist(), sampling)
        np.testing.assert_allclose(generation.logprobs, wanted, atol=_DIFFERENCE, rtol=0)


def _text(tokens: list[int]) -> str:
    """What the tokenizer of `snapshots.make_base` reads; ids 0 and 1 are special."""
    return "".join("abcdefghijklmnopqrstuvwxyz0123"[token - 2] for token in tokens if token > END)
