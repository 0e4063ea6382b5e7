"""A consumer with the methods of confluent_kafka.Consumer: positions, groups, pause, seek, isolation. One thread polls."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, OFFSET_INVALID, OFFSET_STORED, KafkaError, KafkaException, TopicPartition

from echo_bus.client.cluster import AssignmentCallback, RawMessage
from echo_memory.broker import Broker
from echo_memory.groups import Member, Place
from echo_memory.log import PartitionLog
from echo_memory.message import MemoryMessage
from echo_memory.metadata import cluster_metadata

_POLL_STEP_S = 0.05


class MemoryConsumer:
    """See `cluster.RawConsumer`."""

    def __init__(self, broker: Broker, config: Mapping[str, Any]) -> None:
        self._broker = broker
        self._group_id = str(config.get("group.id", ""))
        self._reset = str(config.get("auto.offset.reset", "latest"))
        self._committed_only = config.get("isolation.level", "read_committed") == "read_committed"
        strategy = str(config.get("partition.assignment.strategy", "range"))
        self._cooperative = "cooperative" in strategy or config.get("group.protocol") == "consumer"
        self._member: Member | None = None
        self._callbacks: tuple[AssignmentCallback | None, ...] = (None, None, None)
        self._positions: dict[Place, int] = {}
        self._paused: set[Place] = set()
        self._failed: set[Place] = set()
        self._announce_ends = str(config.get("enable.partition.eof", False)).lower() == "true"
        self._announced: dict[Place, int] = {}
        self._turn = 0
        self._callback_assigned = False
        self._on_commit: Callable[[KafkaError | None, list[TopicPartition]], None] | None = config.get("on_commit")
        self._unanswered: deque[list[TopicPartition]] = deque()
        self._closed = False

    # Assignment

    def subscribe(
        self,
        topics: list[str],
        on_assign: AssignmentCallback | None = None,
        on_revoke: AssignmentCallback | None = None,
        on_lost: AssignmentCallback | None = None,
    ) -> None:
        self._broker.enter("subscribe")
        self._callbacks = (on_assign, on_revoke, on_lost)
        with self._broker.lock:
            self._member = Member(list(topics), self._cooperative)
            group = self._broker.group(self._group_id)
            group.join(self._member)
            self._broker.changed.notify_all()

    def assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.lock:
            self._positions.clear()
            self._failed.clear()
            self.incremental_assign(partitions)

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        with self._broker.lock:
            self._callback_assigned = True
            for partition in partitions:
                self._positions[_place(partition)] = self._resolve(partition)
                self._announced.pop(_place(partition), None)
            self._broker.changed.notify_all()

    def incremental_unassign(self, partitions: list[TopicPartition]) -> None:
        """A paused partition stays paused, as in librdkafka (confluent-kafka-go#193)."""
        with self._broker.lock:
            for partition in partitions:
                self._positions.pop(_place(partition), None)
                self._failed.discard(_place(partition))

    def unassign(self) -> None:
        self.assign([])

    def assignment(self) -> list[TopicPartition]:
        with self._broker.lock:
            return [TopicPartition(*place) for place in sorted(self._positions)]

    # Reading

    def poll(self, timeout: float = -1) -> RawMessage | None:
        found = self._take(1, timeout)
        return found[0] if found else None

    def consume(self, num_messages: int = 1, timeout: float = -1) -> Sequence[RawMessage]:
        return self._take(num_messages, timeout)

    def pause(self, partitions: list[TopicPartition]) -> None:
        with self._broker.lock:
            self._paused.update(_place(partition) for partition in partitions)

    def resume(self, partitions: list[TopicPartition]) -> None:
        with self._broker.lock:
            self._paused.difference_update(_place(partition) for partition in partitions)
            self._broker.changed.notify_all()

    def seek(self, partition: TopicPartition) -> None:
        with self._broker.lock:
            place = _place(partition)
            if place not in self._positions:
                raise KafkaException(KafkaError(KafkaError._STATE, "Local: Erroneous state"))  # noqa: SLF001  public in librdkafka
            self._failed.discard(place)
            self._positions[place] = self._resolve(partition)
            self._announced.pop(place, None)
            self._broker.changed.notify_all()

    # Offsets

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool = True) -> list[TopicPartition] | None:
        self._broker.enter("commit")
        with self._broker.lock:
            if self._member is not None and self._member.expelled:
                raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))
            committed = self._broker.group(self._group_id).committed
            for partition in offsets:
                committed[_place(partition)] = (partition.offset, partition.metadata or "")
            if asynchronous and self._on_commit is not None:
                self._unanswered.append(list(offsets))
            self._broker.changed.notify_all()
        return None if asynchronous else list(offsets)

    def consumer_group_metadata(self) -> Any:
        return self._group_id

    def committed(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        with self._broker.lock:
            committed = self._broker.group(self._group_id).committed
            return [
                TopicPartition(partition.topic, partition.partition, *committed.get(_place(partition), (OFFSET_INVALID, "")))
                for partition in partitions
            ]

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        with self._broker.lock:
            return [
                TopicPartition(partition.topic, partition.partition, self._positions.get(_place(partition), OFFSET_INVALID))
                for partition in partitions
            ]

    def get_watermark_offsets(self, partition: TopicPartition, timeout: float = -1, cached: bool = False) -> tuple[int, int] | None:
        self._broker.enter("get_watermark_offsets")
        with self._broker.lock:
            log = self._log(_place(partition))
            return log.start, log.end

    def offsets_for_times(self, partitions: list[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        self._broker.enter("offsets_for_times")
        with self._broker.lock:
            found = []
            for partition in partitions:
                log = self._log(_place(partition))
                ends = {OFFSET_BEGINNING: log.start, OFFSET_END: log.end}
                offset = ends[partition.offset] if partition.offset in ends else log.offset_at(partition.offset)
                found.append(TopicPartition(partition.topic, partition.partition, OFFSET_END if offset is None else offset))
            return found

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        self._broker.enter("list_topics")
        return cluster_metadata(self._broker, topic)

    def unsubscribe(self) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        self._give_up(set(member.owned), lost=member.expelled)
        with self._broker.lock:
            if not member.expelled:
                self._broker.group(self._group_id).leave(member)
            self._broker.changed.notify_all()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.unsubscribe()

    def expire_session(self) -> None:
        """For tests: end this member's session, as after missing heartbeats."""
        with self._broker.lock:
            if self._member is not None:
                self._broker.group(self._group_id).expel(self._member)
                self._broker.changed.notify_all()

    # Private

    def _take(self, most: int, timeout: float) -> list[RawMessage]:
        """Up to `most` messages; like librdkafka's `consume`, waits for the whole timeout unless it has them all."""
        if self._closed:
            raise RuntimeError("Consumer closed")
        self._broker.enter("poll")
        until_s = None if timeout < 0 else time.monotonic() + timeout
        taken: list[RawMessage] = []
        while True:
            while self._unanswered and self._on_commit is not None:
                self._on_commit(None, self._unanswered.popleft())
            self._follow_group()
            with self._broker.lock:
                taken += self._read(most - len(taken))
                if len(taken) >= most:
                    return taken
                left = _POLL_STEP_S if until_s is None else until_s - time.monotonic()
                if left <= 0:
                    return taken
                self._broker.changed.wait(min(left, _POLL_STEP_S))

    def _read(self, most: int) -> list[RawMessage]:
        taken: list[RawMessage] = []
        places = sorted(self._positions)
        # Each poll starts at another partition, so that all partitions get their turn.
        self._turn += 1
        for place in places[self._turn % len(places) :] + places[: self._turn % len(places)] if places else []:
            if len(taken) >= most:
                break
            if place in self._paused or place in self._failed:
                continue
            log = self._broker.partition(*place)
            if log is None:
                self._failed.add(place)
                taken.append(MemoryMessage(*place, None, _error=KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
                continue
            problem = self._check_range(place, log)
            if problem is not None:
                taken.append(problem)
                continue
            taken += self._read_partition(place, log, most - len(taken))
        return taken

    def _read_partition(self, place: Place, log: PartitionLog, most: int) -> list[RawMessage]:
        taken: list[RawMessage] = []
        for record in log.read(self._positions[place], committed=self._committed_only):
            if len(taken) >= most:
                return taken
            taken.append(record.message(*place))
            self._positions[place] = record.offset + 1
        if len(taken) < most:
            end = self._positions[place] = log.next_readable(self._positions[place], committed=self._committed_only)
            if self._announce_ends and self._announced.get(place) != end:
                self._announced[place] = end
                taken.append(MemoryMessage(*place, end, _error=KafkaError(KafkaError._PARTITION_EOF)))  # noqa: SLF001  public in librdkafka
        return taken

    def _check_range(self, place: Place, log: PartitionLog) -> MemoryMessage | None:
        """Apply auto.offset.reset to a position outside the log."""
        if log.start <= self._positions[place] <= log.end:
            return None
        if self._reset == "error":
            self._failed.add(place)
            error = KafkaError(KafkaError._AUTO_OFFSET_RESET, "fetch failed due to requested offset not available on the broker")  # noqa: SLF001  public in librdkafka
            return MemoryMessage(*place, self._positions[place], _error=error)
        self._positions[place] = log.start if self._reset in {"earliest", "smallest", "beginning"} else log.end
        return None

    def _resolve(self, partition: TopicPartition) -> int:
        """A logical offset (beginning, end, stored) as a number; -1 without a stored offset if auto.offset.reset is error."""
        log = self._broker.partition(partition.topic, partition.partition)
        start, end = (log.start, log.end) if log is not None else (0, 0)
        if partition.offset >= 0:
            return int(partition.offset)
        if partition.offset == OFFSET_BEGINNING:
            return start
        if partition.offset == OFFSET_END:
            return end
        if partition.offset in {OFFSET_INVALID, OFFSET_STORED}:
            stored = self._broker.group(self._group_id).committed.get(_place(partition))
            if stored is not None:
                return stored[0]
            if self._reset == "error":
                return -1
        return start if self._reset in {"earliest", "smallest", "beginning"} else end

    def _log(self, place: Place) -> PartitionLog:
        log = self._broker.partition(*place)
        if log is None:
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, "Local: Unknown partition"))  # noqa: SLF001  public in librdkafka
        return log

    def _follow_group(self) -> None:
        """Give up and take partitions as the group assigns them. Runs the callbacks on the polling thread, without the lock."""
        member = self._member
        if member is None:
            return
        group = self._broker.group(self._group_id)
        with self._broker.lock:
            revoked = group.to_revoke(member)
        if revoked or member.expelled:
            self._give_up(revoked, lost=member.expelled)
        with self._broker.lock:
            if member.expelled:
                member.expelled = False
                group.join(member)
            member.generation = group.generation
            gained = group.to_assign(member)
            member.owned |= gained
            if revoked or gained:
                self._broker.changed.notify_all()
        if gained:
            self._take_on(gained)

    def _give_up(self, places: set[Place], *, lost: bool) -> None:
        _, on_revoke, on_lost = self._callbacks
        partitions = [TopicPartition(*place) for place in sorted(places)]
        callback = on_lost or on_revoke if lost else on_revoke
        if partitions and callback is not None:
            callback(self, partitions)
        with self._broker.lock:
            self.incremental_unassign(partitions)
            if self._member is not None:
                self._member.owned -= places
            self._broker.changed.notify_all()

    def _take_on(self, places: set[Place]) -> None:
        on_assign = self._callbacks[0]
        partitions = [TopicPartition(*place) for place in sorted(places)]
        self._callback_assigned = False
        if on_assign is not None:
            on_assign(self, partitions)
        if not self._callback_assigned:
            self.incremental_assign(partitions)


def _place(partition: TopicPartition) -> Place:
    return partition.topic, partition.partition
