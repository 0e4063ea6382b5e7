"""Trajectories to rewards: every attached function judges every sample, and every outcome, also a failure, becomes a record.

Functions cannot harm one another: each gets its own copies of the samples, waits for its own slots, and hands on its own rewards when it is
done. A function whose calls only hang or kill their process is called once in a while; its other samples fail at once. Where calls wait
for one another, a sample that is too old when its turn comes is `stale`, and rewards are handed on as they come.

Threads: one event loop. `Scorer.score` returns when all functions are done with all samples; several calls may run at once and share the
limits on asynchronous calls and scoring processes. Synchronous functions without processes run on the loop itself and block it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echo_bus.clock import Clock
from echo_core.evaluation import EVALUATION
from echo_runtime.notices import Notices
from echo_schemas.converters import maker_of
from echo_schemas.records import Coordinates, Purpose, Reward, RewardOutcome, Trajectory
from echo_settings.sections import ScoringSettings
from echo_streams.circuit_breaker import CircuitBreaker, NotCalled
from echo_streams.intake import Identity
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import CallTimedOut, Failure, ProcessDied, ScoringPool, described
from echo_streams.values import BadValue, Score, end_fork, score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample, sample_of

_make_reward = maker_of(Reward)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A function with its reward's name."""

    name: str
    function: RewardFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardChoice:
    """The rewards of the run, and of each evaluation by its name. An evaluation that is not here has the run's rewards."""

    run: frozenset[str]
    evaluations: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of(self, trajectory: Trajectory) -> frozenset[str]:
        """The names of the rewards for `trajectory`."""
        if trajectory.purpose is not Purpose.EVAL:
            return self.run
        return self.evaluations.get(trajectory.metadata.get(EVALUATION, ""), self.run)


def never() -> str:
    """The `too_old` of a sample that is scored at any age."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgeable:
    """A trajectory and its coordinates. `too_old()`: why it is not to be scored any more; empty while it is."""

    trajectory: Trajectory
    at: Coordinates
    too_old: Callable[[], str] = never


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """One function's result for one sample."""

    outcome: RewardOutcome
    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0

    def reward(self, of: Identity, at: Coordinates, time_ms: int, *, run_id: str, name: str, code_version: str, application: str) -> Reward:
        """The record of this judgement of the trajectory `of`, which lies at `at`."""
        return _make_reward(
            run_id=run_id,
            group_id=of.group_id,
            seq=of.seq,
            attempt=of.attempt,
            index=of.index,
            of=at,
            name=name,
            code_version=code_version,
            application=application,
            outcome=self.outcome,
            value=self.value,
            components=self.components,
            error=self.error,
            seconds=self.seconds,
            time_ms=time_ms,
        )


_Call = Callable[[Callable[[], object]], Awaitable[list[Score] | Failure]]
"""Calls what it is given once a slot or a process is free."""
HandOn = Callable[[list[Reward]], Awaitable[object]]
"""Takes one function's rewards for a batch."""

# A batch of slow calls takes minutes: what is done by then goes out so often.
_HAND_ON_S = 0.5


class TooOld(Exception):
    """The sample has grown too old while it waited for its turn."""


