"""When a worker joins the consumer group: at once if no other worker works, else when it has weights.

Joining takes partitions from the other workers, with the requests in them. A worker whose engine is still starting would hold these
requests, for the minute that an engine may take, while the others could do them. The first workers of a run join while their engines start,
because joining takes seconds too. Whether a worker that was READY still works is known by its next status, not by clocks.

A worker that starts also removes the statuses of workers that are gone for good: names are made of host and process, so `workers` would
otherwise grow with each start.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS

# A worker without a status for a day is gone. One whose clock is that wrong is back with its next status.
_LONG_AGO_MS = 24 * 3_600_000
# How long to wait for a status before other workers count as gone: so many heartbeats, and at least so many seconds.
_WORDS = 3
_LEAST_S = 3.0


class Namesake:
    """Whether a worker on another machine has our name. Of two members of one name the group keeps the later one, so joining would end the
    other worker. Listens from the start until the joining, while the engine starts; `close` it then.
    """

    def __init__(self, bus: Bus, worker_id: str, host: str) -> None:
        self._worker_id = worker_id
        self._host = host
        self._other = ""
        self._workers = bus.view(WORKERS, WorkerStatus, only=worker_id)
        self._workers.on_change(self._note)

    def check(self) -> None:
        """Raises UserError if there is one."""
        if self._other:
            raise UserError(
                f"A worker named {self._worker_id!r} is at work on {self._other}; this one, of the same name, does not take its place.",
                hint="Give each worker a name of its own with --name.",
            )

    def close(self) -> None:
        self._workers.close()

    def _note(self, _key: str, status: WorkerStatus | None) -> None:
        if status is not None and status.host != self._host and status.state is WorkerState.READY:
            self._other = status.host


@dataclass(frozen=True, slots=True)
class Others:
    """`ready`: other workers whose last status, however old, is READY. `long_gone`: keys on `workers`, of any run, without a status for a
    day.
    """

    ready: frozenset[str]
    long_gone: tuple[str, ...]


def ready_others(statuses: Iterable[WorkerStatus], worker_id: str) -> frozenset[str]:
    """Workers other than `worker_id` that take requests by their status."""
    return frozenset(status.worker_id for status in statuses if status.worker_id != worker_id and status.state is WorkerState.READY)


def find_others(bus: Bus, worker_id: str, clock: Clock) -> Others:
    """The other workers, by the log. Blocks to read `workers`; raises TransportError."""
    statuses: Mapping[str, WorkerStatus] = replace(bus, run_id=None).newest(WORKERS, WorkerStatus)
    now_ms = clock.time_ms()
    long_gone = tuple(key for key, status in statuses.items() if now_ms - status.time_ms > _LONG_AGO_MS)
    of_run = [status for key, status in statuses.items() if bus.run_id in {None, status.run_id} and key not in long_gone]
    return Others(ready_others(of_run, worker_id), long_gone)


def still_work(bus: Bus, ready: frozenset[str], heard: threading.Event, *, heartbeat_s: float) -> bool:
    """Whether one of `ready` publishes READY again within a few heartbeats. Blocks so long, or until another thread sets `heard` because it
    needs no answer any more. Raises TransportError.
    """
    if not ready:
        return False

    def listen(_key: str, status: WorkerStatus | None) -> None:
        if status is not None and status.worker_id in ready and status.state is WorkerState.READY:
            heard.set()

    with closing(bus.view(WORKERS, WorkerStatus)) as workers:
        workers.on_change(listen)
        return heard.wait(max(_LEAST_S, _WORDS * heartbeat_s))
