"""When a worker joins the others: at once if nobody works, else when it has weights.

Joining takes partitions from the others, with the requests in them. A worker whose engine is still starting would only hold those, for the
minute that an engine may take, while the others could have done them. The first workers of a run have nobody to take from, and join
meanwhile, because joining takes seconds too. Whether those that say that they work still do, their next word tells, and not their clocks.

Whoever comes also finds who is gone for good: names are made of host and process, so without that `workers` would grow with each start.
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

# A worker that has said nothing for a day is gone. One whose clock is that wrong is back with its next word.
_LONG_AGO_MS = 24 * 3_600_000
# So many of their words are waited for before others count as gone, and at least so long.
_WORDS = 3
_LEAST_S = 3.0


class Namesake:
    """Whether a worker on another machine goes by our name. Of two members of one name the group keeps the later one: whoever comes would
    end the one that works. Heard between the start and the joining, which an engine's start lies between; `close` it then.
    """

    def __init__(self, bus: Bus, worker_id: str, host: str) -> None:
        self._worker_id = worker_id
        self._host = host
        self._other = ""
        self._workers = bus.view(WORKERS, WorkerStatus, only=worker_id)
        self._workers.on_change(self._note)

    def check(self) -> None:
        """Raises UserError if one was heard."""
        if self._other:
            raise UserError(
                f"A worker named {self._worker_id!r} is at work on {self._other}; this one, of the same name, does not take its place.",
                hint="Give each worker a name of its own with --name.",
            )

    def close(self) -> None:
        """Listen no more."""
        self._workers.close()

    def _note(self, _key: str, status: WorkerStatus | None) -> None:
        if status is not None and status.host != self._host and status.state is WorkerState.READY:
            self._other = status.host


@dataclass(frozen=True, slots=True)
class Others:
    """`ready`: other workers whose last word, whenever that was, is that they take requests. `long_gone`: keys on `workers` of which
    nothing was heard for a day, of any run.
    """

    ready: frozenset[str]
    long_gone: tuple[str, ...]


def ready_others(statuses: Iterable[WorkerStatus], worker_id: str) -> frozenset[str]:
    """Who, beside `worker_id`, says that it takes requests."""
    return frozenset(status.worker_id for status in statuses if status.worker_id != worker_id and status.state is WorkerState.READY)


def find_others(bus: Bus, worker_id: str, clock: Clock) -> Others:
    """Who else is there, by what the log says now. Blocks to read `workers`; raises TransportError."""
    statuses: Mapping[str, WorkerStatus] = replace(bus, run_id=None).newest(WORKERS, WorkerStatus)
    now_ms = clock.time_ms()
    long_gone = tuple(key for key, status in statuses.items() if now_ms - status.time_ms > _LONG_AGO_MS)
    of_run = [status for key, status in statuses.items() if bus.run_id in {None, status.run_id} and key not in long_gone]
    return Others(ready_others(of_run, worker_id), long_gone)


def still_work(bus: Bus, ready: frozenset[str], heard: threading.Event, *, heartbeat_s: float) -> bool:
    """Whether one of `ready` says so once more within a few of its words. Blocks for those, or until somebody sets `heard`, who needs no
    answer any more. Raises TransportError.
    """
    if not ready:
        return False

    def listen(_key: str, status: WorkerStatus | None) -> None:
        if status is not None and status.worker_id in ready and status.state is WorkerState.READY:
            heard.set()

    with closing(bus.view(WORKERS, WorkerStatus)) as workers:
        workers.on_change(listen)
        return heard.wait(max(_LEAST_S, _WORDS * heartbeat_s))