class Scorer:
    """Runs the attached functions. `pool` None: synchronous functions run inline, without a time limit."""

    def __init__(
        self,
        attached: Sequence[Attached],
        *,
        run_id: str,
        limits: ScoringSettings,
        metrics: StreamsMetrics,
        clock: Clock,
        pool: ScoringPool | None = None,
        choice: RewardChoice | None = None,
        application: str = "",
        notices: Notices | None = None,
    ) -> None:
        """`choice` None: every function judges everything. `application`: its name, for the records. `notices`: of functions that fail."""
        self._attached = tuple(attached)
        self._application = application
        self._choice = choice
        self._run_id = run_id
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._pool = pool
        self._pid = os.getpid()
        self._notices = notices or Notices(clock)
        self._slots = {entry.name: asyncio.Semaphore(limits.concurrency) for entry in attached}
        self._breakers = {entry.name: CircuitBreaker(clock) for entry in attached}
        self._num_failed: dict[str, int] = {}
        self._outcomes = {
            (entry.name, outcome): metrics.outcomes.labels(entry.name, outcome.value) for entry in attached for outcome in RewardOutcome
        }
        self._seconds = {entry.name: metrics.call_seconds.labels(entry.name) for entry in attached}

    async def score(self, batch: Sequence[Judgeable], hand_on: HandOn | None = None) -> list[Reward]:
        """One reward per trajectory and function that judges it. Raises nothing that a reward function raises.

        With `hand_on`, each function's rewards go there as they come, and do not wait for the others.
        """
        if self._choice is None:
            return await self._score(batch, self._attached, hand_on)
        parts: dict[frozenset[str], list[Judgeable]] = {}
        for item in batch:
            parts.setdefault(self._choice.of(item.trajectory), []).append(item)
        found = await asyncio.gather(*(self._score(part, self._chosen(names), hand_on) for names, part in parts.items()))
        return [reward for rewards in found for reward in rewards]

    def _chosen(self, names: frozenset[str]) -> tuple[Attached, ...]:
        return tuple(entry for entry in self._attached if entry.name in names)

    async def _score(self, batch: Sequence[Judgeable], attached: tuple[Attached, ...], hand_on: HandOn | None) -> list[Reward]:
        async def column(entry: Attached) -> list[Reward]:
            rewards = await self._column(entry, batch, hand_on)
            if hand_on is None:
                return rewards
            if rewards:
                await hand_on(rewards)
            return []

        columns = await asyncio.gather(*(column(entry) for entry in attached))
        return [reward for row in zip(*columns, strict=True) for reward in row]

    async def _column(self, entry: Attached, batch: Sequence[Judgeable], hand_on: HandOn | None) -> list[Reward]:
        """One function's rewards for `batch`, in its order, without those that `hand_on` has got. The function has its own copies of the
        samples, so it cannot change another function's."""
        samples: dict[int, ScoredSample] = {}
        judgements: dict[int, Judgement] = {}
        for position, item in enumerate(batch):
            try:
                samples[position] = sample_of(item.trajectory)
            except (ValueError, RecursionError) as exc:
                judgements[position] = Judgement(outcome=RewardOutcome.FAILED, error=described(exc))

        def rewards() -> list[Reward]:
            time_ms, found = self._clock.time_ms(), [(batch[position], judgement) for position, judgement in sorted(judgements.items())]
            judgements.clear()
            return [self._reward(entry, judgement, Identity.of(item.trajectory), item.at, time_ms) for item, judgement in found]

        async def judge(position: int, sample: ScoredSample) -> None:
            judgements[position] = await self._judge_one(entry, sample, batch[position].too_old)

        if not self._takes_turns(entry):
            if samples:
                judgements.update(zip(samples, await self.judge_together(entry, list(samples.values())), strict=True))
            return rewards()
        judging = asyncio.gather(*(judge(*each) for each in samples.items()))
        try:
            while hand_on is not None and (await asyncio.wait({judging}, timeout=_HAND_ON_S))[1]:
                if judgements:
                    await hand_on(rewards())
            await judging
        finally:
            judging.cancel()
        return rewards()

    def judge_now(self, entry: Attached, item: Judgeable) -> Judgement:
        """A synchronous function's result for one sample, computed in this call without a time limit."""
        try:
            sample = sample_of(item.trajectory)
        except (ValueError, RecursionError) as exc:
            return Judgement(outcome=RewardOutcome.FAILED, error=described(exc))
        return self._judge_inline(entry, sample)

    async def judge_together(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        """The results of a function of any kind for some samples, without records."""
        if entry.function.kind is RewardKind.BATCH:
            return await self._judge_batch(entry, samples)
        if self._takes_turns(entry):
            return list(await asyncio.gather(*(self._judge_one(entry, sample) for sample in samples)))
        return [self._judge_inline(entry, sample) for sample in samples]

    def stale(self, identity: Identity, at: Coordinates, why: str) -> list[Reward]:
        """One `stale` reward per function for a training trajectory that is too old."""
        attached = self._attached if self._choice is None else self._chosen(self._choice.run)
        judgement = Judgement(outcome=RewardOutcome.STALE, error=why)
        time_ms = self._clock.time_ms()
        return [self._reward(entry, judgement, identity, at, time_ms) for entry in attached]

    def _reward(self, entry: Attached, judgement: Judgement, identity: Identity, at: Coordinates, time_ms: int) -> Reward:
        self._outcomes[entry.name, judgement.outcome].inc()
        self._note(entry.name, judgement)
        version, application = entry.function.version, self._application
        return judgement.reward(identity, at, time_ms, run_id=self._run_id, name=entry.name, code_version=version, application=application)

    def _note(self, name: str, judgement: Judgement) -> None:
        if judgement.outcome in {RewardOutcome.FAILED, RewardOutcome.TIMED_OUT}:
            count = self._num_failed[name] = self._num_failed.get(name, 0) + 1
            times = "once" if count == 1 else f"{count:,} times in a row"
            self._notices.say(f"reward {name}", f"The reward {name!r} has failed {times}: {judgement.error}")
        elif name in self._num_failed and judgement.outcome is RewardOutcome.SCORED:
            del self._num_failed[name]
            self._notices.clear(f"reward {name}")

    def _takes_turns(self, entry: Attached) -> bool:
        """Whether each sample is a call that waits for a slot or for a process."""
        kind = entry.function.kind
        return kind is RewardKind.ASYNC or (kind is not RewardKind.BATCH and self._pool is not None)

    def _judge_inline(self, entry: Attached, sample: ScoredSample) -> Judgement:
        """The fast path, without awaiting."""
        error = ""
        for attempt in range(1 + self._limits.retries):
            if attempt:
                self._metrics.retries.labels(entry.name).inc()
            started_s = time.perf_counter()
            try:
                score = score_of(entry.function.call(sample))
            except BadValue as exc:
                return Judgement(outcome=RewardOutcome.FAILED, error=str(exc), seconds=time.perf_counter() - started_s)
            except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record has the error
                error = described(exc)
                continue
            finally:
                end_fork(self._pid)
            seconds = time.perf_counter() - started_s
            self._seconds[entry.name].observe(seconds)
            return Judgement(outcome=RewardOutcome.SCORED, value=score.value, components=score.components, seconds=seconds)
        return Judgement(outcome=RewardOutcome.FAILED, error=error)

    async def _judge_one(self, entry: Attached, sample: ScoredSample, too_old: Callable[[], str] = never) -> Judgement:
        """An asynchronous function, or a synchronous one in a process of its own."""
        function, limit_s = entry.function, self._limit_s(entry)
        if function.kind is RewardKind.ASYNC:
            return (await self._attempt(entry, 1, lambda begin: self._await(entry, sample, 0, limit_s, begin), too_old))[0]
        pool = self._pool
        assert pool is not None, "inline functions are judged elsewhere"
        return (await self._attempt(entry, 1, lambda begin: pool.call(function, sample, limit_s, begin), too_old))[0]

    async def _judge_batch(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        function, limit_s, count = entry.function, self._limit_s(entry), len(samples)
        pool = self._pool
        if inspect.iscoroutinefunction(function.call):
            return await self._attempt(entry, count, lambda begin: self._await(entry, samples, count, limit_s, begin))
        if pool is not None:
            return await self._attempt(entry, count, lambda begin: pool.call(function, samples, limit_s, begin))

        async def inline(begin: Callable[[], object]) -> list[Score] | Failure:
            begin()
            return scores_of(function.call(samples), count)

        return await self._attempt(entry, count, inline)

    async def _await(
        self, entry: Attached, given: ScoredSample | list[ScoredSample], count: int, limit_s: float, begin: Callable[[], object]
    ) -> list[Score] | Failure:
        """`count` 0: one sample, one value. A TimeoutError of the function itself is an ordinary failure."""
        async with self._slots[entry.name]:
            begin()
            try:
                async with asyncio.timeout(limit_s) as limit:
                    returned = await entry.function.call(given)
            except TimeoutError as exc:
                if limit.expired():
                    raise CallTimedOut from None
                return Failure(described(exc))
            except asyncio.CancelledError as exc:
                # Raise it only if this task was cancelled: the function may have awaited a cancelled task of its own.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return Failure(described(exc))
        return scores_of(returned, count) if count else [score_of(returned)]

    async def _attempt(self, entry: Attached, count: int, call: _Call, too_old: Callable[[], str] = never) -> list[Judgement]:
        """Try `call` until it returns `count` scores or the attempts are used up; a failure holds for all samples of the call. The
        time that it waits for a slot or a process does not count as seconds of the call."""
        error, seconds, breaker = "", 0.0, self._breakers[entry.name]
        started_s = time.perf_counter()

        def begin() -> None:
            nonlocal started_s
            if why := too_old():
                raise TooOld(why)
            # A function with `at_timeout` expects some calls to hang.
            if entry.function.at_timeout is None:
                breaker.require()
            started_s = time.perf_counter()

        for attempt in range(1 + self._limits.retries):
            if attempt:
                self._metrics.retries.labels(entry.name).inc()
            try:
                answer = await call(begin)
            except TooOld as exc:
                return [Judgement(outcome=RewardOutcome.STALE, error=str(exc))] * count
            except NotCalled as exc:
                error = str(exc)
                break
            except CallTimedOut:
                breaker.ended()
                seconds = time.perf_counter() - started_s
                if entry.function.at_timeout is not None:
                    return [ended(entry.function.at_timeout, seconds)] * count
                text = f"No answer within {self._limit_s(entry):g} s."
                return [Judgement(outcome=RewardOutcome.TIMED_OUT, error=text, seconds=seconds)] * count
            except ProcessDied:
                breaker.ended()
                error = "The scoring process died under the call."
                if attempt == self._limits.retries and entry.function.at_timeout is not None:
                    return [ended(entry.function.at_timeout, time.perf_counter() - started_s)] * count
                continue
            except BadValue as exc:
                answer = Failure(str(exc), again=False)
            except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record has the error
                answer = Failure(described(exc))
            finally:
                end_fork(self._pid)
            breaker.answered()
            seconds = (time.perf_counter() - started_s) / count
            if isinstance(answer, Failure):
                error = answer.error
                if answer.again:
                    continue
                break
            self._seconds[entry.name].observe(seconds)
            return [
                Judgement(outcome=RewardOutcome.SCORED, value=score.value, components=score.components, seconds=seconds) for score in answer
            ]
        return [Judgement(outcome=RewardOutcome.FAILED, error=error, seconds=seconds)] * count

    def _limit_s(self, entry: Attached) -> float:
        return self._limits.timeout_s if entry.function.timeout_s is None else entry.function.timeout_s


def ended(value: float, seconds: float) -> Judgement:
    """The function's own value for a call that had to be ended (`at_timeout`), so that its group gets a reward."""
    return Judgement(outcome=RewardOutcome.SCORED, value=value, components={"ended": 1.0}, seconds=seconds)
