"""When a worker joins the others: at once if nobody works yet, else when it has weights.

Joining takes partitions from the others, with the requests in them. A worker whose engine is still starting would only hold those, for the
minute that an engine may take, while the others could have done them. The first workers of a run have nobody to take from, and join
meanwhile, because joining takes seconds too.

Whoever comes also finds who is gone for good: names are made of host and process, so without that `workers` would grow with each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS

# A word that is older is of a worker that died, or of an earlier run under this name; clocks of a swarm agree within seconds.
_RECENT_MS = 15_000
# A worker that has said nothing for a day is gone. One whose clock is that wrong is back with its next word.
_LONG_AGO_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Others:
    """`work`: whether another worker takes requests. `long_gone`: keys on `workers` of which nothing was heard for a day, of any run."""

    work: bool
    long_gone: tuple[str, ...]


def others_work(statuses: Iterable[WorkerStatus], worker_id: str, now_ms: int) -> bool:
    """Whether a worker other than `worker_id` has said lately that it takes requests."""
    return any(
        status.worker_id != worker_id and status.state is WorkerState.READY and now_ms - status.time_ms <= _RECENT_MS for status in statuses
    )


def find_others(bus: Bus, worker_id: str, clock: Clock) -> Others:
    """Who else is there, by what the log says now. Blocks to read `workers`; raises TransportError."""
    statuses: Mapping[str, WorkerStatus] = replace(bus, run_id=None).newest(WORKERS, WorkerStatus)
    now_ms = clock.time_ms()
    of_run = [status for status in statuses.values() if bus.run_id in {None, status.run_id}]
    long_gone = tuple(key for key, status in statuses.items() if now_ms - status.time_ms > _LONG_AGO_MS)
    return Others(others_work(of_run, worker_id, now_ms), long_gone)
