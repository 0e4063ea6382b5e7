"""Faust's Kafka driver (aiokafka), changed for trajectories: shorter waits for empty partitions and frozen brokers, less CPU a message, and
static members (KIP-345) that leave when they end.

Threads: the consumer's client fetches and sends heartbeats on a thread of its own; everything else is on the app's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, cast

import faust
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.consumer import fetcher
from aiokafka.errors import UnknownMemberIdError
from aiokafka.protocol.commit import OffsetCommitRequest
from confluent_kafka import KafkaError
from faust import tables
from faust.sensors import Monitor
from faust.transport.consumer import ensure_TPset
from faust.transport.drivers import aiokafka as driver
from mode.services import WaitResults

from echo_bus.client.kafka_errors import replaced
from echo_bus.client.profiles import GATHERING_WAIT_MS
from echo_bus.clock import SystemClock
from echo_bus.group.replacements import Replacements
from echo_schemas.headers import Header
from echo_streams.eager import Ended, start
from echo_streams.lenient_records import LenientRecords

# aiokafka has one fetch per broker under way, which asks only for partitions whose records are all handed on. While it waits for an empty
# partition, the others' new records wait too: 1.5 s in Faust's setting, the age of a whole batch of trajectories.
FETCH_WAIT_MS = GATHERING_WAIT_MS
# As `request.timeout.ms` of our other producers. A batch that is therefore sent twice makes duplicate rewards, which the learner ignores.
PRODUCE_ANSWER_MS = 4_000


# The fetcher has no setting for this; without it one malformed header would stop the application at each start.
fetcher.MemoryRecords = LenientRecords


class ConsumerThread(driver.AIOKafkaConsumerThread):
    """Reads only committed records, as our other consumers do: Faust's own would score aborted trajectories."""

    def _create_worker_consumer(self, transport: driver.Transport) -> AIOKafkaConsumer:
        consumer = super()._create_worker_consumer(transport)
        # Faust has no settings for these; the fetcher reads them when the consumer starts.
        consumer._fetch_max_wait_ms = FETCH_WAIT_MS  # noqa: SLF001  see above
        consumer._fetch_min_bytes = cast("App", transport.app).fetch_min_bytes  # noqa: SLF001  see above
        consumer._isolation_level = "read_committed"  # noqa: SLF001  see above
        _watch_answers(consumer._client, "consumer", cast("App", transport.app))  # noqa: SLF001  see above
        return consumer

    def _stopped_set(self) -> None:
        """Without a stack in the log for a thread that has ended by itself, as that of a replaced member has."""
        if self.thread_loop.is_closed():
            self._stopped.set()
        else:
            super()._stopped_set()

    async def on_thread_stop(self) -> None:
        """Leave the group as well: aiokafka lets a static member's session run out, and its partitions wait."""
        if self._consumer is not None:
            self._consumer._coordinator._group_instance_id = None  # noqa: SLF001  see above
        await super().on_thread_stop()


class RebalanceListener(driver.ConsumerRebalanceListener):
    """Numbers the assignments, in place of their generations, and ends a static member whose name another process has.

    A member that was replaced and joins again has the generation that it had, and begins at the committed offsets once more.
    """

    def __init__(self, thread: ConsumerThread) -> None:
        super().__init__(thread)
        self._generation = -1
        self._replacements = Replacements(SystemClock())

    async def on_partitions_assigned(self, assigned: Iterable[Any]) -> None:
        app, consumer = cast("App", self._thread.app), self._thread._ensure_consumer()  # noqa: SLF001  see above
        coordinator = consumer._coordinator  # noqa: SLF001  see above
        generation, self._generation = self._generation, coordinator.generation
        name = coordinator._group_instance_id  # noqa: SLF001  see above
        if name is not None and generation == self._generation and self._replacements.add():
            app._crash(replaced(f"somebody else joins {coordinator.group_id} as {name}"))  # noqa: SLF001  without a stack in the log
            # Leave at once: of the two the other one goes on.
            coordinator._group_instance_id = None  # noqa: SLF001  see above
            consumer.unsubscribe()
            return
        app.consumer_generation_id += 1
        await self._thread.on_partitions_assigned(ensure_TPset(assigned), app.consumer_generation_id)


