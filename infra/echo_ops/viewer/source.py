"""What the viewer knows of one run: the books, kept up to date, what learner and workers say now, the batches last looked at.

One thread of its own refreshes every few seconds; the server's threads ask. What fails to refresh (a broker restarts) is said on the
overview and tried again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from echo_bus.bus import Bus
from echo_bus.clock import Clock, SystemClock
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_bus.reading.view import CompactedView
from echo_ops.cli.painting import Pieces, tokenizer_of
from echo_ops.viewer.overview import overview_page
from echo_ops.viewer.searches import Searches, TooMany
from echo_ops.viewer.windows import Json
from echo_replay.history import History
from echo_replay.run_log import Step, read_batch
from echo_schemas.records import Batch, Progress, WorkerStatus
from echo_schemas.topics import PROGRESS, WORKERS

logger = logging.getLogger(__name__)

_EVERY_S = 4.0
# Batches of the steps last looked at: some dozen bytes a sample.
_KEPT_BATCHES = 16
# Pages that read the log at the same time, and how long one more waits for its turn.
_MOST_READERS, _TURN_S = 4, 10.0


class Source:
    """A context manager: its threads and clients end with it."""

    def __init__(self, bus: Bus, history: History, clock: Clock | None = None) -> None:
        """Takes `history` over. Raises DeadlineExceeded, TransportError."""
        self._history, self._clock = history, clock or SystemClock()
        self.searches = Searches(self._clock)
        self._turns = threading.BoundedSemaphore(_MOST_READERS)
        self._lock = threading.Lock()
        self._batches: OrderedDict[int, Batch] = OrderedDict()
        self._workers: dict[str, WorkerStatus] = {}
        self._earlier: dict[str, WorkerStatus] = {}
        self._blind = ""
        self._pieces: Pieces | None = None
        self._stop = threading.Event()
        with contextlib.ExitStack() as clients:
            self._progress: CompactedView[Progress] = bus.view(PROGRESS, Progress, only=history.run_id)
            clients.callback(self._progress.close)
            self._statuses: CompactedView[WorkerStatus] = bus.view(WORKERS, WorkerStatus)
            clients.callback(self._statuses.close)
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

    @property
    def run_id(self) -> str:
        """The run that is looked at."""
        return self._history.run_id

    @property
    def pieces(self) -> Pieces | None:
        """The base model's tokenizer, once it is loaded; None also where it is not on this machine."""
        return self._pieces

    def books(self) -> History:
        """What is known without reading trajectories; for one thread."""
        return self._history.beside()

    @contextmanager
    def reading(self) -> Iterator[History]:
        """The history, for one thread that reads the log. Raises TooMany if others read for too long."""
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
        """The first page."""
        try:
            progress = self._progress.get(self.run_id)
        except TransportError:
            progress = None
        with self._lock:
            workers, earlier, blind = dict(self._workers), dict(self._earlier), self._blind
        page = overview_page(self.books(), progress, workers, earlier, self._clock.time_ms())
        if blind:
            page["troubles"].insert(0, blind)
        return page

    def refresh(self) -> None:
        """Read what has come since."""
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

    def _follow(self) -> None:
        # The tokenizer takes a second to load: the first page does not wait for it.
        runs = self._history.log.runs
        try:
            self._pieces = tokenizer_of(runs[-1].model) if runs else None
        except Exception:  # a model's files are whatever somebody put there; the viewer shows ids instead
            logger.exception("The tokenizer cannot be loaded")
        while not self._stop.is_set():
            try:
                self.refresh()
            except Exception:  # the edge of the thread: its traceback belongs in the log, and pages are served on
                logger.exception("The viewer cannot refresh")
            self._stop.wait(_EVERY_S)
