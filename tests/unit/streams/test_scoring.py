"""Whatever a reward function does, there is a record of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from echo_bus.clock import ManualClock
from echo_schemas.records import RewardOutcome
from echo_settings.sections import ScoringSettings
from echo_streams.intake import Identity
from echo_streams.metrics import StreamsMetrics
from echo_streams.scoring import Scorer
from echo_tasks.rewards import RewardResult, ScoredSample
from tests.unit.streams.stage import attached, judgeable, sample, scorer, values

WAIT_S = 60.0


def number(sample: ScoredSample) -> float:
    return float(sample.completion)


async def number_later(sample: ScoredSample) -> float:
    await asyncio.sleep(0)
    return float(sample.completion)


def numbers(samples: list[ScoredSample]) -> list[float]:
    return [float(sample.completion) for sample in samples]


async def numbers_later(samples: list[ScoredSample]) -> list[float]:
    await asyncio.sleep(0)
    return numbers(samples)


class Failing:
    """Raises the first `times` times, then gives 1; async as its `call` is."""

    def __init__(self, times: int, error: BaseException | None = None) -> None:
        self.times = times
        self.calls = 0
        self.error = error or ValueError("no judge today")

    def sync(self, _: Any) -> float:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return 1.0

    async def later(self, given: Any) -> float:
        await asyncio.sleep(0)
        return self.sync(given)

    def batch(self, given: list[Any]) -> list[float]:
        return [self.sync(given)] * len(given)


KINDS: list[tuple[str, dict[str, Any]]] = [("sync", {}), ("later", {}), ("batch", {"batch": True})]


@pytest.mark.parametrize(
    ("function", "options"),
    [(number, {}), (number_later, {}), (numbers, {"batch": True}), (numbers_later, {"batch": True})],
    ids=["sync", "async", "batch", "async batch"],
)
def test_every_kind_of_function_scores_every_sample_in_order(function: Callable[..., Any], options: dict[str, Any]) -> None:
    rewards = asyncio.run(scorer(attached(function, version="3", **options)).score(judgeable(5)))
    assert values(rewards) == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [(found.seq, found.of.offset, found.group_id) for found in rewards] == [(n, n, f"demo/{n}") for n in range(5)]
    assert {(found.name, found.code_version, found.outcome) for found in rewards} == {("r", "3", RewardOutcome.SCORED)}


def test_all_functions_judge_all_samples() -> None:
    metrics = StreamsMetrics()
    work = scorer(attached(number, "a"), attached(number_later, "b"), attached(numbers, "c", batch=True), metrics=metrics)
    rewards = asyncio.run(work.score(judgeable(2)))
    assert [(found.seq, found.name) for found in rewards] == [(0, "a"), (0, "b"), (0, "c"), (1, "a"), (1, "b"), (1, "c")]
    for name in "abc":
        assert sample(metrics, "echo_streams_rewards_total", name=name, outcome="scored") == 2
    # A batch function is called once.
    assert [sample(metrics, "echo_streams_call_seconds_count", name=name) for name in "abc"] == [2, 2, 1]


def test_one_that_fails_does_not_touch_the_others() -> None:
    rewards = asyncio.run(scorer(attached(Failing(9).sync, "bad"), attached(number, "good")).score(judgeable(2)))
    assert [(found.name, found.value) for found in rewards] == [("bad", None), ("good", 0.0), ("bad", None), ("good", 1.0)]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_failure_is_tried_again(kind: str, options: dict[str, Any]) -> None:
    failing, metrics = Failing(2), StreamsMetrics()
    (found,) = asyncio.run(scorer(attached(getattr(failing, kind), **options), metrics=metrics, retries=2).score(judgeable()))
    assert (found.outcome, found.value, failing.calls) == (RewardOutcome.SCORED, 1.0, 3)
    assert sample(metrics, "echo_streams_retries_total", name="r") == 2


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_function_that_keeps_raising_fails_with_its_words(kind: str, options: dict[str, Any]) -> None:
    failing, metrics = Failing(9), StreamsMetrics()
    (found,) = asyncio.run(scorer(attached(getattr(failing, kind), **options), metrics=metrics, retries=1).score(judgeable()))
    assert (found.outcome, found.value, found.error) == (RewardOutcome.FAILED, None, "ValueError: no judge today")
    assert failing.calls == 2
    assert sample(metrics, "echo_streams_rewards_total", name="r", outcome="failed") == 1


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_function_that_ends_the_process_fails_like_any_other(kind: str, options: dict[str, Any]) -> None:
    (found,) = asyncio.run(scorer(attached(getattr(Failing(9, SystemExit(3)), kind), **options)).score(judgeable()))
    assert (found.outcome, found.error) == (RewardOutcome.FAILED, "SystemExit: 3")


def test_a_long_error_is_cut() -> None:
    (found,) = asyncio.run(scorer(attached(Failing(9, ValueError("x" * 10_000)).sync)).score(judgeable()))
    assert found.error is not None
    assert len(found.error) == 501
    assert found.error.endswith("x…")


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, None, "1"])
def test_what_is_no_reward_fails_and_is_not_tried_again(kind: str, options: dict[str, Any], value: Any) -> None:
    calls: list[Any] = []

    def sync(given: Any) -> Any:
        calls.append(given)
        return [value] if options else value

    async def later(given: Any) -> Any:
        return sync(given)

    (found,) = asyncio.run(scorer(attached(later if kind == "later" else sync, **options), retries=3).score(judgeable()))
    assert (found.outcome, found.value, len(calls)) == (RewardOutcome.FAILED, None, 1)
    assert "value" in (found.error or "")


def test_a_batch_function_that_loses_count_fails_for_all() -> None:
    rewards = asyncio.run(scorer(attached(lambda samples: [1.0], batch=True)).score(judgeable(3)))
    assert [found.error for found in rewards] == ["A batch reward must return one value per sample: 3 were given, 1 came back."] * 3


def test_components_and_duration_are_kept() -> None:
    (found,) = asyncio.run(scorer(attached(lambda _: RewardResult(value=1.0, components={"right": 0.5}))).score(judgeable()))
    assert found.components == {"right": 0.5}
    assert found.seconds > 0


@pytest.mark.parametrize("own_limit", [True, False])
@pytest.mark.parametrize("batch", [True, False])
def test_an_asynchronous_function_that_hangs_is_timed_out_and_not_tried_again(own_limit: bool, batch: bool) -> None:
    calls, metrics = [], StreamsMetrics()

    async def hangs(given: Any) -> float:
        calls.append(given)
        await asyncio.Event().wait()
        return 1.0

    short: dict[str, Any] = {"timeout_s": 0.01}
    entry = attached(hangs, batch=batch, **(short if own_limit else {}))
    rewards = asyncio.run(scorer(entry, metrics=metrics, retries=3, **({} if own_limit else short)).score(judgeable(2)))
    assert {(found.outcome, found.value, found.error) for found in rewards} == {(RewardOutcome.TIMED_OUT, None, "No answer within 0.01 s.")}
    assert len(calls) == (1 if batch else 2)
    assert sample(metrics, "echo_streams_rewards_total", name="r", outcome="timed_out") == 2


@pytest.mark.parametrize("batch", [True, False])
def test_a_function_may_say_what_a_call_is_worth_that_had_to_be_ended(batch: bool) -> None:
    """The samples of one prompt wait for one another: a value now is better than none after the deadline."""

    async def hangs(_: Any) -> float:
        await asyncio.Event().wait()
        return 1.0

    rewards = asyncio.run(scorer(attached(hangs, batch=batch, timeout_s=0.01, at_timeout=-0.5)).score(judgeable(2)))
    assert {(found.outcome, found.value, found.components["ended"]) for found in rewards} == {(RewardOutcome.SCORED, -0.5, 1.0)}


def test_a_time_out_of_the_functions_own_is_a_failure() -> None:
    failing = Failing(1, TimeoutError("the judge's, not ours"))
    (found,) = asyncio.run(scorer(attached(failing.later)).score(judgeable()))
    assert (found.outcome, failing.calls) == (RewardOutcome.SCORED, 2)


def test_a_cancellation_inside_a_function_is_a_failure_and_not_ours() -> None:
    failing = Failing(9, asyncio.CancelledError("the judge's session was closed"))
    (found,) = asyncio.run(scorer(attached(failing.later)).score(judgeable()))
    assert (found.outcome, found.error) == (RewardOutcome.FAILED, "CancelledError: the judge's session was closed")


def test_a_cancelled_batch_ends_its_calls() -> None:
    begun: list[asyncio.Event] = []
    ended: list[bool] = []

    async def hangs(_: Any) -> float:
        begun[0].set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)
        return 1.0

    async def run() -> None:
        begun.append(asyncio.Event())
        task = asyncio.create_task(scorer(attached(hangs)).score(judgeable(2)))
        async with asyncio.timeout(WAIT_S):
            await begun[0].wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert ended == [True, True]


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_a_function_does_to_an_entry_no_other_sees(kind: str) -> None:
    def spoil(sample: ScoredSample) -> float:
        sample.entry["answer"] = sample.completion  # type: ignore[index]
        sample.metadata["told"] = "yes"  # type: ignore[index]
        return 0.0

    async def spoil_later(sample: ScoredSample) -> float:
        return spoil(sample)

    def compare(sample: ScoredSample) -> float:
        return float(sample.entry["answer"] == sample.completion or "told" in sample.metadata)

    first = attached(spoil if kind == "sync" else spoil_later, "spoil")
    rewards = asyncio.run(scorer(first, attached(compare, "compare")).score(judgeable(1, entry='{"answer": "right"}')))
    assert values(rewards) == [0.0, 0.0]


def test_one_that_hangs_keeps_no_other_waiting() -> None:
    handed_on: list[str] = []

    async def hangs(_: Any) -> float:
        await asyncio.sleep(WAIT_S)
        return 0.0

    async def run() -> None:
        work = scorer(attached(hangs, "hangs"), attached(number_later, "healthy"), concurrency=2, timeout_s=WAIT_S)
        arrived = asyncio.Event()

        async def hand_on(rewards: list[Any]) -> None:
            handed_on.extend({found.name for found in rewards})
            arrived.set()

        batch = asyncio.create_task(work.score(judgeable(10), hand_on))
        async with asyncio.timeout(WAIT_S):
            await arrived.wait()
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)

    asyncio.run(run())
    assert handed_on == ["healthy"]


def test_the_first_rewards_of_a_batch_do_not_wait_for_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_streams.scoring._HAND_ON_S", 0.01)
    handed_on: list[list[int]] = []

    async def run() -> None:
        arrived = asyncio.Event()

        async def last_waits(given: ScoredSample) -> float:
            if given.completion == "2":
                await arrived.wait()
            return 1.0

        async def hand_on(rewards: list[Any]) -> None:
            handed_on.append([found.of.offset for found in rewards])
            arrived.set()

        async with asyncio.timeout(WAIT_S):
            assert await scorer(attached(last_waits)).score(judgeable(3), hand_on) == []

    asyncio.run(run())
    assert handed_on == [[0, 1], [2]]


def test_one_that_only_hangs_is_called_now_and_then() -> None:
    clock, calls = ManualClock(), 0

    async def hangs(_: Any) -> float:
        nonlocal calls
        calls += 1
        if calls > 9:
            return 1.0
        await asyncio.sleep(WAIT_S)
        return 0.0

    async def run() -> None:
        work = Scorer(
            [attached(hangs)], run_id="demo", limits=ScoringSettings(timeout_s=0.01, concurrency=1), metrics=StreamsMetrics(), clock=clock
        )
        rewards = await work.score(judgeable(20))
        assert [reward.outcome for reward in rewards] == [RewardOutcome.TIMED_OUT] * 8 + [RewardOutcome.FAILED] * 12
        assert "Not called: its last 8 calls hung" in str(rewards[-1].error)
        for expected in ([None, None], [1.0, 1.0]):
            clock.advance(10.0)
            assert values(await work.score(judgeable(2))) == expected
        assert calls == 11

    asyncio.run(run())


def test_failures_are_told_at_once_and_then_at_intervals(caplog: pytest.LogCaptureFixture) -> None:
    work = scorer(attached(Failing(10_000, ValueError("no \ud800 judge")).sync, "judge"), retries=0)
    rewards = asyncio.run(work.score(judgeable(100)))
    assert rewards[0].error == "ValueError: no ? judge"
    assert [record.message for record in caplog.records] == ["The reward 'judge' has failed once: ValueError: no ? judge"]


def test_asynchronous_calls_run_together_up_to_the_limit_over_all_batches() -> None:
    most, now = 0, 0
    full = asyncio.Event()

    async def counts(_: Any) -> float:
        nonlocal most, now
        now += 1
        most = max(most, now)
        if now == 3:
            full.set()
        async with asyncio.timeout(WAIT_S):
            await full.wait()
        now -= 1
        return 1.0

    async def run() -> None:
        work = scorer(attached(counts), concurrency=3)
        both = await asyncio.gather(work.score(judgeable(5)), work.score(judgeable(5)))
        assert [values(rewards) for rewards in both] == [[1.0] * 5] * 2

    asyncio.run(run())
    assert most == 3


def test_a_sample_without_a_readable_entry_fails_and_the_others_do_not() -> None:
    batch = [*judgeable(1), *judgeable(1, entry="[1]"), *judgeable(1, entry="{")]
    rewards = asyncio.run(scorer(attached(number), attached(numbers, "b", batch=True)).score(batch))
    assert [found.outcome for found in rewards] == [RewardOutcome.SCORED] * 2 + [RewardOutcome.FAILED] * 4
    assert rewards[2].error == "ValueError: The entry is list, not an object."
    assert "The entry is not JSON" in str(rewards[4].error)


def test_only_unreadable_samples_call_nothing() -> None:
    failing = Failing(0)
    rewards = asyncio.run(scorer(attached(failing.sync)).score(judgeable(2, entry="3")))
    assert ([found.outcome for found in rewards], failing.calls) == ([RewardOutcome.FAILED] * 2, 0)


def test_the_stale_get_a_record_per_function() -> None:
    metrics = StreamsMetrics()
    (item,) = judgeable()
    identity = Identity(group_id="demo/7", seq=7, purpose=item.trajectory.purpose, attempt="a", index=1)
    work = scorer(attached(number, "a"), attached(number, "b"), metrics=metrics)
    found = work.stale(identity, item.at, "Too old.")
    assert [(reward.name, reward.outcome, reward.value, reward.error) for reward in found] == [
        ("a", RewardOutcome.STALE, None, "Too old."),
        ("b", RewardOutcome.STALE, None, "Too old."),
    ]
    assert {(reward.seq, reward.index, reward.of) for reward in found} == {(7, 1, item.at)}
    assert sample(metrics, "echo_streams_rewards_total", name="a", outcome="stale") == 1


def test_a_function_sees_the_records_text_entry_and_tokens() -> None:
    seen: list[ScoredSample] = []

    def judge(given: ScoredSample) -> float:
        seen.append(given)
        return 1.0

    work = scorer(attached(judge))
    asyncio.run(work.score(judgeable(1, entry='{"answer": "42"}', turn_rewards=(0.5,), metadata={"level": "1"})))
    (given,) = seen
    assert (given.prompt, given.completion, given.entry, given.task) == ("p", "0", {"answer": "42"}, "t")
    assert (given.token_ids.tolist(), given.num_generated, given.turn_rewards, given.metadata) == ([1, 2, 3], 2, (0.5,), {"level": "1"})
