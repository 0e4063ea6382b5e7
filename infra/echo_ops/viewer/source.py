"""The viewer's data of one run: the history, the present state of learner and workers, the batches shown last.

Its own thread refreshes every few seconds; the server's threads read. If a refresh fails (a broker restarts), the overview says so, and the
next one tries again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType

from echo_bus.bus import Bus
from echo_bus.clock import Deadline, SystemClock
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_ops.painting import Pieces, tokenizer_of
from echo_ops.report.pool import PoolView
from echo_ops.rewards.recent import newest_rewards
from echo_ops.rewards.watch import ScorerWatch
from echo_ops.rewards.weights import terms_in_force
from echo_ops.viewer.drawings import Drawings
from echo_ops.viewer.metrics import Frame, metrics_page
from echo_ops.viewer.overview import overview_page
from echo_ops.viewer.pool import pool_page
from echo_ops.viewer.questions import Questions
from echo_ops.viewer.rewards import rewards_page
from echo_ops.viewer.runs import OtherRuns
from echo_ops.viewer.searches import Searches, TooMany
from echo_ops.viewer.windows import Json, Window
from echo_replay.history import History
from echo_replay.steps import Step, read_batch
from echo_schemas.records import Batch, Control, Progress, WorkerStatus
from echo_schemas.topics import CONTROL, PROGRESS, WORKERS

logger = logging.getLogger(__name__)

_EVERY_S = 4.0
# The newest rewards that are read from each partition.
_RECENT_REWARDS = 200
_STILL_SCORED_MS = 60_000
_CONTROL_S = 10.0
# Batches of the steps shown last: a few dozen bytes per sample.
_KEPT_BATCHES = 16
# Pages that may read the log at the same time, and seconds that a further one waits.
_MOST_READERS, _TURN_S = 4, 10.0


class Source:
    """A context manager; its threads and clients end with the block."""

    def __init__(
        self,
        bus: Bus,
        history: History,
        *,
        drawings: Drawings | None = None,
        export: Path | None = None,
        pieces: Pieces | None = None,
    ) -> None:
        """Closes `history` at its end. `export`: a folder for questions in SQL; `pieces`: the texts of tokens (None: by the tokenizer of
        the run's model). Raises DeadlineExceeded, TransportError.
        """
        self._history, self._clock = history, SystemClock()
        self.searches = Searches(self._clock)
        self.questions = Questions(history.run_id, export)
        self.drawings = drawings or Drawings()
        self._turns = threading.BoundedSemaphore(_MOST_READERS)
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, Batch] = OrderedDict()
        self._workers: dict[str, WorkerStatus] = {}
        self._earlier: dict[str, WorkerStatus] = {}
        self._blind = ""
        self.run_id = history.run_id
        self.pieces = pieces
        """The base model's tokenizer; None until it is loaded, or if it is not on this machine."""
        self._pool = PoolView()
        self._num_trained = 0
        self._watch_lock = threading.Lock()
        self._stop = threading.Event()
        with contextlib.ExitStack() as clients:
            self._progress = clients.enter_context(closing(bus.view(PROGRESS, Progress, only=history.run_id)))
            self._statuses = clients.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
            self._orders = clients.enter_context(closing(history.bus.orders()))
            self.runs = clients.enter_context(closing(OtherRuns(bus, self._clock)))
            self._watch = clients.enter_context(closing(ScorerWatch(history.bus)))
            self._clients = clients.pop_all()
        self._thread = threading.Thread(target=self._follow, name="viewer", daemon=True)

    def __enter__(self) -> Source:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._clients.close()
        self._history.close()

    def books(self) -> History:
        """The history for one thread that reads no trajectories."""
        return self._history.beside()

    @contextmanager
    def reading(self) -> Iterator[History]:
        """The history for one thread that reads the log. Raises TooMany if others read for too long."""
        if not self._turns.acquire(timeout=_TURN_S):
            raise TooMany("Too many pages read the log at once.", hint="Try again in a moment.")
        try:
            yield self._history.beside()
        finally:
            self._turns.release()

    def batch(self, step: Step) -> Batch | None:
        """The step's batch with its rewards; None if it is gone. Raises TransportError."""
        with self._lock:
            if (known := self._batches.get(step.version)) is not None:
                self._batches.move_to_end(step.version)
                return known
        if step.missing:
            return None
        try:
            with self.reading() as history:
                batch = read_batch(history.bus, step)
        except (BlobCorrupt, OffsetLost):
            return None
        with self._lock:
            self._batches[step.version] = batch
            while len(self._batches) > _KEPT_BATCHES:
                self._batches.popitem(last=False)
        return batch

    def overview(self) -> Json:
        try:
            progress = self._progress.get(self.run_id)
        except TransportError:
            progress = None
        with self._lock:
            workers, earlier, blind = dict(self._workers), dict(self._earlier), self._blind
        page = overview_page(self.books(), progress, workers, earlier, self._clock.time_ms())
        page["is_export"] = self.questions.export is not None
        if blind:
            page["troubles"].insert(0, blind)
        return page

    def pool(self, window: Window) -> Json:
        """The workers and the orders to them. Raises TransportError, TooMany."""
        with self._lock:
            workers, lines = dict(self._workers), self._pool.lines()
        with self.reading() as history:
            orders = _orders_of(history.bus)
            reports = [step.report for step in list(history.log.steps)]
        return pool_page([line for line in lines if line.worker_id in workers], workers, orders, reports, window, self._clock.time_ms())

    def rewards(self, pair: tuple[str, str]) -> Json:
        """The rewards and their applications, and a comparison of two. Raises TransportError, TooMany."""
        with self.reading() as history:
            recent = newest_rewards(history.bus, _RECENT_REWARDS, self._rewards_until())
            orders = self._orders.items()
            steps = list(history.log.steps)
            version = steps[-1].version if steps else 0
            order = orders.get(f"{self.run_id}/rewards")
            ordered = None if order is None else order.rewards
            terms = terms_in_force(steps[-1].report.reward_terms if steps else (), ordered, version)
            with self._watch_lock:
                self._watch.hear(recent)
                lines = self._watch.lines(terms, orders, version)
        pending = ordered if ordered is not None and ordered.from_version > version + 1 else None
        return rewards_page(lines, recent, terms, pending, pair)

    def _rewards_until(self) -> int | None:
        """For an ended run, the time of its newest rewards; later rewards belong to other runs."""
        steps = list(self._history.log.steps)
        newest_ms = steps[-1].report.time_ms + _STILL_SCORED_MS if steps else self._clock.time_ms()
        return newest_ms if newest_ms < self._clock.time_ms() else None

    def curves(self, names: Sequence[str], frame: Frame, others: Sequence[str]) -> Json:
        """Numbers of every step, of this run and of others. Raises UserError for an unknown run; TransportError."""
        runs = self.runs.known()
        own = [step.report for step in list(self._history.log.steps)]
        page = metrics_page(own, names, frame, {run: self.runs.reports(run) for run in others if run != self.run_id})
        page["run"] = self.run_id
        page["runs"] = [
            {"run": run, "parent_run": runs[run].parent_run, "parent_version": runs[run].parent_version} for run in sorted(runs)
        ]
        return page

    def refresh(self) -> None:
        try:
            self._history.refresh()
            workers = {status.worker_id: status for status in self._statuses.items().values() if status.run_id == self.run_id}
        except TransportError as exc:
            logger.warning("The log cannot be read: %s", exc)
            with self._lock:
                self._blind = f"The log cannot be read, so this page is old: {exc.message}"
            return
        with self._lock:
            if any(status.time_ms != self._workers[name].time_ms for name, status in workers.items() if name in self._workers):
                self._earlier = self._workers
            self._workers, self._blind = workers, ""
            for status in workers.values():
                self._pool.hear(status, status.time_ms / 1000)
            steps = list(self._history.log.steps)
            for step in steps[self._num_trained :]:
                self._pool.train(step.report.workers)
            self._num_trained = len(steps)

    def _follow(self) -> None:
        # The tokenizer takes a second to load: the first page does not wait for it.
        runs = self._history.log.runs
        try:
            self.pieces = self.pieces or (tokenizer_of(runs[-1].model) if runs else None)
        except Exception:  # a model's files may raise anything; the viewer then shows ids
            logger.exception("The tokenizer cannot be loaded")
        while not self._stop.is_set():
            try:
                self.refresh()
            except Exception:  # the edge of the thread: log the traceback and go on serving pages
                logger.exception("The viewer cannot refresh")
            self._stop.wait(_EVERY_S)


def _orders_of(bus: Bus) -> list[Control]:
    """Every order in the log, in the log's order; compaction keeps at least the newest one of each key."""
    with closing(bus.look([CONTROL])) as reader:
        reader.start()
        found = [message.record for messages in reader.read_to_end(Deadline.after(_CONTROL_S, bus.clock)) for message in messages]
    return [record for record in found if isinstance(record, Control)]
