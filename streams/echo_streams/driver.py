"""Faust's Kafka driver (aiokafka), changed for trajectories: shorter waits for empty partitions and frozen brokers, less CPU a message.

Threads: the consumer's client fetches and sends heartbeats on a thread of its own; everything else is on the app's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import faust
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.consumer import fetcher
from faust.sensors import Monitor
from faust.transport.drivers import aiokafka as driver
from mode.services import WaitResults

from echo_bus.client.profiles import GATHERING_WAIT_MS
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
        _watch_quota(consumer._client, "consumer", cast("App", transport.app))  # noqa: SLF001  see above
        return consumer


class Consumer(driver.Consumer):
    """Hands a message on without making four tasks for it."""

    def _new_consumer_thread(self) -> ConsumerThread:
        return ConsumerThread(self, loop=self.loop, beacon=self.beacon)

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
    """Tries another broker after `PRODUCE_ANSWER_MS` without an answer."""

    def _new_producer(self, transactional_id: str | None = None) -> AIOKafkaProducer:
        producer = super()._new_producer(transactional_id)
        # aiokafka has one setting for a request and for a batch, twenty minutes in Faust: a frozen broker would hold all rewards so long.
        producer.client._request_timeout_ms = PRODUCE_ANSWER_MS  # noqa: SLF001  see above
        _watch_quota(producer.client, "producer", cast("App", self.app))
        return producer


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

    def _create_directories(self) -> None:
        pass


def _watch_quota(client: Any, kind: str, app: App) -> None:
    """Tell `app` when an answer to `client` says that a quota holds it back, which aiokafka ignores."""
    send = client.send

    async def watched(*args: Any, **options: Any) -> Any:
        answer = await send(*args, **options)
        if held_ms := getattr(answer, "throttle_time_ms", 0):
            app.on_throttle(kind, held_ms / 1000)
        return answer

    client.send = watched


class QuietMonitor(Monitor):
    """Counts nothing per message: we have our own metrics."""

    def on_message_in(self, *_: Any, **__: Any) -> None:
        """Of a message, and of the events of a stream."""

    on_stream_event_in = on_stream_event_out = on_message_out = on_message_in
