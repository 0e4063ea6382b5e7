"""Trajectories to rewards: every attached function judges every sample, and whatever a function does, there is a record of it.

Threads: one event loop. `Scorer.score` returns when all functions are done with all samples; several calls may run at once and share the
limits on asynchronous calls and scoring processes. Synchronous functions without processes run on the loop itself and hold it up.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echo_bus.clock import Clock
from echo_core.evaluation import EVALUATION
from echo_schemas.records import Coordinates, Purpose, Reward, RewardOutcome, Trajectory
from echo_streams.intake import Identity
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import CallTimedOut, Failure, ProcessDied, ScoringPool, described
from echo_streams.values import BadValue, Score, score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample, sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A function under the name that the configuration and the learner know it by."""

    name: str
    function: RewardFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Whom the functions judge, by name: those of the run, and those of each evaluation. An evaluation that is not here is judged as the
    run is.
    """

    run: frozenset[str]
    evaluations: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def of(self, trajectory: Trajectory) -> frozenset[str]:
        """The names of those that judge `trajectory`."""
        if trajectory.purpose is not Purpose.EVAL:
            return self.run
        return self.evaluations.get(trajectory.metadata.get(EVALUATION, ""), self.run)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """`timeout_s` of one call unless the function says otherwise; `retries` after a failure; `concurrency` of asynchronous calls."""

    timeout_s: float = 5.0
    retries: int = 1
    concurrency: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgeable:
    """A trajectory and where it lies."""

    trajectory: Trajectory
    at: Coordinates


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """How one function ended for one sample."""

    outcome: RewardOutcome
    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


_Call = Callable[[], Awaitable[list[Score] | Failure]]


class Scorer:
    """Runs the attached functions. `pool` None: synchronous functions run inline, without a time limit."""

    def __init__(
        self,
        attached: Sequence[Attached],
        *,
        run_id: str,
        limits: ScoringLimits,
        metrics: StreamsMetrics,
        clock: Clock,
        pool: ScoringPool | None = None,
        selection: Selection | None = None,
    ) -> None:
        """`selection` None: every function judges everything."""
        self._attached = tuple(attached)
        self._selection = selection
        self._run_id = run_id
        self._limits = limits
        self._metrics = metrics
        self._clock = clock
        self._pool = pool
        self._concurrency = asyncio.Semaphore(limits.concurrency)
        self._outcomes = {
            (entry.name, outcome): metrics.outcomes.labels(entry.name, outcome.value) for entry in attached for outcome in RewardOutcome
        }
        self._seconds = {entry.name: metrics.call_seconds.labels(entry.name) for entry in attached}

    async def score(self, batch: Sequence[Judgeable]) -> list[Reward]:
        """One reward per trajectory and function that judges it. Raises nothing that a reward function raises."""
        if self._selection is None:
            return await self._score(batch, self._attached)
        parts: dict[frozenset[str], list[Judgeable]] = {}
        for item in batch:
            parts.setdefault(self._selection.of(item.trajectory), []).append(item)
        found = await asyncio.gather(*(self._score(part, self._chosen(names)) for names, part in parts.items()))
        return [reward for rewards in found for reward in rewards]

    def _chosen(self, names: frozenset[str]) -> tuple[Attached, ...]:
        return tuple(entry for entry in self._attached if entry.name in names)

    async def _score(self, batch: Sequence[Judgeable], attached: tuple[Attached, ...]) -> list[Reward]:
        samples: list[ScoredSample] = []
        readable: list[int] = []
        columns: list[list[Judgement]] = [[] for _ in attached]
        unreadable: dict[int, Judgement] = {}
        for position, item in enumerate(batch):
            try:
                samples.append(sample_of(item.trajectory))
                readable.append(position)
            except ValueError as exc:
                unreadable[position] = Judgement(outcome=RewardOutcome.FAILED, error=described(exc))
        if samples:
            columns = await asyncio.gather(*(self._judge(entry, samples) for entry in attached))
        rewards: list[Reward] = []
        time_ms = self._clock.time_ms()
        place = dict(zip(readable, range(len(readable)), strict=True))
        for position, item in enumerate(batch):
            identity = _identity_of(item.trajectory)
            for entry, column in zip(attached, columns, strict=True):
                judgement = unreadable[position] if position in unreadable else column[place[position]]
                rewards.append(self._reward(entry, judgement, identity, item.at, time_ms))
        return rewards

    def stale(self, identity: Identity, at: Coordinates, why: str) -> list[Reward]:
        """One reward per function for a trajectory that is too old to be judged, which only one of training can be."""
        attached = self._attached if self._selection is None else self._chosen(self._selection.run)
        judgement = Judgement(outcome=RewardOutcome.STALE, error=why)
        time_ms = self._clock.time_ms()
        return [self._reward(entry, judgement, identity, at, time_ms) for entry in attached]

    def _reward(self, entry: Attached, judgement: Judgement, identity: Identity, at: Coordinates, time_ms: int) -> Reward:
        self._outcomes[entry.name, judgement.outcome].inc()
        return Reward(
            run_id=self._run_id,
            group_id=identity.group_id,
            seq=identity.seq,
            attempt=identity.attempt,
            index=identity.index,
            of=at,
            name=entry.name,
            code_version=entry.function.version,
            outcome=judgement.outcome,
            value=judgement.value,
            components=judgement.components,
            error=judgement.error,
            seconds=judgement.seconds,
            time_ms=time_ms,
        )

    async def _judge(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        kind = entry.function.kind
        if kind is RewardKind.BATCH:
            return await self._judge_batch(entry, samples)
        if kind is RewardKind.ASYNC or self._pool is not None:
            return list(await asyncio.gather(*(self._judge_one(entry, sample) for sample in samples)))
        return [self._judge_inline(entry, sample) for sample in samples]

    def _judge_inline(self, entry: Attached, sample: ScoredSample) -> Judgement:
        """The fast path: nothing is awaited."""
        error = ""
        for attempt in range(1 + self._limits.retries):
            if attempt:
                self._metrics.retries.labels(entry.name).inc()
            started_s = time.perf_counter()
            try:
                score = score_of(entry.function.call(sample))
            except BadValue as exc:
                return Judgement(outcome=RewardOutcome.FAILED, error=str(exc), seconds=time.perf_counter() - started_s)
            except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record says what
                error = described(exc)
                continue
            seconds = time.perf_counter() - started_s
            self._seconds[entry.name].observe(seconds)
            return Judgement(outcome=RewardOutcome.SCORED, value=score.value, components=score.components, seconds=seconds)
        return Judgement(outcome=RewardOutcome.FAILED, error=error)

    async def _judge_one(self, entry: Attached, sample: ScoredSample) -> Judgement:
        """An asynchronous function, or a synchronous one in a process of its own."""
        function, limit_s = entry.function, self._limit_s(entry)
        if function.kind is RewardKind.ASYNC:
            return (await self._attempt(entry, 1, lambda: self._await(function, sample, 0, limit_s)))[0]
        pool = self._pool
        assert pool is not None, "inline functions are judged elsewhere"
        return (await self._attempt(entry, 1, lambda: pool.call(function, sample, limit_s)))[0]

    async def _judge_batch(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        function, limit_s, count = entry.function, self._limit_s(entry), len(samples)
        pool = self._pool
        if inspect.iscoroutinefunction(function.call):
            return await self._attempt(entry, count, lambda: self._await(function, samples, count, limit_s))
        if pool is not None:
            return await self._attempt(entry, count, lambda: pool.call(function, samples, limit_s))

        async def inline() -> list[Score] | Failure:
            return scores_of(function.call(samples), count)

        return await self._attempt(entry, count, inline)

    async def _await(
        self, function: RewardFunction, given: ScoredSample | list[ScoredSample], count: int, limit_s: float
    ) -> list[Score] | Failure:
        """`count` 0: one sample, one value. A time-out that the function itself raises is a failure like any other."""
        async with self._concurrency:
            try:
                async with asyncio.timeout(limit_s) as limit:
                    returned = await function.call(given)
            except TimeoutError as exc:
                if limit.expired():
                    raise CallTimedOut from None
                return Failure(described(exc))
            except asyncio.CancelledError as exc:
                # Ours only if somebody cancelled this task; a function may also await something that was cancelled.
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                return Failure(described(exc))
        return scores_of(returned, count) if count else [score_of(returned)]

    async def _attempt(self, entry: Attached, count: int, call: _Call) -> list[Judgement]:
        """`call` until it gives `count` scores or the attempts are used up; the outcome is the same for all samples of the call."""
        error = ""
        for attempt in range(1 + self._limits.retries):
            if attempt:
                self._metrics.retries.labels(entry.name).inc()
            started_s = time.perf_counter()
            try:
                answer = await call()
            except CallTimedOut:
                seconds = time.perf_counter() - started_s
                if entry.function.at_timeout is not None:
                    return [_ended(entry.function.at_timeout, seconds)] * count
                text = f"No answer within {self._limit_s(entry):g} s."
                return [Judgement(outcome=RewardOutcome.TIMED_OUT, error=text, seconds=seconds)] * count
            except ProcessDied:
                error = "The scoring process died under the call."
                if attempt == self._limits.retries and entry.function.at_timeout is not None:
                    return [_ended(entry.function.at_timeout, time.perf_counter() - started_s)] * count
                continue
            except BadValue as exc:
                answer = Failure(str(exc), again=False)
            except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record says what
                answer = Failure(described(exc))
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
        return [Judgement(outcome=RewardOutcome.FAILED, error=error)] * count

    def _limit_s(self, entry: Attached) -> float:
        return self._limits.timeout_s if entry.function.timeout_s is None else entry.function.timeout_s


def _ended(value: float, seconds: float) -> Judgement:
    """What the function itself says that a call is worth which had to be ended: the others of the group need not wait for a value."""
    return Judgement(outcome=RewardOutcome.SCORED, value=value, components={"ended": 1.0}, seconds=seconds)


def _identity_of(trajectory: Trajectory) -> Identity:
    return Identity(
        group_id=trajectory.group_id,
        seq=trajectory.seq,
        purpose=trajectory.purpose,
        attempt=trajectory.attempt,
        index=trajectory.index,
    )
