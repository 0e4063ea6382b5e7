"""Trajectories to rewards: every attached function judges every sample, and every outcome, also a failure, becomes a record.

Functions cannot harm one another: each gets its own copies of the samples, waits for its own slots, and hands on its own rewards when it is
done. A function whose calls only hang or kill their process is called once in a while; its other samples fail at once.

Threads: one event loop. `Scorer.score` returns when all functions are done with all samples; several calls may run at once and share the
limits on asynchronous calls and scoring processes. Synchronous functions without processes run on the loop itself and block it.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from echo_bus.clock import Clock
from echo_core.evaluation import EVALUATION
from echo_runtime.notices import Notices
from echo_schemas.records import Coordinates, Purpose, Reward, RewardOutcome, Trajectory
from echo_streams.intake import Identity
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import CallTimedOut, Failure, ProcessDied, ScoringPool, described
from echo_streams.values import BadValue, Score, score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample, sample_of


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringLimits:
    """`timeout_s` of one call, unless the function has its own; `retries` after a failure; `concurrency` of one function's calls."""

    timeout_s: float = 5.0
    retries: int = 1
    concurrency: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgeable:
    """A trajectory and its coordinates."""

    trajectory: Trajectory
    at: Coordinates


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
        return Reward(
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


_Call = Callable[[], Awaitable[list[Score] | Failure]]
HandOn = Callable[[list[Reward]], Awaitable[object]]
"""Takes one function's rewards for a batch."""

# After so many calls in a row that hung or died, the function is called only every `_TRY_EVERY_S`.
_TRIPS = 8
_TRY_EVERY_S = 10.0


class NotCalled(Exception):
    """The function was not called: its last calls hung or killed their process."""


class _Fuse:
    """Stops calling a function after `_TRIPS` calls in a row that hung or died, except for one trial call every `_TRY_EVERY_S`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_ended = 0
        self._try_at_s = 0.0

    def require(self) -> None:
        """Raise NotCalled unless the function may be called now."""
        if self._num_ended < _TRIPS:
            return
        now_s = self._clock.monotonic_s()
        if now_s < self._try_at_s:
            raise NotCalled
        self._try_at_s = now_s + _TRY_EVERY_S

    def ended(self) -> None:
        self._num_ended += 1
        self._try_at_s = self._clock.monotonic_s() + _TRY_EVERY_S

    def answered(self) -> None:
        self._num_ended = 0


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
        self._notices = notices or Notices(clock)
        self._slots = {entry.name: asyncio.Semaphore(limits.concurrency) for entry in attached}
        self._fuses = {entry.name: _Fuse(clock) for entry in attached}
        self._num_failed: dict[str, int] = {}
        self._outcomes = {
            (entry.name, outcome): metrics.outcomes.labels(entry.name, outcome.value) for entry in attached for outcome in RewardOutcome
        }
        self._seconds = {entry.name: metrics.call_seconds.labels(entry.name) for entry in attached}

    async def score(self, batch: Sequence[Judgeable], hand_on: HandOn | None = None) -> list[Reward]:
        """One reward per trajectory and function that judges it. Raises nothing that a reward function raises.

        With `hand_on`, each function's rewards go there when it is done with the batch, and do not wait for the others.
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
            rewards = await self._column(entry, batch)
            if hand_on is None:
                return rewards
            await hand_on(rewards)
            return []

        columns = await asyncio.gather(*(column(entry) for entry in attached))
        return [reward for row in zip(*columns, strict=True) for reward in row]

    async def _column(self, entry: Attached, batch: Sequence[Judgeable]) -> list[Reward]:
        """One function's rewards for all of `batch`. It gets its own copies of the samples, so it cannot change another function's."""
        samples: list[ScoredSample] = []
        judgements: dict[int, Judgement] = {}
        for position, item in enumerate(batch):
            try:
                samples.append(sample_of(item.trajectory))
            except (ValueError, RecursionError) as exc:
                judgements[position] = Judgement(outcome=RewardOutcome.FAILED, error=described(exc))
        if samples:
            found = await self._judge(entry, samples)
            readable = (position for position in range(len(batch)) if position not in judgements)
            judgements |= dict(zip(list(readable), found, strict=True))
        time_ms = self._clock.time_ms()
        return [
            self._reward(entry, judgements[position], Identity.of(item.trajectory), item.at, time_ms) for position, item in enumerate(batch)
        ]

    def judge_now(self, entry: Attached, item: Judgeable) -> Judgement:
        """A synchronous function's result for one sample, computed in this call without a time limit."""
        try:
            sample = sample_of(item.trajectory)
        except (ValueError, RecursionError) as exc:
            return Judgement(outcome=RewardOutcome.FAILED, error=described(exc))
        return self._judge_inline(entry, sample)

    async def judge_together(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        """The results of a function of any kind for some samples, without records."""
        return await self._judge(entry, samples)

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

    async def _judge(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        kind = entry.function.kind
        if kind is RewardKind.BATCH:
            return await self._judge_batch(entry, samples)
        if kind is RewardKind.ASYNC or self._pool is not None:
            return list(await asyncio.gather(*(self._judge_one(entry, sample) for sample in samples)))
        return [self._judge_inline(entry, sample) for sample in samples]

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
            seconds = time.perf_counter() - started_s
            self._seconds[entry.name].observe(seconds)
            return Judgement(outcome=RewardOutcome.SCORED, value=score.value, components=score.components, seconds=seconds)
        return Judgement(outcome=RewardOutcome.FAILED, error=error)

    async def _judge_one(self, entry: Attached, sample: ScoredSample) -> Judgement:
        """An asynchronous function, or a synchronous one in a process of its own."""
        function, limit_s = entry.function, self._limit_s(entry)
        if function.kind is RewardKind.ASYNC:
            return (await self._attempt(entry, 1, lambda: self._await(entry, sample, 0, limit_s)))[0]
        pool = self._pool
        assert pool is not None, "inline functions are judged elsewhere"
        return (await self._attempt(entry, 1, lambda: pool.call(function, sample, limit_s, self._gate(entry))))[0]

    async def _judge_batch(self, entry: Attached, samples: list[ScoredSample]) -> list[Judgement]:
        function, limit_s, count = entry.function, self._limit_s(entry), len(samples)
        pool = self._pool
        if inspect.iscoroutinefunction(function.call):
            return await self._attempt(entry, count, lambda: self._await(entry, samples, count, limit_s))
        if pool is not None:
            return await self._attempt(entry, count, lambda: pool.call(function, samples, limit_s, self._gate(entry)))

        async def inline() -> list[Score] | Failure:
            return scores_of(function.call(samples), count)

        return await self._attempt(entry, count, inline)

    async def _await(self, entry: Attached, given: ScoredSample | list[ScoredSample], count: int, limit_s: float) -> list[Score] | Failure:
        """`count` 0: one sample, one value. A TimeoutError of the function itself is an ordinary failure."""
        async with self._slots[entry.name]:
            self._gate(entry)()
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

    def _gate(self, entry: Attached) -> Callable[[], object]:
        """The check before a call. A function with `at_timeout` expects some calls to hang, so it is always called."""
        return self._fuses[entry.name].require if entry.function.at_timeout is None else lambda: None

    async def _attempt(self, entry: Attached, count: int, call: _Call) -> list[Judgement]:
        """Try `call` until it returns `count` scores or the attempts are used up; a failure holds for all samples of the call."""
        error, fuse = "", self._fuses[entry.name]
        for attempt in range(1 + self._limits.retries):
            if attempt:
                self._metrics.retries.labels(entry.name).inc()
            started_s = time.perf_counter()
            try:
                answer = await call()
            except NotCalled:
                error = f"Not called: its last {_TRIPS} calls hung or killed their process. It is tried again every {_TRY_EVERY_S:g} s."
                break
            except CallTimedOut:
                fuse.ended()
                seconds = time.perf_counter() - started_s
                if entry.function.at_timeout is not None:
                    return [ended(entry.function.at_timeout, seconds)] * count
                text = f"No answer within {self._limit_s(entry):g} s."
                return [Judgement(outcome=RewardOutcome.TIMED_OUT, error=text, seconds=seconds)] * count
            except ProcessDied:
                fuse.ended()
                error = "The scoring process died under the call."
                if attempt == self._limits.retries and entry.function.at_timeout is not None:
                    return [ended(entry.function.at_timeout, time.perf_counter() - started_s)] * count
                continue
            except BadValue as exc:
                answer = Failure(str(exc), again=False)
            except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record has the error
                answer = Failure(described(exc))
            fuse.answered()
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


def ended(value: float, seconds: float) -> Judgement:
    """The function's own value for a call that had to be ended (`at_timeout`), so that its group gets a reward."""
    return Judgement(outcome=RewardOutcome.SCORED, value=value, components={"ended": 1.0}, seconds=seconds)
