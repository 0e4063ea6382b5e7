"""Where a request waits before it is generated: for the weights it requires, then for room in the engine.

On the worker's asyncio loop alone. `enter` waits; `weights_changed`, another request's `leave` and the deadline end the wait.

An *early* request requires a version that is not published. Its version may never come, and its deadline may be a year away. So early
requests take no room from others, wait for a bounded time whatever their deadline, and at most `MOST_EARLY` of them wait.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from echo_bus.clock import Clock
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.publishing import Ending, GroupEnd
from echo_schemas.records import Purpose, RolloutRequest

# For each four groups that the engine works on, one more waits inside it and fills the places of samples that end before their group.
_WAITING_SHARE = 4
# A request whose weights do not come is closed so long before its deadline that its answer arrives in time, but at most by this share of
# the time that it had when it came.
_ANSWER_BEFORE_S = 1.0
_ANSWER_BEFORE_SHARE = 0.1
MOST_EARLY = 256
"""Early requests that wait at once. Above it the one for the highest version, then with the latest deadline, is answered at once."""
EARLY_S = 60.0
"""How long an early request waits where requests follow their weights: as long as a worker's view of the log may be behind."""
EARLY_ASKED_S = 3_600.0
"""The same in sequential mode, where a request is sent before its weights, which may take long to be published."""
# Requests in the estimate: enough that one that lay in the log for long does not decide, and few enough that a step of a clock is
# followed before pace holds the feeder back.
_NUM_HEARD = 8


class Holding:
    """Holds requests back. Each request that `enter` lets in must `leave`."""

    def __init__(
        self,
        groups_in_flight: int,
        *,
        installed: Callable[[], SnapshotRef | None],
        floor: Callable[[], int],
        metrics: WorkerMetrics,
        clock: Clock,
        published: Callable[[], int | None],
        early_s: float = EARLY_S,
    ) -> None:
        """`groups_in_flight`: groups in the engine at once. `installed`: the weights in force. `floor`: seqs below it are decided.
        `published`: the newest published version, None if there is none. `early_s`: how long an early request waits.
        """
        self._installed = installed
        self._floor = floor
        self._metrics = metrics
        self._clock = clock
        self._published = published
        self._early_s = early_s
        self._early: dict[asyncio.Task[None], RolloutRequest] = {}
        self._outbid: set[asyncio.Task[None]] = set()
        self.on_early: Callable[[], None] = lambda: None
        """Called when a request turns out to be early, so that there is room for another."""
        self._time = AskersTime(clock)
        self._changed = asyncio.Event()
        self._room = asyncio.Semaphore(groups_in_flight + math.ceil(groups_in_flight / _WAITING_SHARE))
        self._waiting: set[asyncio.Task[None]] = set()

    @property
    def num_early(self) -> int:
        """Requests that wait for weights that are not published. From any thread."""
        return len(self._early)

    async def enter(self, request: RolloutRequest) -> Ending | None:
        """Wait until `request` may be generated; None then, else how it is closed. `cancel` cancels tasks that wait here."""
        task = asyncio.current_task()
        assert task is not None, "a group runs as a task"
        self._waiting.add(task)
        self._time.heard(request)
        try:
            closed = await self._until_installed(request, task)
            if closed is not None or not _takes_room(request):
                return closed
            await self._room.acquire()
            if self._left_s(request) <= 0:
                self._room.release()
                return Ending(outcome=GroupEnd.EXPIRED, detail="There was no room in the engine before the deadline.")
            if request.purpose is Purpose.TRAIN and request.seq < self._floor():
                # The request came with a partition from another worker, which has done it meanwhile.
                self._room.release()
                return Ending(outcome=GroupEnd.SUPERSEDED, detail=f"Seq {request.seq} is trained or dropped already.")
            return None
        finally:
            self._waiting.discard(task)
            self._early.pop(task, None)
            self._outbid.discard(task)

    def leave(self, request: RolloutRequest) -> None:
        """The engine has finished `request`."""
        if _takes_room(request):
            self._room.release()

    def weights_changed(self) -> None:
        """Other weights are installed: waiting requests look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Cancel the tasks of all waiting requests."""
        for task in self._waiting:
            task.cancel()

    async def _until_installed(self, request: RolloutRequest, task: asyncio.Task[None]) -> Ending | None:
        """A newer installed version satisfies the request, unless it is `exact`; an evaluation is answered under an older one too."""
        required, left_s, came_s = request.required_version, self._left_s(request), self._clock.monotonic_s()
        if left_s <= 0:
            return Ending(outcome=GroupEnd.EXPIRED, detail="It came after its deadline.")
        answer_before_s = min(_ANSWER_BEFORE_S, _ANSWER_BEFORE_SHARE * left_s)
        self._metrics.waiting.inc()
        try:
            while True:
                ref = self._installed()
                if ref is not None and ref.version >= required:
                    if request.exact and ref.version != required and request.purpose is not Purpose.EVAL:
                        return Ending(outcome=GroupEnd.SUPERSEDED, detail=f"Version {ref.version} is installed, {required} was asked for.")
                    return None
                have = "none" if ref is None else ref.version
                left_s = self._left_s(request) - answer_before_s
                if left_s <= 0:
                    return Ending(
                        outcome=GroupEnd.NOT_READY, detail=f"Version {required} did not come before the deadline; here is {have}."
                    )
                if self._is_early(request, task):
                    left_s = min(left_s, came_s + self._early_s - self._clock.monotonic_s())
                    if left_s <= 0 or task in self._outbid:
                        why = f"and {MOST_EARLY} other requests wait for such" if left_s > 0 else f"nor was for {self._early_s:g} s"
                        return Ending(outcome=GroupEnd.NOT_READY, detail=f"Version {required} is not published, {why}; here is {have}.")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), left_s if left_s < math.inf else None)
        finally:
            self._metrics.waiting.dec()

    def _is_early(self, request: RolloutRequest, task: asyncio.Task[None]) -> bool:
        """Whether the version that `request` requires is not published. Notes the request; of more than `MOST_EARLY` ends one."""
        published = self._published()
        if published is not None and published >= request.required_version:
            self._early.pop(task, None)
            return False
        if task not in self._early:
            self._early[task] = request
            self.on_early()
        if len(self._early) - len(self._outbid) > MOST_EARLY:
            self._outbid.add(max((each for each in self._early if each not in self._outbid), key=self._most_wanted))
            self.weights_changed()
        return True

    def _most_wanted(self, task: asyncio.Task[None]) -> tuple[int, float]:
        request = self._early[task]
        return request.required_version, math.inf if request.deadline_ms is None else request.deadline_ms

    def _left_s(self, request: RolloutRequest) -> float:
        """Seconds until the request is too old to be started."""
        left_s = self._time.left_s(request)
        return math.inf if left_s is None else left_s


