"""When a worker joins the others: at once if nobody works yet, else when it has weights.

Joining takes partitions from the others, with the requests in them. A worker whose engine is still starting would only hold those, for the
minute that an engine may take, while the others could have done them. The first workers of a run have nobody to take from, and join
meanwhile, because joining takes seconds too.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_schemas.records import WorkerState, WorkerStatus
from echo_schemas.topics import WORKERS

# A word that is older is of a worker that died, or of an earlier run under this name; clocks of a swarm agree within seconds.
_RECENT_MS = 15_000


def others_work(statuses: Iterable[WorkerStatus], worker_id: str, now_ms: int) -> bool:
    """Whether a worker other than `worker_id` has said lately that it takes requests."""
    return any(
        status.worker_id != worker_id and status.state is WorkerState.READY and now_ms - status.time_ms <= _RECENT_MS for status in statuses
    )


def find_others(bus: Bus, worker_id: str, clock: Clock) -> bool:
    """`others_work`, by what the log says now. Blocks to read `workers`; raises TransportError."""
    return others_work(bus.newest(WORKERS, WorkerStatus).values(), worker_id, clock.time_ms())
