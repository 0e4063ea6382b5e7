"""Evaluations beside training: sends the requests of each evaluation that is due, collects the answers and sums them up, one at a time.

    publication thread ──published──▶ queue ──▶ evaluations' thread: ask, window by window ──▶ requests
    intake's thread ──add_trajectory, add_reward──▶ tally ──all settled──▶ result ──take──▶ the learner's transaction

Threads: any thread may call `published`, `order` and `add_*`, which never block for long; the learner's thread calls `take`, which raises
the error that ended the evaluations' thread. That thread waits for answers, for a due evaluation, and in `ask` for a full client buffer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial

from echo_bus.clock import Clock
from echo_core.evaluation import EvaluationTally, due_after_restart, is_due
from echo_learner.evaluation.requests import EvaluationRequests, Planned, PromptFailed, entry_of
from echo_learner.metrics import LearnerMetrics
from echo_schemas.records import Coordinates, Eval, Purpose, Reward, Trajectory, group_id_of

logger = logging.getLogger(__name__)

# How often the patience is checked; answers wake the thread at once.
_LOOK_S = 0.25
# Entries of prompts kept: a group's members come one after another, and many groups side by side.
_ENTRIES = 1_024


class EvaluationOutcome(StrEnum):
    """How an evaluation ended."""

    DONE = "done"
    SUPERSEDED = "superseded"
    UNANSWERED = "unanswered"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class _Due:
    """One evaluation of one version. `keeps`: a newer version does not supersede it."""

    planned: Planned
    version: int
    keeps: bool

    @property
    def key(self) -> tuple[int, str]:
        return self.version, self.planned.spec.name


class Evaluations:
    """The evaluations of one run. `start` it once the session owns the run; after `close` the next session does unfinished ones."""

    def __init__(
        self,
        run_id: str,
        planned: Sequence[Planned],
        *,
        open_requests: Callable[[], EvaluationRequests],
        recorded: Callable[[], set[tuple[int, str]]],
        window: int,
        metrics: LearnerMetrics,
        clock: Clock,
    ) -> None:
        """`open_requests` and `recorded` (version and name of the results on `evals`) are called on the evaluations' thread, before the
        first evaluation. `window`: most prompts that are asked and not settled.
        """
        self._run_id = run_id
        self._planned = tuple(planned)
        self._open_requests = open_requests
        self._recorded = recorded
        self._window = window
        self._metrics = metrics
        self._clock = clock
        self._prefix = group_id_of(run_id, 0, Purpose.EVAL)[:-1]
        self._changed = threading.Condition()
        self._queue: deque[_Due] = deque()
        self._current: _Due | None = None
        self._tally: EvaluationTally | None = None
        self._num_heard = 0
        self._known: set[tuple[int, str]] = set()
        self._results: list[Eval] = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="evaluations", daemon=True)

    # From any thread

    def start(self) -> None:
        self._thread.start()

    def resume(self, newest: int, kept: Iterable[int], *, is_complete: bool) -> None:
        """Make missed evaluations due: a learner begins at the published version `newest` of a run that has `kept` versions."""
        published = list(kept)
        for planned in self._planned:
            for version in due_after_restart(planned.spec, newest, published, is_complete=is_complete):
                self._add(_Due(planned, version, keeps=version == 0 or is_complete))

    def published(self, version: int, *, is_last: bool) -> None:
        """Make the evaluations of `version` due, whose manifest is in the log."""
        for planned in self._planned:
            if is_due(planned.spec, version, is_last=is_last):
                self._add(_Due(planned, version, keeps=version == 0 or is_last))

    def order(self, planned: Planned, version: int) -> None:
        """Add an evaluation by order; a newer version does not supersede it."""
        self._add(_Due(planned, version, keeps=True))

    def is_judging(self, reward: Reward) -> bool:
        """Whether `reward` belongs to an evaluation."""
        return reward.group_id.startswith(self._prefix)

    def add_trajectory(self, where: Coordinates, trajectory: Trajectory) -> None:
        """Take a trajectory of purpose `eval`."""
        with self._changed:
            if self._tally is not None:
                refused = self._tally.num_refused
                # The task has no such prompt: `_evaluate` meets the same error and ends the evaluation.
                with suppress(PromptFailed):
                    self._hear(self._tally.add_trajectory(where, trajectory))
                self._metrics.evaluation_refused.inc(self._tally.num_refused - refused)

    def add_reward(self, at: Coordinates, reward: Reward) -> None:
        """Take a reward for which `is_judging` holds."""
        with self._changed:
            if self._tally is not None:
                self._hear(self._tally.add_reward(at, reward))

    def take(self) -> list[Eval]:
        """Results since the last call, for one transaction. Raises the error that ended the thread."""
        with self._changed:
            self._raise_error()
            found, self._results = self._results, []
            return found

    def wait(self, timeout_s: float) -> bool:
        """Whether nothing is due or under way, and no result waits to be taken, within `timeout_s`. Returns early for a result."""
        with self._changed:
            self._changed.wait_for(lambda: self._results or self._is_idle or self._error is not None, timeout_s)
            self._raise_error()
            return self._is_idle and not self._results

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def _is_idle(self) -> bool:
        return not self._queue and self._current is None

    def _add(self, due: _Due) -> None:
        with self._changed:
            if due.key in self._known:
                return
            self._known.add(due.key)
            for waiting in [each for each in self._queue if each.planned.spec.name == due.planned.spec.name and not each.keeps]:
                self._queue.remove(waiting)
                self._end(waiting, EvaluationOutcome.SUPERSEDED, f"version {due.version} is due before it began")
            self._queue.append(due)
            self._changed.notify_all()

    def _hear(self, is_news: bool) -> None:
        if is_news:
            self._num_heard += 1
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _end(self, due: _Due, outcome: EvaluationOutcome, why: str) -> None:
        self._metrics.evaluations.labels(due.planned.spec.name, outcome.value).inc()
        if outcome is not EvaluationOutcome.DONE:
            # A later order may ask for it again.
            self._known.discard(due.key)
        say = logger.info if outcome is EvaluationOutcome.DONE else logger.warning
        say("Evaluation %s of version %d: %s, %s", due.planned.spec.name, due.version, outcome.value, why)

    # The evaluations' thread

    def _run(self) -> None:
        requests: EvaluationRequests | None = None
        recorded: set[tuple[int, str]] = set()
        try:
            while (due := self._next()) is not None:
                if requests is None:
                    requests, recorded = self._open_requests(), self._recorded()
                result = None if due.key in recorded else self._evaluate(due, requests)
                with self._changed:
                    if result is not None:
                        self._results.append(result)
                    self._current = self._tally = None
                    self._changed.notify_all()
        except BaseException as exc:  # the edge of the thread: the learner's thread gets it
            logger.exception("The evaluations have failed")
            with self._changed:
                self._error = exc
                self._changed.notify_all()
        finally:
            if requests is not None:
                requests.close()

    def _next(self) -> _Due | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if self._closed:
                return None
            self._current = self._queue.popleft()
            return self._current

    def _evaluate(self, due: _Due, requests: EvaluationRequests) -> Eval | None:
        """Send all requests and wait for the answers; None if the evaluation is given up, or left to the next session."""
        spec, started_s = due.planned.spec, self._clock.monotonic_s()
        tally = EvaluationTally(spec, due.version, lru_cache(maxsize=_ENTRIES)(partial(entry_of, due.planned)))
        with self._changed:
            self._tally = tally
        logger.info("Evaluation %s of version %d: %d prompts, %d samples each", spec.name, due.version, spec.prompts, spec.samples)
        try:
            for again in (False, True):
                if self._ask(due, tally, requests, again=again):
                    break
        except PromptFailed as exc:
            self._end(due, EvaluationOutcome.FAILED, str(exc))
            return None
        with self._changed:
            if self._closed:
                return None
            results = tally.results()
        seconds = self._clock.monotonic_s() - started_s
        if not results.num_prompts:
            self._end(due, EvaluationOutcome.UNANSWERED, f"no prompt was answered and judged; given up after {seconds:.1f} s")
            return None
        result = Eval(
            run_id=self._run_id,
            version=due.version,
            name=spec.name,
            task=spec.task,
            num_prompts=results.num_prompts,
            num_samples=results.num_prompts * spec.samples,
            pass_at=results.pass_at(spec),
            rewards=results.stats(),
            sampling=spec.sampling,
            seconds=seconds,
            num_missing=results.num_missing,
            weights_sha256=results.weights_sha256,
            seed=spec.seed,
            pass_reward=spec.pass_reward,
            pass_from=spec.pass_from,
            time_ms=self._clock.time_ms(),
        )
        for stats in result.rewards:
            self._metrics.evaluation_reward.labels(spec.name, stats.name).set(stats.mean)
        said = ", ".join(f"{stats.name} {stats.mean:.3f} ± {stats.stderr:.3f}" for stats in result.rewards)
        missing = f"; {results.num_missing} prompts are missing" if results.num_missing else ""
        self._end(due, EvaluationOutcome.DONE, f"{said} after {seconds:.1f} s{missing}")
        return result

    def _ask(self, due: _Due, tally: EvaluationTally, requests: EvaluationRequests, *, again: bool) -> bool:
        """Ask the prompts that are not settled, `window` at a time. False if the patience ran out before all were settled."""
        with self._changed:
            todo = deque(tally.unsettled())
            settled_before, num_heard = tally.num_settled, self._num_heard
        num_asked, heard_s = 0, self._clock.monotonic_s()
        while True:
            with self._changed:
                if self._closed or tally.is_complete:
                    return True
                room = self._window - (num_asked - (tally.num_settled - settled_before))
                batch = [todo.popleft() for _ in range(min(room, len(todo)))]
            for index in batch:
                requests.ask(due.planned, due.version, index, again=again)
            num_asked += len(batch)
            with self._changed:
                if not batch and self._num_heard == num_heard and not self._closed:
                    self._changed.wait(_LOOK_S)
                if self._num_heard != num_heard:
                    num_heard, heard_s = self._num_heard, self._clock.monotonic_s()
                elif self._clock.monotonic_s() - heard_s > due.planned.spec.patience_s:
                    missing = len(tally.unsettled())
                    logger.warning("Evaluation %s of version %d: %d prompts are missing", due.planned.spec.name, due.version, missing)
                    return False
