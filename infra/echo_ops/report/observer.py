"""Keeps a `RunView` up to date: one thread reads the log, asks for lags and reads the children's counters.

Call `start` once the topics exist. `view` gives the model to any thread, under the observer's lock. `finish` reads to the end of the log
and stops the thread; call it while Kafka still answers.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from echo_bus.bus import Bus
from echo_bus.clock import MAX_CLOCK_ERROR_MS, Deadline
from echo_bus.errors import TransportError
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_bus.reading.view import CompactedView
from echo_core.bottleneck import Place, PlaceUse, Use
from echo_ops.report.offsets import OffsetWatch
from echo_ops.report.run_view import Milestone, RunView
from echo_ops.rewards.watch import ScorerLine, ScorerWatch
from echo_runtime.announcement import read_announcement
from echo_schemas.records import Control
from echo_schemas.topics import CONTROL, DROPS, EVALS, PROGRESS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS

logger = logging.getLogger(__name__)
_TOPICS = (STEPS, DROPS, EVALS, PROGRESS, WORKERS, WEIGHTS, CONTROL)
# Records from before the command are not shown, and a long run has many, so reading starts at the command.
_HISTORY = frozenset({STEPS.name, DROPS.name, EVALS.name})
_READ_S = 0.25
# Each reading of counters and lags costs every process a few milliseconds.
_EVERY_S = 2.0
_IMPORTED = {"learner": Milestone.LEARNER_IMPORTED, "worker": Milestone.WORKER_IMPORTED}
_FINISH_S = 30.0
# No other series: collecting them all would cost a learner ten times as much.
_PLACES = "echo_place_seconds_total"
_LINE = re.compile(rf"^{_PLACES}" + r'\{place="(\w+)",use="(\w+)"\} ([0-9.e+-]+)$', re.MULTILINE)
_TIMEOUT_S = 1.0


class Observer:
    """Observes one run. `announced`: a child's name → the file with the address of its metrics."""

    def __init__(self, view: RunView, announced: Mapping[str, Path], elapsed_s: Callable[[], float]) -> None:
        self._view = view
        self._announced = dict(announced)
        self._elapsed_s = elapsed_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._next_s = 0.0
        self._reader: LogReader | None = None
        self._offsets: OffsetWatch | None = None
        self._published_before = 0
        self._bus: Bus | None = None
        self._orders: CompactedView[Control] | None = None
        self._scorers: ScorerWatch | None = None
        self._thread = threading.Thread(target=self._follow, name="observer", daemon=True)

    @contextmanager
    def view(self) -> Iterator[RunView]:
        """The model; keep the block short."""
        with self._lock:
            yield self._view

    def note(self, milestone: Milestone) -> None:
        with self._lock:
            self._view.note(milestone, self._elapsed_s())

    def start(self, bus: Bus) -> None:
        """Begin to follow. Raises TransportError."""
        self._reader = reader = bus.reader(_TOPICS)
        since = reader.offsets_at(max(0, self._view.started_ms - MAX_CLOCK_ERROR_MS))
        reader.start({place: offset for place, offset in since.items() if place[0] in _HISTORY})
        self._bus = bus
        self._offsets = OffsetWatch(bus.cluster, bus.namespace)
        self._published_before = self._offsets.written_before(TRAJECTORIES, self._view.started_ms)
        self._thread.start()

    def finish(self) -> None:
        """Read to the end of the log, count once more, stop. Idempotent. If the cluster is gone, the view stays as it is."""
        if self._stop.is_set() or self._reader is None:
            return
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        try:
            for messages in self._reader.read_to_end(Deadline.after(_FINISH_S)):
                self._apply(messages)
            self._count()
        except TransportError as exc:
            logger.warning("The end of the log could not be read: %s", exc)
        finally:
            self._reader.close()
            for client in (self._offsets, self._orders, self._scorers):
                if client is not None:
                    client.close()

    def look_for_announcements(self) -> None:
        """Note which processes have started, while there is no log to read yet."""
        for name, announce in self._announced.items():
            milestone = _IMPORTED.get(name.partition("-")[0])
            if milestone is not None and announce.exists():
                self.note(milestone)

    def _follow(self) -> None:
        assert self._reader is not None
        while not self._stop.is_set():
            try:
                messages = self._reader.read(500, timeout_s=_READ_S)
                self._apply(messages)
                if self._elapsed_s() >= self._next_s:
                    self._next_s = self._elapsed_s() + _EVERY_S
                    self._count()
                    self._scrape()
            except TransportError as exc:
                # The roles see the same error and end with it; a short gap in the observation must not end a run.
                logger.warning("The run cannot be observed: %s", exc)
                self._stop.wait(_EVERY_S)
            except Exception:  # the edge of the thread: its traceback belongs in the log, and the run goes on
                logger.exception("The run cannot be observed")
                self._stop.wait(_EVERY_S)

    def _apply(self, messages: list[Message]) -> None:
        with self._lock:
            for message in messages:
                if message.record is not None:
                    self._view.apply(message.record)

    def _count(self) -> None:
        assert self._offsets is not None
        published = self._offsets.ends(TRAJECTORIES) - self._published_before
        scorers = self._look_at_scorers()
        lags = self._offsets.lags({line.application for line in scorers} - {line.application for line in scorers if not line.is_shadow})
        rewards = self._offsets.ends(REWARDS)
        with self._lock:
            self._view.rewards_written = rewards
            self._view.trajectories_published = published
            self._view.lags = lags
            self._view.scorers = scorers
        if published:
            self.note(Milestone.TRAJECTORY)

    def _look_at_scorers(self) -> list[ScorerLine]:
        """The applications that give rewards, once one was attached. Empty before the first step, which names the weights."""
        if self._bus is None or self._view.weights is None:
            return []
        if self._orders is None:
            self._orders = self._bus.orders()
        orders = self._orders.items()
        if not any(order.attachment is not None for order in orders.values()):
            return []
        if self._scorers is None:
            self._scorers = ScorerWatch(self._bus)
        with self._lock:
            terms, version = self._view.terms, self._view.num_steps
        return self._scorers.look(terms, orders, version)

    def _scrape(self) -> None:
        for name, announce in self._announced.items():
            announced = read_announcement(announce)
            places = scrape_places(announced.url) if announced is not None else None
            notices = scrape_notices(announced.url) if announced is not None else None
            with self._lock:
                if places is not None:
                    self._view.read_places(name, places)
                self._view.notices[name] = notices or {}
        with self._lock:
            self._view.close_reading(self._elapsed_s())


