"""The consumer loop: delivers a group's messages to a handler, at least once, with bounded memory; the poll thread never waits for work.

    run()    the caller's thread polls: fetches, hands over, pauses, commits, answers rebalances
    worker   the loop's own thread decodes and calls the handler (worker.py)
    stop()   any thread, or a signal handler: drains, commits, leaves the group

Back-pressure: while the hand-over is full the poll thread waits a moment for room, because the client drops what it has fetched when it is
paused. If the worker needs longer, the poll thread pauses all partitions and goes on polling, so that the group keeps the member.
The loop commits explicitly, for each partition the first offset whose work is not done.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo_bus.client.cluster import Cluster, RawConsumer
from echo_bus.client.consumer_queries import num_partitions
from echo_bus.client.kafka_errors import check_error
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Deadline
from echo_bus.dead_letters import DeadLetters
from echo_bus.errors import MemberReplaced, TransportError
from echo_bus.group.notes import NoteKeeper, Notes
from echo_bus.group.replacements import Replacements
from echo_bus.group.state import (
    FetchedBatch,
    Handover,
    LoopLimits,
    PartitionKey,
    PartitionState,
    Reopened,
    Signal,
    TopicCounters,
    count_read,
)
from echo_bus.group.worker import LoopWorker
from echo_bus.message import Handler
from echo_bus.reading.decoding import Decoder
from echo_bus.wire import Wire
from echo_schemas.topics import Topic

logger = logging.getLogger(__name__)

# A poll returns at once if a message is there; requests of the worker and `stop` wait this long at most.
_POLL_S = 0.1
# Wait for room in the hand-over before the partitions are paused: after a pause the client must fetch its queue again.
_ROOM_S = 0.2
_METADATA_S = 10.0
_LAG_INTERVAL_S = 5.0
# For telling the group that a static member leaves; without it the partitions wait for the end of the session.
_LEAVE_S = 2.0
# While partitions move the group refuses commits of the members before.
_REBALANCING = frozenset({KafkaError.REBALANCE_IN_PROGRESS, KafkaError.ILLEGAL_GENERATION})
# A commit for every message would cost the broker more than the message.
_SOON_S = 0.05


class ConsumerLoop:
    """Reads topics as a member of a group until `stop`. One use only."""

    def __init__(
        self,
        cluster: Cluster,
        wire: Wire,
        topics: Sequence[Topic],
        handler: Handler,
        *,
        properties: Mapping[str, Any],
        dead_letters: Publisher,
        limits: LoopLimits | None = None,
    ) -> None:
        """`properties` are from `group_properties`. Nothing is opened before `run`."""
        self._cluster = cluster
        self._topics = {wire.namespace.topic(topic): topic for topic in topics}
        self._properties = dict(properties)
        self._group = str(properties["group.id"])
        self._metrics, self._clock = wire.metrics, wire.clock
        self._limits = limits or LoopLimits()
        self._on_assignment: Callable[[frozenset[PartitionKey]], None] = lambda keys: None
        self._decoder = Decoder(wire, topics)
        self._handover = Handover(max_messages=self._limits.max_queued_messages, max_bytes=self._limits.max_queued_bytes)
        self._worker = LoopWorker(
            wire, handler, self._decoder, DeadLetters(dead_letters, wire, self._group), handover=self._handover, limits=self._limits
        )
        self._counters = {physical: TopicCounters(wire.metrics, physical) for physical in self._topics}
        self._keeper = NoteKeeper()
        self._assignment: dict[PartitionKey, PartitionState] = {}
        self._stopped = threading.Event()
        self._handed_back = threading.Event()
        self._all_paused = False
        self._next_commit_s = self._next_lag_s = self._committed_s = 0.0
        self._replacements = Replacements(self._clock)

    def on_assignment(self, listener: Callable[[frozenset[PartitionKey]], None]) -> None:
        """Call `listener` with this member's (physical topic, partition)s at each change, on the poll thread: it must be short.

        Call this before `run`; the last listener counts.
        """
        self._on_assignment = listener

    def keep_notes(self, notes: Notes) -> None:
        """Commit the notes of `notes` beside the offsets. For a loop of one topic; call this before `run`."""
        self._keeper.notes = notes

    def commit_soon(self) -> None:
        """Commit at the next poll, but not sooner than 0.05 s after the last commit. Any thread."""
        self._next_commit_s = min(self._next_commit_s, self._committed_s + _SOON_S)

    def offer_again(self) -> None:
        """The handler has room: offer it the postponed messages at once. Any thread."""
        self._handover.give(Signal.ROOM)

    def stop(self) -> None:
        """Begin to drain: offer nothing more, finish what is in flight, commit, leave. Returns at once; `run` returns at the end."""
        self._stopped.set()

    def hand_back(self) -> None:
        """While draining: do not wait for messages in flight; they are delivered again. Any thread."""
        self._handed_back.set()

    def run(self) -> None:
        """Consume until `stop`. Blocks.

        Raises what the handler raised, TooManyDeadLetters, DeliveryFailed for a dead letter, TopicMissing, NotAuthorized,
        ClusterUnreachable, OffsetLost, MemberReplaced or another TransportError. Finished work is committed in every case.
        """
        consumer = self._new_consumer()
        try:
            self._learn_partition_counts(consumer, must_exist=True)
            self._join(consumer)
            self._worker.start()
            try:
                while not self._stopped.is_set() and not self._worker.ended:
                    try:
                        self._step(consumer)
                    except MemberReplaced as exc:
                        self._give_way(consumer, exc)
                        consumer.close()
                        consumer = self._new_consumer()
                        self._join(consumer)
            finally:
                self._drain(consumer)
                self._leave(consumer)
        finally:
            consumer.close()
        if self._worker.error is not None:
            raise self._worker.error

    def _new_consumer(self) -> RawConsumer:
        return self._cluster.consumer({**self._properties, "on_commit": self._on_commit})

    def _join(self, consumer: RawConsumer) -> None:
        consumer.subscribe(list(self._topics), on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)

    def _give_way(self, consumer: RawConsumer, why: MemberReplaced) -> None:
        """Give up all partitions, to join again. Raises `why` if this member was replaced too often lately.

        Of two processes under one name the earlier one reaches the limit first, because it was replaced first.
        """
        if self._replacements.add():
            raise why
        logger.warning("%s: %s It joins once more.", self._group, why)
        self._on_lost(consumer, [_partition_of(state) for state in self._assignment.values()])

    def _step(self, consumer: RawConsumer) -> None:
        """One round of the poll thread; blocks for a fraction of a second at most."""
        self._answer_requests(consumer)
        self._commit_if_due(consumer)
        self._balance(consumer)
        first = consumer.poll(_POLL_S)
        if first is None:
            return
        fetched = [first, *consumer.consume(max(1, min(self._limits.batch_size, self._handover.room()) - 1), 0)]
        messages = []
        for raw in fetched:
            error = raw.error()
            if error is None:
                messages.append(raw)
            else:
                check_error(error, raw, self._group)
        if messages:
            self._handover.give(FetchedBatch(self._assignment, messages, count_read(self._counters, messages)))

    def _balance(self, consumer: RawConsumer) -> None:
        """Pause all partitions while the worker is far behind."""
        if not self._all_paused:
            if self._handover.room() == 0 and not self._handover.wait_for_room(_ROOM_S):
                self._all_paused = True
                logger.debug("%s: %d messages queued, pausing", self._group, self._handover.num_messages)
        elif self._handover.is_half_empty():
            self._all_paused = False
            consumer.resume([_partition_of(state) for state in self._assignment.values() if not state.paused])
        if self._all_paused:
            # In each round, because newly assigned partitions are not paused.
            consumer.pause([_partition_of(state) for state in self._assignment.values()])

    def _answer_requests(self, consumer: RawConsumer) -> None:
        """Pause partitions in which too many messages wait; resume those of which all that waited are accepted."""
        requests = self._worker.requests
        while requests:
            request = requests.popleft()
            state = request.state
            if self._assignment.get(state.key) is not state:
                continue
            try:
                if request.seek_to is None:
                    if not state.paused:
                        consumer.pause([_partition_of(state)])
                        state.paused = True
                        state.counters.paused.inc()
                    continue
                topic, partition = state.key
                consumer.seek(TopicPartition(topic, partition, request.seek_to))
                if not self._all_paused:
                    consumer.resume([_partition_of(state)])
            except KafkaException as exc:
                # The client cannot seek before its fetcher runs; the next round tries again.
                logger.debug("%s: a pause or resume of %s has to wait: %s", self._group, state.key, exc)
                requests.appendleft(request)
                return
            state.paused = False
            state.counters.paused.dec()
            self._handover.give(Reopened(state))

    def _commit_if_due(self, consumer: RawConsumer) -> None:
        now_s = self._clock.monotonic_s()
        if now_s >= self._next_commit_s:
            self._committed_s, self._next_commit_s = now_s, now_s + self._limits.commit_interval_s
            self._commit(consumer, self._assignment.values(), wait=False)
        if now_s >= self._next_lag_s:
            self._next_lag_s = now_s + _LAG_INTERVAL_S
            self._report(consumer)

    def _commit(self, consumer: RawConsumer, states: Any, *, wait: bool, leaving: bool = False) -> None:
        """Commit offsets that have changed. The next commit repeats a failed one; until then a restart would only repeat work."""
        moved: list[tuple[PartitionState, int, str]] = []
        for state in states:
            offset = state.tracker.committable()
            if offset is None:
                continue
            note = self._keeper.write(state.key[1], offset, leaving=leaving)
            if (offset, note) != state.requested:
                moved.append((state, offset, note))
        if not moved:
            return
        try:
            consumer.commit(offsets=[TopicPartition(*state.key, offset, note) for state, offset, note in moved], asynchronous=not wait)
        except KafkaException as exc:
            self._metrics.commits.labels(self._group, "failed").inc()
            logger.warning("%s: offsets were not committed: %s", self._group, exc.args[0].str())
            return
        for state, offset, note in moved:
            state.requested = (offset, note)
        noted = [(state.key[1], note) for state, _, note in moved]
        if wait:
            self._metrics.commits.labels(self._group, "committed").inc()
            self._keeper.confirm(noted)
        else:
            self._keeper.sent(noted)

    def _on_commit(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        """The result of an asynchronous commit; called inside poll."""
        accepted = error is None and all(partition.error is None for partition in partitions)
        self._keeper.answered(accepted=accepted)
        if accepted:
            self._metrics.commits.labels(self._group, "committed").inc()
            return
        self._metrics.commits.labels(self._group, "failed").inc()
        why = error or next(partition.error for partition in partitions if partition.error is not None)
        level = logging.INFO if why.code() in _REBALANCING else logging.WARNING
        logger.log(level, "%s: offsets were not committed, the next commit repeats them: %s: %s", self._group, why.name(), why.str())
        for partition in partitions:
            state = self._assignment.get((partition.topic, partition.partition))
            if state is not None:
                state.requested = None

    def _on_assign(self, consumer: RawConsumer, partitions: list[TopicPartition]) -> None:
        """Called inside poll; the client completes the assignment itself."""
        self._metrics.rebalances.labels(self._group, "assigned").inc()
        # A partition that this client had paused when it was taken away is still paused.
        consumer.resume(partitions)
        self._learn_partition_counts(consumer, must_exist=False)
        self._keeper.read(consumer, partitions)
        assignment = dict(self._assignment)
        for partition in partitions:
            key = (partition.topic, partition.partition)
            counters = self._counters[partition.topic]
            assignment[key] = PartitionState(key, self._topics[partition.topic], counters, self._worker.in_flight)
            counters.assigned.inc()
        self._assignment = assignment
        self._on_assignment(frozenset(assignment))
        logger.info("%s: assigned %s", self._group, [f"{p.topic}[{p.partition}]" for p in partitions])

    def _on_revoke(self, consumer: RawConsumer, partitions: list[TopicPartition]) -> None:
        """Called inside poll: finished work is committed before the next owner starts."""
        self._metrics.rebalances.labels(self._group, "revoked").inc()
        self._take_away(partitions, consumer)

    def _on_lost(self, consumer: RawConsumer, partitions: list[TopicPartition]) -> None:
        """Called inside poll: the partitions have another owner already, so there is nothing to commit."""
        del consumer
        self._metrics.rebalances.labels(self._group, "lost").inc()
        self._take_away(partitions, None)

    def _take_away(self, partitions: list[TopicPartition], consumer: RawConsumer | None) -> None:
        """Close the partitions' states; commits first if there is a `consumer`."""
        assignment = dict(self._assignment)
        keys = [(partition.topic, partition.partition) for partition in partitions]
        states = [assignment.pop(key) for key in keys if key in assignment]
        for state in states:
            state.closed = True
        if consumer is not None:
            self._commit(consumer, states, wait=True, leaving=True)
        num_handed_back = 0
        for state in states:
            num_held = state.tracker.close()
            self._worker.in_flight.subtract(num_held)
            num_handed_back += num_held
            state.counters.assigned.dec()
            if state.paused:
                state.counters.paused.dec()
            self._metrics.lag.remove(*state.key)
        self._assignment = assignment
        self._on_assignment(frozenset(assignment))
        logger.info("%s: gave up %s, %d messages unfinished", self._group, [f"{topic}[{n}]" for topic, n in keys], num_handed_back)

    def _learn_partition_counts(self, consumer: RawConsumer, *, must_exist: bool) -> None:
        """Tell the decoder how many partitions keyed topics have. With `must_exist`, raises as `num_partitions` for any topic."""
        counts = {}
        for physical in self._topics if must_exist else self._decoder.topics_with_placement:
            try:
                counts[physical] = num_partitions(consumer, physical, _METADATA_S)
            except TransportError as exc:
                if must_exist:
                    raise
                logger.warning("%s: the partitions of %s are not known: %s", self._group, physical, exc.message)
                return
        self._decoder.set_num_partitions(counts)

    def _report(self, consumer: RawConsumer) -> None:
        """Set the gauges: lag by the end offsets that the client knows, and messages in flight."""
        held = dict.fromkeys(self._topics, 0)
        for (physical, partition), state in self._assignment.items():
            held[physical] += state.tracker.num_held
            next_offset = state.tracker.committable()
            ends = consumer.get_watermark_offsets(TopicPartition(physical, partition), cached=True)
            if next_offset is not None and ends is not None and ends[1] >= 0:
                self._metrics.lag.labels(physical, partition).set(max(0, ends[1] - next_offset))
        for physical, num_held in held.items():
            self._counters[physical].in_flight.set(num_held)

    def _drain(self, consumer: RawConsumer) -> None:
        """Finish or hand back, then commit. Goes on polling, to answer a rebalance."""
        self._worker.stop()
        deadline = Deadline.after(self._limits.drain_s)
        while not self._is_drained() and not deadline.expired():
            consumer.pause([_partition_of(state) for state in self._assignment.values()])
            consumer.poll(_POLL_S)
        if not self._worker.join(0):
            logger.warning("%s: the handler did not return within %g s; its message is handed back", self._group, self._limits.drain_s)
        self._commit(consumer, self._assignment.values(), wait=True)
        self._report(consumer)
        logger.info("%s: left with %d fetched messages handed back", self._group, self._handover.num_messages)

    def _leave(self, consumer: RawConsumer) -> None:
        """Leave the group. For a static member closing is not enough: its partitions would wait until its session ends."""
        if "group.instance.id" not in self._properties:
            return
        try:
            consumer.unsubscribe()
            deadline = Deadline.after(_LEAVE_S)
            while self._assignment and not deadline.expired():
                consumer.poll(_POLL_S)
        except KafkaException as exc:
            logger.info("%s: could not tell the group that it leaves: %s", self._group, exc.args[0].str())

    def _is_drained(self) -> bool:
        """Whether the drain is over. After a failure it does not wait: the cause may prevent the other messages from finishing."""
        if not self._worker.join(0):
            return False
        return self._worker.error is not None or self._handed_back.is_set() or self._worker.in_flight.count == 0


def _partition_of(state: PartitionState) -> TopicPartition:
    return TopicPartition(*state.key)