class Consumer(driver.Consumer):
    """Hands a message on without making four tasks for it."""

    RebalanceListener = RebalanceListener

    def _new_consumer_thread(self) -> ConsumerThread:
        return ConsumerThread(self, loop=self.loop, beacon=self.beacon)

    def verify_event_path(self, now: float, tp: Any) -> None:
        """Nothing: Faust counts events of a stream, which we pass by, and after five minutes it would report each moment's lag as a
        standstill. The learner says what waits for rewards, and the watch of the loop what holds it up."""

    async def wait_first(self, *coros: Any, timeout: Any = None) -> WaitResults:
        """As mode's, but without a task for a coroutine that ends without waiting, as nearly every hand-over of a message does (half
        the CPU of a trajectory, measured)."""
        first = coros[0]
        if timeout is not None or not asyncio.iscoroutine(first):
            return await super().wait_first(*coros, timeout=timeout)
        begun = start(first)
        if not isinstance(begun, Ended):
            return await super().wait_first(begun, *coros[1:])
        for other in coros[1:]:
            if asyncio.iscoroutine(other):
                other.close()
        return WaitResults([first], [begun.value], False)


class Producer(driver.Producer):
    """Tries another broker after `PRODUCE_ANSWER_MS` without an answer, and writes many records of a partition with one future."""

    async def send_batch(
        self, topic: str, partition: int, records: Iterable[tuple[bytes | None, bytes | None, list[Header]]]
    ) -> list[Awaitable[Any]]:
        """Begin to write (key, value, headers)s to one partition, in their order; returns their deliveries, one for each full batch.

        A record sent alone goes through five coroutines and has a future of its own, which takes longer than scoring it.
        """
        producer = self._ensure_producer()
        sent: list[Awaitable[Any]] = []
        batch = producer.create_batch()
        for key, value, headers in records:
            if batch.append(key=key, value=value, timestamp=None, headers=headers) is None:
                sent.append(await producer.send_batch(batch, topic, partition=partition))
                batch = producer.create_batch()
                # The first record of a batch is taken at any size.
                batch.append(key=key, value=value, timestamp=None, headers=headers)
        sent.append(await producer.send_batch(batch, topic, partition=partition))
        return sent

    def _new_producer(self, transactional_id: str | None = None) -> AIOKafkaProducer:
        producer = super()._new_producer(transactional_id)
        # aiokafka has one setting for a request and for a batch, twenty minutes in Faust: a frozen broker would hold all rewards so long.
        producer.client._request_timeout_ms = PRODUCE_ANSWER_MS  # noqa: SLF001  see above
        _watch_answers(producer.client, "producer", cast("App", self.app))
        return producer


class TableManager(tables.TableManager):
    """Starts at once. Faust's own waits a second for tables, of which there are none, before it joins the group."""

    async def on_start(self) -> None:
        await self._update_channels()
        await self.recovery.start()


class Transport(driver.Transport):
    """The value of `faust.App.transport`."""

    Consumer = Consumer
    Producer = Producer


class App(faust.App):
    """Makes no folders, which Faust uses for tables only."""

    fetch_min_bytes = 1
    """Bytes that a fetch waits for, `FETCH_WAIT_MS` at most."""
    on_throttle: Callable[[str, float], None] = staticmethod(lambda _kind, _seconds: None)
    """Called with the kind of client (`producer`, `consumer`) that a quota held back, and the seconds; on any thread."""
    on_commit: Callable[[bool], None] = staticmethod(lambda _is_accepted: None)
    """Called after each commit of offsets with whether the cluster accepted it; on any thread."""

    def _create_directories(self) -> None:
        pass

    def _init_fixups(self) -> list[Any]:
        """None: to look for the one that Django needs, Faust opens a file of every installed package."""
        return []


def _watch_answers(client: Any, kind: str, app: App) -> None:
    """Read what aiokafka does not say: that a quota holds `client` back and what became of a commit, which `app` is told, and that a static
    member was replaced, which aiokafka then takes for a member that the group has forgotten: it joins again.
    """
    send = client.send

    def read(answer: Any) -> Any:
        if held_ms := getattr(answer, "throttle_time_ms", 0):
            app.on_throttle(kind, held_ms / 1000)
        if getattr(answer, "error_code", 0) == KafkaError.FENCED_INSTANCE_ID:
            answer.error_code = UnknownMemberIdError.errno
        return answer

    async def watched(node: int, request: Any, **options: Any) -> Any:
        if not isinstance(request, OffsetCommitRequest):
            return read(await send(node, request, **options))
        is_accepted = False
        try:
            answer = read(await send(node, request, **options))
            is_accepted = not any(code for _, partitions in answer.topics for _, code in partitions)
        finally:
            app.on_commit(is_accepted)
        return answer

    client.send = watched


class QuietMonitor(Monitor):
    """Counts nothing per message: we have our own metrics."""

    def on_message_in(self, *_: Any, **__: Any) -> None:
        """Of a message, and of the events of a stream."""

    on_stream_event_in = on_stream_event_out = on_message_out = on_message_in
