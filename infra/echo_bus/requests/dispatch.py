"""Chooses the partition of the next request: the one with the least outstanding work, or none while all have enough.

Workers share one consumer group on `requests` and commit a request when all its trajectories are acknowledged, so a partition's lag *is*
its outstanding work. A fast worker's partitions empty sooner and are chosen more often than a slow worker's. If the partitions and the
speed of each worker are known, the lag of all its partitions together is bounded by its speed (`echo_core.work_shares`), and partitions
without a worker get nothing.

    LeastLagChooser   pure: observed offsets and requests on their way → a partition, or None
    WorkObserver      asks the cluster for committed and end offsets

Threads: `choose` and `observe` belong to the requester's thread; `acknowledged` and `failed` may come from the publisher's poll thread.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from confluent_kafka import OFFSET_INVALID

from echo_bus.client.cluster import Cluster
from echo_bus.client.consumer_queries import committed_offsets, num_partitions, open_asker, watermarks
from echo_bus.client.publisher import Receipt
from echo_core.work_shares import OpenWorkers, WorkerLoad
from echo_schemas.errors import UserError

# Records in a row for the same partition of a worker: every partition in a transaction costs the broker two requests, and the worker reads
# all of its partitions anyway.
_IN_A_ROW = 8
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """The offsets of one partition: the first one not done, and the end."""

    first_open: int
    end: int

    @property
    def outstanding(self) -> int:
        return max(0, self.end - self.first_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOwner:
    """A worker with its partitions; see `WorkerLoad` for the numbers."""

    partitions: frozenset[int]
    groups_per_s: float
    capacity: int


class LeastLagChooser:
    """Chooses partitions so that none holds more than `depth` unfinished requests; after `share`, so that no worker has more than fits its
    speed. Thread-safe.
    """

    def __init__(self, num_partitions: int, *, depth: int) -> None:
        """`depth` times the partitions is the window: the most requests between the requester and the workers."""
        if num_partitions < 1 or depth < 1:
            raise UserError(
                f"{num_partitions} partitions with {depth} requests each leave no room for work.", hint="Both must be at least 1."
            )
        self._lock = threading.Lock()
        self._depth = depth
        self._first_open = [0] * num_partitions
        self._end = [0] * num_partitions
        self._in_flight = [0] * num_partitions
        self._next = 0
        self._owners: Sequence[PartitionOwner] = ()
        self._horizon_s = 0.0
        self._alone = False
        # The order of the workers; None when it must be computed again because something else than our choices has changed.
        self._open: OpenWorkers | None = None
        self._rows: dict[frozenset[int], tuple[int, int]] = {}

    def share(self, owners: Sequence[PartitionOwner], *, horizon_s: float = 0.0, alone: bool = False) -> None:
        """From now on give work to `owners` alone, by their speed; without owners to all partitions alike. See `OpenWorkers`.

        If two owners claim a partition, the later one has it.
        """
        claims = {partition: owner for owner in owners for partition in owner.partitions if 0 <= partition < len(self._end)}
        with self._lock:
            self._horizon_s, self._alone, self._open = horizon_s, alone, None
            self._owners = [
                replace(owner, partitions=mine)
                for owner in owners
                if (mine := frozenset(partition for partition in owner.partitions if claims.get(partition) is owner))
            ]
            self._rows = {owner.partitions: self._rows[owner.partitions] for owner in self._owners if owner.partitions in self._rows}

    def grow(self, num_partitions: int) -> None:
        """From now on there are so many partitions; fewer change nothing."""
        with self._lock:
            self._open = None
            for numbers in (self._first_open, self._end, self._in_flight):
                numbers.extend([0] * (num_partitions - len(numbers)))

    def observe(self, work: Mapping[int, PartitionWork]) -> None:
        """Take over observed offsets. Offsets only grow, so an answer older than an acknowledgement changes nothing."""
        with self._lock:
            self._open = None
            for partition, seen in work.items():
                self._first_open[partition] = max(self._first_open[partition], seen.first_open)
                self._end[partition] = max(self._end[partition], seen.end)

    def choose(self) -> int | None:
        """The partition for the next request, counted as on its way until `acknowledged` or `failed`; None while all are full.

        Equal partitions take turns, so that all idle workers get work. A known worker gets several records in a row in one partition.
        """
        with self._lock:
            num_partitions = len(self._end)
            if self._owners:
                owner = self._next_owner()
                if owner is None:
                    return None
                chosen, length = self._rows.get(owner.partitions, (-1, _IN_A_ROW))
                if length >= _IN_A_ROW:
                    chosen, length = min(owner.partitions, key=self._turn), 0
                self._rows[owner.partitions] = (chosen, length + 1)
            else:
                chosen = min(range(num_partitions), key=self._turn)
                if self._lag(chosen) >= self._depth:
                    return None
            self._in_flight[chosen] += 1
            self._next = (chosen + 1) % num_partitions
            return chosen

    def acknowledged(self, partition: int, offset: int) -> None:
        with self._lock:
            self._in_flight[partition] -= 1
            self._end[partition] = max(self._end[partition], offset + 1)

    def failed(self, partition: int) -> None:
        with self._lock:
            self._open = None
            self._in_flight[partition] -= 1

    def follow(self, partition: int, receipt: Receipt) -> None:
        """Call `acknowledged` or `failed` when the receipt is settled."""

        def settled(done: Receipt) -> None:
            if done.where is None:
                self.failed(partition)
            else:
                self.acknowledged(partition, done.where.offset)

        receipt.on_done(settled)

    @property
    def outstanding(self) -> int:
        """Unfinished requests, including those on their way."""
        with self._lock:
            return sum(self._lag(partition) for partition in range(len(self._end)))

    def _next_owner(self) -> PartitionOwner | None:
        if self._open is None:
            loads = [
                WorkerLoad(
                    groups_per_s=owner.groups_per_s,
                    capacity=owner.capacity,
                    outstanding=sum(self._lag(partition) for partition in owner.partitions),
                )
                for owner in self._owners
            ]
            self._open = OpenWorkers(loads, window=self._depth * len(self._end), horizon_s=self._horizon_s, alone=self._alone)
        chosen = self._open.take()
        return None if chosen is None else self._owners[chosen]

    def _turn(self, partition: int) -> tuple[int, int]:
        """Sort key: the least lag first, then the next partition in turn."""
        return self._lag(partition), (partition - self._next) % len(self._end)

    def _lag(self, partition: int) -> int:
        return max(0, self._end[partition] - self._first_open[partition]) + self._in_flight[partition]


WORKERS_GROUP = "worker"
"""The group that shares the requests."""


class WorkObserver:
    """Reads committed and end offsets of one group on one topic. Not thread-safe; `close` it."""

    def __init__(self, cluster: Cluster, *, physical: str, group: str, client_id: str) -> None:
        """`group`: the *workers'* group; the observer never joins it."""
        self._physical = physical
        self._group = group
        self._consumer = open_asker(cluster, group, client_id)

    def num_partitions(self) -> int:
        """Raises TopicMissing."""
        return num_partitions(self._consumer, self._physical, _ASK_S)

    def observe(self, count: int) -> dict[int, PartitionWork]:
        """The work of partitions 0 to `count` - 1. Without a committed offset a partition counts from its beginning, where workers start.

        Blocks for one request to the group's coordinator and two per leader. Raises ClusterUnreachable, NotAuthorized.
        """
        committed = self.committed(count)
        bounds = watermarks(self._consumer, [(self._physical, partition) for partition in range(count)], _ASK_S)
        return {
            partition: PartitionWork(first_open=max(low, committed.get(partition, OFFSET_INVALID)), end=high)
            for (_, partition), (low, high) in bounds.items()
        }

    def committed(self, count: int) -> dict[int, int]:
        """The offsets that the group committed in partitions 0 to `count` - 1; partitions without one are left out.

        One request to the group's coordinator. Raises ClusterUnreachable, NotAuthorized.
        """
        places = [(self._physical, partition) for partition in range(count)]
        return {partition: offset for (_, partition), offset in committed_offsets(self._consumer, self._group, places, _ASK_S).items()}

    def close(self) -> None:
        self._consumer.close()
