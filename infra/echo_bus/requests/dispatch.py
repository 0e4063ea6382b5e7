"""Which partition the next request goes to: the one with the least outstanding work, none while all have enough.

Workers share one consumer group on `requests` and commit a request when all its trajectories are acknowledged, so a partition's lag *is*
its outstanding work. A fast worker's partitions empty sooner and are chosen more often; a slow one's are left alone. Where it is known
whose partitions are whose, and what each worker does per second, the lag of a worker's partitions together is bounded by its speed
(`echo_core.work_shares`), and those that nobody works on get nothing.

    LeastLagChooser   pure: what was seen and what is on its way → a partition, or None
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

# Records in a row for the same partition of a worker: every partition that a transaction touches costs the broker two requests, and to the
# worker, which reads all of its partitions at once, it is the same.
_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class PartitionWork:
    """What the cluster says of one partition: the first offset not done, and the end."""

    first_open: int
    end: int

    @property
    def outstanding(self) -> int:
        """Records that nobody has finished."""
        return max(0, self.end - self.first_open)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionOwner:
    """A worker with the partitions that it has; see `WorkerLoad` for the numbers."""

    partitions: frozenset[int]
    groups_per_s: float
    capacity: int


class LeastLagChooser:
    """Chooses partitions so that none holds more than `depth` requests that nobody has finished; with `share`, so that no worker has more
    than its speed is worth. Thread-safe.
    """

    def __init__(self, num_partitions: int, *, depth: int) -> None:
        """`depth` times the partitions is the window: what lies between the requester and the workers at most."""
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
        # Who is next, as long as nothing but our own choices has changed; made again when it is asked for.
        self._open: OpenWorkers | None = None
        self._rows: dict[frozenset[int], tuple[int, int]] = {}

    def share(self, owners: Sequence[PartitionOwner], *, horizon_s: float = 0.0, alone: bool = False) -> None:
        """From now on work goes to `owners` alone, by what each does; to all partitions alike if there are none. See `allowances`.

        Where two claim a partition, the later one has it.
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

    def observe(self, work: Mapping[int, PartitionWork]) -> None:
        """What the cluster says now. Offsets never go back: an answer older than what an acknowledgement told is not believed."""
        with self._lock:
            self._open = None
            for partition, seen in work.items():
                self._first_open[partition] = max(self._first_open[partition], seen.first_open)
                self._end[partition] = max(self._end[partition], seen.end)

    def choose(self) -> int | None:
        """The partition for the next request, counted as on its way until `acknowledged` or `failed`; None while all are full.

        Among equals it goes round, so that idle workers all get work. A known worker gets several records in a row in one partition.
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
        """The chosen request is in the log."""
        with self._lock:
            self._in_flight[partition] -= 1
            self._end[partition] = max(self._end[partition], offset + 1)

    def failed(self, partition: int) -> None:
        """The chosen request was not written."""
        with self._lock:
            self._open = None
            self._in_flight[partition] -= 1

    def follow(self, partition: int, receipt: Receipt) -> None:
        """Settle a chosen partition when its receipt is settled."""

        def settled(done: Receipt) -> None:
            if done.where is None:
                self.failed(partition)
            else:
                self.acknowledged(partition, done.where.offset)

        receipt.on_done(settled)

    @property
    def outstanding(self) -> int:
        """Requests that nobody has finished, those on their way included."""
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
        """The least lag first; among equals the one that comes round next."""
        return self._lag(partition), (partition - self._next) % len(self._end)

    def _lag(self, partition: int) -> int:
        return max(0, self._end[partition] - self._first_open[partition]) + self._in_flight[partition]


WORKERS_GROUP = "worker"
"""The group that shares the requests."""


class WorkObserver:
    """Reads committed and end offsets of one group on one topic. Not thread-safe; `close` it."""

    def __init__(self, cluster: Cluster, *, physical: str, group: str, client_id: str) -> None:
        """`group` is the *workers'* group; nothing here joins it, commits or assigns."""
        self._physical = physical
        self._group = group
        self._consumer = open_asker(cluster, group, client_id)

    def num_partitions(self, timeout_s: float = 10.0) -> int:
        """Raises TopicMissing."""
        return num_partitions(self._consumer, self._physical, timeout_s)

    def observe(self, count: int, timeout_s: float = 10.0) -> dict[int, PartitionWork]:
        """The work of partitions 0 to `count`. One of which nothing was ever committed counts from its beginning, where workers will start.

        Blocks for one request to the group's coordinator and two per leader. Raises ClusterUnreachable, NotAuthorized.
        """
        committed = self.committed(count, timeout_s)
        bounds = watermarks(self._consumer, [(self._physical, partition) for partition in range(count)], timeout_s)
        return {
            partition: PartitionWork(first_open=max(low, committed.get(partition, OFFSET_INVALID)), end=high)
            for (_, partition), (low, high) in bounds.items()
        }

    def committed(self, count: int, timeout_s: float = 10.0) -> dict[int, int]:
        """The offsets that the group committed in partitions 0 to `count`, without those in which it committed nothing.

        One request to the group's coordinator. Raises ClusterUnreachable, NotAuthorized.
        """
        places = [(self._physical, partition) for partition in range(count)]
        return {partition: offset for (_, partition), offset in committed_offsets(self._consumer, self._group, places, timeout_s).items()}

    def close(self) -> None:
        """Close the client."""
        self._consumer.close()