def _takes_room(request: RolloutRequest) -> bool:
    """False for a probe: it is small, and useless once the next version is there, so it does not wait for room."""
    return not (request.exact and request.purpose is Purpose.PROBE)


class AskersTime:
    """Estimates the requesters' clocks, by which deadlines are set and which may be far from this machine's: the learner's, which asks for
    evaluations, and in asynchronous mode the feeder's, which asks for the rest.

    Each request tells when it was issued, by the requester's clock, and arrives a little later. So the issue time of a request, moved
    forward by our monotonic clock since its arrival, is never ahead of the requester's clock. The estimate is the latest of these over the
    newest few requests; after as many it has also followed a step of either machine's clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # Until a request has come, the clocks are taken to agree.
        agreed_ms = clock.time_ms() - self._monotonic_ms()
        self._ahead_ms = {is_eval: deque([agreed_ms], maxlen=_NUM_HEARD) for is_eval in (False, True)}

    def heard(self, request: RolloutRequest) -> None:
        """`request` has just come."""
        self._ahead_ms[request.purpose is Purpose.EVAL].append(request.issued_ms - self._monotonic_ms())

    def left_s(self, request: RolloutRequest) -> float | None:
        """Seconds until the deadline of `request`, negative after it; None if it has none."""
        if request.deadline_ms is None:
            return None
        now_ms = self._monotonic_ms() + max(self._ahead_ms[request.purpose is Purpose.EVAL])
        return (request.deadline_ms - now_ms) / 1000

    def _monotonic_ms(self) -> int:
        return round(self._clock.monotonic_s() * 1000)
