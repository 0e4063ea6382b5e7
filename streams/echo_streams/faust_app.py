"""The Faust application around the processor: a group member that reads `trajectories` as raw bytes and writes what the processor answers.

    Faust agent ─▶ inbox (bounded) ─▶ batches, up to 4 at once: process ─▶ send ─▶ wait for delivery ─▶ acknowledge ─▶ Faust commits

An offset is acknowledged only after all that answers it is delivered, so a crash at any point repeats work and loses none. After a
rebalance, acknowledgements of the earlier generation are dropped: their partitions may be somebody else's, and are read again if not.

Threads: all of ours runs on the event loop that `run` is awaited on; Faust's client fetches and sends heartbeats on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faust
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError
from faust.exceptions import FaustError

from echo_bus.clock import Clock, Deadline
from echo_bus.cluster import RawMessage
from echo_bus.errors import ClusterUnreachable, DeadlineExceeded, NotAuthorized, TransportError
from echo_bus.places import PlaceTimes
from echo_bus.process import StopSignal
from echo_core.bottleneck import Place, Use
from echo_streams.driver import App, QuietMonitor, Transport
from echo_streams.metrics import StreamsMetrics
from echo_streams.preflight import not_allowed
from echo_streams.processing import Outgoing
from echo_streams.security import Login

logger = logging.getLogger(__name__)

Process = Callable[[Sequence[RawMessage]], Awaitable[list[Outgoing]]]

MAX_BATCH = 256
"""Trajectories scored and delivered together: large enough that a burst of 512 waits for two round trips, small enough to start early."""
MAX_IN_FLIGHT = 4 * MAX_BATCH
"""Trajectories in batches at once, so that a batch that waits (for the broker, for a slow judge) does not hold up the next."""
INBOX = 2 * MAX_BATCH
# How long the first trajectory of a batch waits for company: a fetch's records come one by one, and each batch costs the broker a
# request. While others are being scored or delivered, more company is worth waiting for: those requests go one after another.
_LINGER_S = 0.003
_LINGER_BUSY_S = 0.03
_COMMIT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_MEASURE_EVERY_S = 1.0
# As in echo_bus.profiles: a dead member is noticed in ten seconds.
_SESSION_S = 10.0
_HEARTBEAT_S = 1.0
_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Which group reads which topic where. `group` is Faust's app id; `joined_within_s`: how long joining it may take."""

    group: str
    client_id: str
    bootstrap: str
    topic: str
    login: Login
    joined_within_s: float = 60.0


class FaustMessage:
    """A Faust message in the words of confluent-kafka's, which the decoder and the dead letters speak."""

    __slots__ = ("_message",)

    def __init__(self, message: Any) -> None:
        self._message = message

    def topic(self) -> str | None:
        return str(self._message.topic)

    def partition(self) -> int | None:
        return int(self._message.partition)

    def offset(self) -> int | None:
        return int(self._message.offset)

    def key(self) -> bytes | None:
        key: bytes | None = self._message.key
        return key

    def value(self) -> bytes | None:
        value: bytes | None = self._message.value
        return value

    def headers(self) -> list[tuple[str, bytes]] | None:
        """Faust gives a list or a dictionary, according to its version and driver."""
        headers = self._message.headers
        return list(headers.items() if isinstance(headers, Mapping) else headers or ())

    def timestamp(self) -> tuple[int, int]:
        return int(self._message.timestamp_type or 0), int((self._message.timestamp or 0) * 1000)

    def error(self) -> None:
        return None

    def latency(self) -> float | None:
        return None

    def __len__(self) -> int:
        return len(self._message.value or b"")


