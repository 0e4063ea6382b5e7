"""Which workers of a run are alive and how fast they are, from their heartbeats. The only place that decides whether a worker is alive.

A heartbeat's age is the time since it arrived. Only at the start, for heartbeats that lie on the log already, is it computed from the
worker's own clock, until the next heartbeat of that worker.

Threads: any; after `follow`, the view's thread calls `heard`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_bus.requests.dispatch import PartitionOwner
from echo_core.capacity.estimates import heartbeat_patience_s
from echo_schemas.records import WorkerState, WorkerStatus


@dataclass(frozen=True, slots=True)
class Shares:
    """The workers that get requests: `owners` with their partitions. `alone`: there is one living worker, apart from those on standby."""

    owners: tuple[PartitionOwner, ...]
    alone: bool


class Roster:
    """The workers with a recent heartbeat."""

    def __init__(self, *, heartbeat_s: float, group_size: int) -> None:
        """`group_size` converts the samples in heartbeats into groups."""
        self._patience_s = heartbeat_patience_s(heartbeat_s)
        self._group_size = group_size
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[float, WorkerStatus]] = {}
        self._active_s: dict[str, float] = {}

    def follow(self, workers: CompactedView[WorkerStatus], clock: Clock, on_news: Callable[[], None] = lambda: None) -> None:
        """Take the heartbeats of `workers` from now on. Calls `on_news`, on the view's thread, when the shares of work may change."""

        def hear(worker_id: str, status: WorkerStatus | None) -> None:
            if status is None:
                self.forget(worker_id)
                on_news()
            elif self.heard(status, clock.monotonic_s()):
                on_news()

        workers.on_change(hear)
        self.found(workers.items(), clock.monotonic_s(), clock.time_ms())

    def heard(self, status: WorkerStatus, now_s: float) -> bool:
        """A worker's heartbeat came at `now_s`, on our monotonic clock. Returns whether the shares of work may change by it."""
        with self._lock:
            _, known = self._heard.get(status.worker_id, (now_s, None))
            # A worker that is not ready, or has a new partition, cannot have finished a request of it yet.
            is_idle = status.state is WorkerState.READY and known is not None and known.partitions == status.partitions
            if not is_idle or known is None or status.rollouts != known.rollouts:
                self._active_s[status.worker_id] = now_s
            self._heard[status.worker_id] = (now_s, status)
        return known is None or _place_of(known) != _place_of(status)

    def forget(self, worker_id: str) -> None:
        with self._lock:
            self._heard.pop(worker_id, None)

    def found(self, statuses: Mapping[str, WorkerStatus], now_s: float, now_ms: int) -> None:
        """Take heartbeats that the log already held; their age is computed from the worker's wall clock."""
        for status in statuses.values():
            self.heard(status, now_s - max(0.0, (now_ms - status.time_ms) / 1000))

    def holders(self, partition: int, now_s: float) -> frozenset[str]:
        """The living workers that claim the partition. Names are not verified: the cluster's ACLs decide who may write `workers`."""
        return frozenset(status.worker_id for status in self.living(now_s) if partition in status.partitions)

    def shares(self, now_s: float) -> Shares:
        """Workers that take requests, the oldest heartbeat first: if two claim a partition, the last one has it.

        While no worker has weights, starting workers count, so that they find requests when they have weights.
        """
        live = self.living(now_s)
        ready = [status for status in live if status.state is WorkerState.READY]
        working = ready or [status for status in live if status.state is WorkerState.STARTING]
        return Shares(
            owners=tuple(
                PartitionOwner(
                    partitions=frozenset(status.partitions),
                    groups_per_s=max(0.0, status.rollouts_per_s) / self._group_size,
                    capacity=status.capacity,
                )
                for status in working
                if status.partitions
            ),
            alone=sum(status.state is not WorkerState.STANDBY for status in live) == 1,
        )

    def active_s(self, now_s: float) -> dict[int, float]:
        """For each partition of a living worker, when the worker last finished a request or could have begun one."""
        live = self.living(now_s)
        with self._lock:
            return {partition: self._active_s[status.worker_id] for status in live for partition in status.partitions}

    def living(self, now_s: float) -> list[WorkerStatus]:
        """Workers with a recent heartbeat, the oldest heartbeat first."""
        with self._lock:
            heard = sorted(self._heard.values(), key=lambda item: item[0])
        return [status for when_s, status in heard if status.state is not WorkerState.GONE and now_s - when_s <= self._patience_s]


def _place_of(status: WorkerStatus) -> tuple[object, ...]:
    return status.state, status.partitions, status.capacity, status.installed_version
