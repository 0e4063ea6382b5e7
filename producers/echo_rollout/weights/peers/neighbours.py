"""Who else passes weights on, by the heartbeats: those that said where, and were heard lately."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping

from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_bus.requests.roster import Roster
from echo_schemas.records import WorkerStatus


def follow_neighbours(
    workers: CompactedView[WorkerStatus], clock: Clock, *, worker_id: str, host: str, heartbeat_s: float
) -> Callable[[], Mapping[str, str]]:
    """A function that says the names and addresses of the living peers but `worker_id`. `host`: this machine, whose loopback is ours."""
    roster = Roster(heartbeat_s=heartbeat_s, group_size=1)
    roster.follow(workers, clock)

    def neighbours() -> Mapping[str, str]:
        return {
            status.worker_id: status.peer_address
            for status in roster.living(clock.monotonic_s())
            if status.worker_id != worker_id and status.peer_address and (status.host == host or not _is_loopback(status.peer_address))
        }

    return neighbours


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[v6]:port`. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not 0 < int(port) < 1 << 16:
        message = f"{address!r} is no host:port"
        raise ValueError(message)
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