class RewardApp:
    """One run of a Faust app. Made and run on one event loop; not to be run twice."""

    def __init__(self, options: AppOptions, process: Process, *, metrics: StreamsMetrics, places: PlaceTimes, clock: Clock) -> None:
        self._options = options
        self._process = process
        self._metrics = metrics
        self._places = places
        self._clock = clock
        self._inbox: deque[Any] = deque()
        self._moved = asyncio.Event()
        self._room = asyncio.Event()
        self._in_flight = 0
        self._handling: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self._draining = False
        self._done: dict[int, int] = {}
        self._app = _faust_app(options)
        source = self._app.topic(
            options.topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", allow_empty=True
        )
        self._app.agent(source, name=f"{options.group}.receive")(self._receive)

    @property
    def joined(self) -> bool:
        """Whether the group has let us in, with or without a partition."""
        return bool(self._app.consumer_generation_id)

    async def run(self, stop: StopSignal) -> None:
        """Read until `stop`, then finish what was read, commit, and leave the group.

        Raises NotAuthorized or DeadlineExceeded if the group is not joined in time, what the processor raises, and TransportError if
        Faust gave up.
        """
        joined_by = Deadline.after(self._options.joined_within_s, self._clock)
        batching = asyncio.create_task(self._batch(), name="batching")
        batching.add_done_callback(self._note_failure)
        measured_s = 0.0
        try:
            await self._app.start()
            while not stop.is_set() and self._failure is None and not self._app.crashed:
                if not self.joined and joined_by.expired():
                    raise DeadlineExceeded(
                        f"The consumer group {self._options.group!r} did not let us in within {self._options.joined_within_s:g} s.",
                        hint="Does the login have READ on the group and on the topic (`echoswarm acls render`)? Is a broker down?",
                    )
                if self._clock.monotonic_s() - measured_s >= _MEASURE_EVERY_S:
                    measured_s = self._clock.monotonic_s()
                    self._measure()
                await asyncio.sleep(_LOOK_EVERY_S)
            self._raise_failure()
            await self._drain()
        except (KafkaError, FaustError) as exc:
            raise self._explain(exc) from exc
        finally:
            batching.cancel()
            for task in self._handling:
                task.cancel()
            await self._app.stop()

    async def _receive(self, stream: Any) -> None:
        """The agent: events into the inbox, without acknowledging them. Once draining, they stay unread for the next member."""
        async for event in stream.noack().events():
            if self._draining:
                continue
            self._inbox.append(event)
            num_waiting = len(self._inbox)
            if num_waiting == 1 or num_waiting >= MAX_BATCH:
                self._moved.set()
            if num_waiting >= INBOX:
                self._room.clear()
                await self._room.wait()

    async def _batch(self) -> None:
        """Form batches: full ones at once, smaller ones when their first trajectory has waited long enough."""
        while True:
            with self._places.spent(Place.REWARD, Use.EMPTY):
                await self._until(lambda: bool(self._inbox))
                await self._until(self._is_full, _LINGER_S)
                await self._until(lambda: self._in_flight == 0 or self._is_full(), _LINGER_BUSY_S)
            with self._places.spent(Place.REWARD, Use.BLOCKED):
                await self._until(lambda: self._in_flight + MAX_BATCH <= MAX_IN_FLIGHT)
            batch = [self._inbox.popleft() for _ in range(min(MAX_BATCH, len(self._inbox)))]
            self._room.set()
            self._in_flight += len(batch)
            task = asyncio.create_task(self._handle(batch), name="reward batch")
            self._handling.add(task)
            task.add_done_callback(functools.partial(self._end_of_batch, len(batch)))
            # So that the batch starts now, also while the inbox never runs empty.
            await asyncio.sleep(0)

    def _is_full(self) -> bool:
        return len(self._inbox) >= MAX_BATCH

    async def _until(self, condition: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait for `condition`, which arrivals and ends of batches may change; at most `limit_s`."""
        if condition():
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._moved.clear()
                    await self._moved.wait()

    async def _handle(self, batch: list[Any]) -> None:
        """Score one batch, deliver the rewards, and only then acknowledge it."""
        with self._metrics.in_flight.track_inprogress():
            started_s = self._clock.monotonic_s()
            answers = await self._process([FaustMessage(event.message) for event in batch])
            self._places.add(Place.REWARD, Use.BUSY, self._clock.monotonic_s() - started_s)
            send = self._app.producer.send
            deliveries = [await send(answer.topic, answer.key, answer.value, answer.partition, None, answer.headers) for answer in answers]
            if deliveries:
                await asyncio.gather(*deliveries)
        generation = self._app.consumer_generation_id
        for event in batch:
            message = event.message
            if message.generation_id == generation:
                event.ack()
                self._done[message.partition] = max(self._done.get(message.partition, -1), message.offset)
        self._metrics.trajectories.inc(len(batch))
        self._metrics.batches.inc()

    def _end_of_batch(self, num_trajectories: int, task: asyncio.Task[None]) -> None:
        self._handling.discard(task)
        self._in_flight -= num_trajectories
        self._moved.set()
        self._note_failure(task)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None and self._failure is None:
            self._failure = failure

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._app.crashed:
            reason = self._app.crash_reason
            raise reason if isinstance(reason, Exception) else TransportError("The Faust application ended without a reason.")

    def _explain(self, exc: Exception) -> TransportError:
        if isinstance(exc, GroupAuthorizationFailedError):
            return not_allowed(self._options.group)
        if isinstance(exc, TopicAuthorizationFailedError):
            return NotAuthorized(f"The cluster does not allow this: {exc!r}", hint="Compare with `echoswarm acls render`.")
        return ClusterUnreachable(
            f"The reward application's Kafka client gave up: {exc!r}", hint="Start it again once the brokers answer; nothing is lost."
        )

    async def _drain(self) -> None:
        """Finish what was read and commit it, within a bound: whatever is left is read again by the next member."""
        self._draining = True
        deadline = Deadline.after(_DRAIN_S, self._clock)
        logger.info("Draining: %s trajectories read and not yet scored", len(self._inbox))
        while (self._inbox or self._handling) and self._failure is None and not self._app.crashed and not deadline.expired():
            await asyncio.sleep(_LOOK_EVERY_S / 10)
        self._raise_failure()
        await self._app.consumer.commit()

    def _measure(self) -> None:
        """Lag and assignment, as Faust's client knows them."""
        if not self.joined:
            return
        consumer = self._app.consumer
        assigned = consumer.assignment()
        self._metrics.partitions.set(len(assigned))
        for tp in assigned:
            highwater, done = consumer.highwater(tp), self._done.get(tp.partition)
            if highwater is not None and done is not None:
                self._metrics.lag.labels(str(tp.partition)).set(max(0, highwater - done - 1))


def _faust_app(options: AppOptions) -> Any:
    """Stateless: no tables, no topics of its own, no web server; offsets are all that it keeps."""
    login = options.login
    credentials: Any = None
    if login.mechanism is not None:
        credentials = faust.SASLCredentials(
            mechanism=login.mechanism, username=login.username, password=login.password, ssl_context=login.context
        )
    elif login.context is not None:
        credentials = faust.SSLCredentials(login.context)
    app = App(
        options.group,
        broker=";".join(f"kafka://{address.strip()}" for address in options.bootstrap.split(",")),
        broker_client_id=options.client_id,
        broker_credentials=credentials,
        broker_session_timeout=_SESSION_S,
        broker_heartbeat_interval=_HEARTBEAT_S,
        broker_commit_interval=_COMMIT_EVERY_S,
        consumer_auto_offset_reset="earliest",
        store="memory://",
        key_serializer="raw",
        value_serializer="raw",
        producer_acks=-1,
        # A batch is sent in one go, so nothing is won by waiting for more.
        producer_linger=0.0,
        producer_max_batch_size=262_144,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        Monitor=QuietMonitor,
    )
    app.transport = Transport(app.conf.broker_consumer, app)
    return app
