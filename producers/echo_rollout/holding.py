"""Where a request waits before it is generated: for the weights it requires, then for room in the engine.

On the worker's asyncio loop alone. `enter` waits; `weights_changed`, another request's `leave` and the deadline end the wait.

An *early* request requires a version that nobody has published. Anybody may ask for one that never comes, until a deadline a year away. So
early requests take no room from others, wait for a bounded time whatever their deadline, and only so many of them wait.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from echo_bus.clock import Clock
from echo_rollout.askers_time import AskersTime
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.publishing import Ending, GroupEnd
from echo_schemas.records import Purpose, RolloutRequest

# Of each four groups that the engine works on, one more waits inside it: a place is free as soon as one sample of a group has ended.
_WAITING_SHARE = 4
# A request whose weights do not come is closed so long before its deadline that an answer is there in time; of what was left when it came,
# at most a tenth.
_ANSWER_BEFORE_S = 1.0
_ANSWER_BEFORE_SHARE = 0.1
# Above it, the one that asks for the most, then the one with the latest deadline, is answered at once.
MOST_EARLY = 256
"""Early requests that wait at once."""
EARLY_S = 60.0
"""How long an early one waits where requests follow their weights: by as much as a worker's view of the log may be behind."""
EARLY_ASKED_S = 3_600.0
"""The same in sequential mode, where requests go ahead of their weights, which may take long to be published."""


class Holding:
    """Holds requests back. Each that `enter` let in must `leave`."""

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
        """`groups_in_flight`: what the engine works on at once. `installed`: the weights in force. `floor`: seqs below it are decided.
        `published`: the newest version that is; None: none is. `early_s`: how long one waits that nobody has published.
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
        """Requests that wait for weights which nobody has published. From any thread."""
        return len(self._early)

    async def enter(self, request: RolloutRequest) -> Ending | None:
        """Wait until `request` may be generated; None then, else how it is closed. For a task that nobody needs if it is cancelled here."""
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
                # It came with a partition of another worker, which has done it meanwhile.
                self._room.release()
                return Ending(outcome=GroupEnd.SUPERSEDED, detail=f"Seq {request.seq} is trained or dropped already.")
            return None
        finally:
            self._waiting.discard(task)
            self._early.pop(task, None)
            self._outbid.discard(task)

    def leave(self, request: RolloutRequest) -> None:
        """The engine is through with `request`."""
        if _takes_room(request):
            self._room.release()

    def weights_changed(self) -> None:
        """Other weights are installed: whoever waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def cancel(self) -> None:
        """Let nobody in any more: the tasks that wait are cancelled."""
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
        """Whether nobody has published what `request` requires. Notes it, and of too many has one answered."""
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
    """A probe waits for nobody: it is small, and worth nothing once the next version is there."""
    return not (request.exact and request.purpose is Purpose.PROBE)
