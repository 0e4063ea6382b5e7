"""Who works on a run and how fast, by the workers' own words and by when they came: the one notion of which workers are alive.

Workers' clocks are never compared with ours, but at a start: nobody here has seen how old the words are that lie on the log already, so
their own times are taken for it, until each worker is heard or missed.

Threads: any; `follow` hears on the view's.
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
    """Who gets work: `owners` with their partitions; `alone` if there is nobody else, not even one that is starting. Those on standby, who
    take nothing, are nobody.
    """

    owners: tuple[PartitionOwner, ...]
    alone: bool


class Roster:
    """The workers that were heard of lately."""

    def __init__(self, *, heartbeat_s: float, group_size: int) -> None:
        """Workers say how many samples they make; work is counted in groups of `group_size`."""
        self._patience_s = heartbeat_patience_s(heartbeat_s)
        self._group_size = group_size
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[float, WorkerStatus]] = {}
        self._active_s: dict[str, float] = {}

    def follow(self, workers: CompactedView[WorkerStatus], clock: Clock, on_news: Callable[[], None] = lambda: None) -> None:
        """Hear what `workers` knows and will know. `on_news`, on the view's thread: it is news of who may be given work."""

        def hear(worker_id: str, status: WorkerStatus | None) -> None:
            if status is None:
                self.forget(worker_id)
                on_news()
            elif self.heard(status, clock.monotonic_s()):
                on_news()

        workers.on_change(hear)
        self.found(workers.items(), clock.monotonic_s(), clock.time_ms())

    def heard(self, status: WorkerStatus, now_s: float) -> bool:
        """A worker's newest word came at `now_s`, on our monotonic clock.

        Returns whether it says anything new of who may be given work; a thousand workers say every second that they still work.
        """
        with self._lock:
            _, known = self._heard.get(status.worker_id, (now_s, None))
            # One that is not ready yet, or has just got a partition, has had no time to finish anything of it.
            is_idle = status.state is WorkerState.READY and known is not None and known.partitions == status.partitions
            if not is_idle or known is None or status.rollouts != known.rollouts:
                self._active_s[status.worker_id] = now_s
            self._heard[status.worker_id] = (now_s, status)
        return known is None or _place_of(known) != _place_of(status)

    def forget(self, worker_id: str) -> None:
        """`workers` does not know the worker any more."""
        with self._lock:
            self._heard.pop(worker_id, None)

    def found(self, statuses: Mapping[str, WorkerStatus], now_s: float, now_ms: int) -> None:
        """What the log held before anything was heard. A word that is old by the wall clock is that of a worker long gone."""
        for status in statuses.values():
            self.heard(status, now_s - max(0.0, (now_ms - status.time_ms) / 1000))

    def holders(self, partition: int, now_s: float) -> frozenset[str]:
        """Who says to read the partition. A name may be false: who may write `workers` is the cluster's to say."""
        return frozenset(status.worker_id for status in self.living(now_s) if partition in status.partitions)

    def shares(self, now_s: float) -> Shares:
        """Workers that take requests, the longest unheard first, so that of two that claim a partition the last one has it.

        While none has weights yet, those that wait for them count, so that their first requests are there when the weights are.
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
        """The partitions that living workers hold, each with the moment when its worker last finished something, or could have begun to."""
        live = self.living(now_s)
        with self._lock:
            return {partition: self._active_s[status.worker_id] for status in live for partition in status.partitions}

    def living(self, now_s: float) -> list[WorkerStatus]:
        """Those heard lately, the longest unheard first."""
        with self._lock:
            heard = sorted(self._heard.values(), key=lambda item: item[0])
        return [status for when_s, status in heard if status.state is not WorkerState.GONE and now_s - when_s <= self._patience_s]


def _place_of(status: WorkerStatus) -> tuple[object, ...]:
    return status.state, status.partitions, status.capacity, status.installed_version