def scrape_places(url: str) -> dict[Place, PlaceUse] | None:
    """The counters now; None if the process does not answer within a second."""
    text = _read(f"{url}/metrics?name[]={_PLACES}")
    return None if text is None else parse_places(text)


def scrape_notices(url: str) -> dict[str, str] | None:
    """The process's notices now, by place, or else its health problems; None if it does not answer."""
    try:
        said = json.loads(_read(f"{url}/healthz") or "")
    except ValueError:
        return None
    # A blocked event loop is among the problems and the notices.
    return dict(said.get("notices") or said.get("problems") or {})


def _read(url: str) -> str | None:
    """The body of the answer, also of an answer with an error status; None without an answer."""
    try:
        try:
            # A child of ours wrote the address.
            answer: Any = urllib.request.urlopen(url, timeout=_TIMEOUT_S)  # noqa: S310
        except HTTPError as exc:
            answer = exc
        with answer:
            return str(answer.read().decode())
    except (HTTPException, OSError, UnicodeDecodeError):
        return None


def parse_places(text: str) -> dict[Place, PlaceUse]:
    """Parse the place counters in Prometheus' text format, and nothing else, to save time."""
    seconds: dict[Place, dict[Use, float]] = {}
    for place, use, value in _LINE.findall(text):
        seconds.setdefault(Place(place), {})[Use(use)] = float(value)
    return {
        place: PlaceUse(busy_s=uses.get(Use.BUSY, 0.0), empty_s=uses.get(Use.EMPTY, 0.0), blocked_s=uses.get(Use.BLOCKED, 0.0))
        for place, uses in seconds.items()
    }
