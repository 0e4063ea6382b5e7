"""The Faust application around the processor: a group member that reads `trajectories` as raw bytes and writes the processor's records.

    Faust agent ─▶ batches ─▶ process ─▶ send ─▶ wait for delivery ─▶ acknowledge ─▶ Faust commits

An offset is acknowledged only after its rewards and those before it are delivered, so a crash at any point repeats work and loses none.
After a rebalance, acknowledgements of the earlier generation are dropped: their partitions may belong to another member, or are read again
here.

Threads: everything here runs on the event loop of `run`; Faust's client fetches and sends heartbeats on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import faust
from aiokafka.abc import AbstractTokenProvider
from aiokafka.errors import GroupAuthorizationFailedError, KafkaError, TopicAuthorizationFailedError
from faust.exceptions import FaustError

from echo_bus.client.cluster import RawMessage
from echo_bus.client.kafka_errors import refused
from echo_bus.client.profiles import GATHERING_MIN_BYTES
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import ClusterUnreachable, DeadlineExceeded, NotAuthorized, TransportError
from echo_bus.requests.dispatch import PartitionWork
from echo_core.bottleneck import Place, Use
from echo_runtime.places import PlaceTimes
from echo_runtime.process import StopSignal
from echo_schemas.headers import Header
from echo_schemas.rights import Resource
from echo_streams.batching import MAX_IN_FLIGHT, Batcher
from echo_streams.driver import App, QuietMonitor, TableManager, Transport
from echo_streams.metrics import StreamsMetrics
from echo_streams.processing import Outgoing, Send
from echo_streams.security import Login
from echo_streams.tokens import Issuer, TokenSource

logger = logging.getLogger(__name__)

Process = Callable[[Sequence[RawMessage], Send], Awaitable[list[Outgoing]]]

_COMMIT_EVERY_S = 1.0
_LOOK_EVERY_S = 0.1
_MEASURE_EVERY_S = 1.0
# As in echo_bus.client.profiles: a dead member is noticed in ten seconds.
_SESSION_S = 10.0
_HEARTBEAT_S = 1.0
# Time-out of a request: longer than `_SESSION_S`, since a join is answered only after a dead member's session has ended.
_REQUEST_S = 12.0
# As `delivery.timeout.ms` of our other producers: a batch without delivery for so long ends the process, and is scored again.
_DELIVERY_S = 120.0
# Loggers that report the start and stop of every service; each of Faust's classes is a service.
_TALKATIVE = ("aiokafka", "faust", "mode", "echo_streams.driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """Options of the Faust app. `group`: its app id; `joined_within_s`: time to join the group; `drain_s`: time at the end to score what
    was read; `inline`: scoring runs on the event loop and blocks it; `gather`: fetch many trajectories at once, because no step waits for
    the next reward; `static_member`: as in `group_properties`; `on_throttle`: as in `KafkaCluster`;
    `on_commit`: called with whether the cluster accepted a commit."""

    group: str
    client_id: str
    bootstrap: str
    topic: str
    login: Login
    inline: bool
    gather: bool = False
    static_member: str | None = None
    joined_within_s: float = 60.0
    drain_s: float = 1.5
    on_throttle: Callable[[str, float], None] | None = None
    on_commit: Callable[[bool], None] | None = None


class FaustMessage:
    """A Faust message with the methods of confluent-kafka's, which the decoder and the dead letters use."""

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
        """Faust has a list or a dictionary, depending on its version and driver."""
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


@dataclass(slots=True, eq=False)
class _Received:
    """An event of Faust's, and whether its rewards are delivered."""

    event: Any
    is_done: bool = False


class RewardApp:
    """One run of a Faust app. Made and run on one event loop, once."""

    def __init__(self, options: AppOptions, process: Process, *, metrics: StreamsMetrics, places: PlaceTimes, clock: Clock) -> None:
        self._options = options
        self._process = process
        self._metrics = metrics
        self._places = places
        self._clock = clock
        self._batcher: Batcher[_Received] = Batcher(self._handle, places=places)
        # By partition, in the order of their offsets, from the first one that is not acknowledged on.
        self._received: defaultdict[int, deque[_Received]] = defaultdict(deque)
        self._draining = False
        # By partition, the first offset whose rewards are not delivered.
        self._undone: dict[int, int] = {}
        self.num_done = 0
        """Trajectories whose rewards this process has delivered."""
        self._assigned: set[Any] | None = None
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
        self._app = _faust_app(options)
        source = self._app.topic(
            options.topic, key_type=bytes, value_type=bytes, key_serializer="raw", value_serializer="raw", allow_empty=True
        )
        self._app.agent(source, name=f"{options.group}.receive")(self._receive)

    @property
    def joined(self) -> bool:
        """Whether this member has joined the group, with or without a partition."""
        return bool(self._app.consumer_generation_id)

    async def run(self, stop: StopSignal) -> None:
        """Read until `stop`, then score what was read, commit, and leave the group.

        Raises NotAuthorized or DeadlineExceeded if the group is not joined in time, errors of the processor, and TransportError if Faust
        gives up.
        """
        joined_by = Deadline.after(self._options.joined_within_s, self._clock)
        batching = asyncio.create_task(self._batcher.run(), name="batching")
        # A task: it ends only when the group has been joined.
        starting = asyncio.create_task(self._app.start(), name="starting")
        measured_s = 0.0
        try:
            while not stop.is_set() and self._batcher.failure is None and not self._app.crashed:
                if starting.done():
                    starting.result()
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
            if starting.done():
                await self._drain()
        except (KafkaError, FaustError) as exc:
            raise self._explain(exc) from exc
        finally:
            batching.cancel()
            starting.cancel()
            await self._app.stop()

    async def _receive(self, stream: Any) -> None:
        """The agent: puts events into the batcher, without acknowledging them. While draining it leaves them for the next member.

        It reads the stream's channel, because the stream itself would go round the loop for each event (a sixth of a trajectory's CPU,
        measured).
        """
        async for event in stream.channel:
            if not self._draining and event.message.generation_id == self._app.consumer_generation_id:
                received = _Received(event)
                self._undone.setdefault(event.message.partition, event.message.offset)
                self._received[event.message.partition].append(received)
                await self._batcher.put(received)

    def committed(self, partition: int) -> int | None:
        """The group's committed offset of `partition`; None if the partition is not assigned to this member."""
        consumer = self._app.consumer
        for tp in consumer.assignment() if self.joined else ():
            if tp.partition == partition:
                offset: int | None = consumer._committed_offset.get(tp)  # noqa: SLF001  Faust has no other way
                return offset
        return None

    async def send(self, answers: list[Outgoing]) -> None:
        """Write records that answer no message of the agent; returns when they are delivered."""
        await asyncio.gather(*await self._begin(answers))

    async def _begin(self, answers: list[Outgoing]) -> list[Awaitable[Any]]:
        """Begin to write `answers`; returns their deliveries."""
        producer, deliveries = self._app.producer, []
        together: defaultdict[tuple[str, int], list[tuple[bytes | None, bytes | None, list[Header]]]] = defaultdict(list)
        for answer in answers:
            if answer.partition is None:
                deliveries.append(await producer.send(answer.topic, answer.key, answer.value, None, None, answer.headers))
            else:
                together[answer.topic, answer.partition].append((answer.key, answer.value, answer.headers))
        for (topic, partition), records in together.items():
            deliveries += await producer.send_batch(topic, partition, records)
        return deliveries

    async def _handle(self, batch: list[_Received]) -> None:
        """Score one batch, deliver the rewards, and only then acknowledge it."""
        # Batches overlap while they wait, so each counts by its share; batches of inline rewards do not overlap.
        share = len(batch) / MAX_IN_FLIGHT
        self._metrics.in_flight.inc(len(batch))
        try:
            started_s = self._clock.monotonic_s()
            deliveries: list[Awaitable[Any]] = []

            async def send(answers: list[Outgoing]) -> None:
                deliveries.extend(await self._begin(answers))

            await send(await self._process([FaustMessage(received.event.message) for received in batch], send))
            scored_s = self._clock.monotonic_s()
            self._places.add(Place.REWARD, Use.BUSY, (scored_s - started_s) * (1 if self._options.inline else share))
            if deliveries:
                await asyncio.gather(*deliveries)
                self._places.add(Place.REWARD, Use.BLOCKED, (self._clock.monotonic_s() - scored_s) * share)
        finally:
            self._metrics.in_flight.dec(len(batch))
        self._acknowledge(batch)
        self.num_done += len(batch)
        self._metrics.trajectories.inc(len(batch))
        self._metrics.batches.inc()

    def _acknowledge(self, batch: list[_Received]) -> None:
        """Acknowledge what is done, each partition in the order of its offsets: a batch may overtake another, and Faust then commits beyond
        the messages of that one if nothing was committed before, or if it is only one message."""
        generation = self._app.consumer_generation_id
        for received in batch:
            received.is_done = True
        for partition in {received.event.message.partition for received in batch}:
            waiting = self._received[partition]
            while waiting and (waiting[0].is_done or waiting[0].event.message.generation_id != generation):
                event = waiting.popleft().event
                if event.message.generation_id == generation:
                    event.ack()
                    self._undone[partition] = event.message.offset + 1

    def _raise_failure(self) -> None:
        if self._batcher.failure is not None:
            raise self._batcher.failure
        if self._app.crashed:
            reason = self._app.crash_reason
            raise reason if isinstance(reason, Exception) else TransportError("The Faust application ended without a reason.")

    def _explain(self, exc: Exception) -> TransportError:
        if isinstance(exc, GroupAuthorizationFailedError):
            return refused("Read", Resource.GROUP, self._options.group)
        if isinstance(exc, TopicAuthorizationFailedError):
            return NotAuthorized(f"The cluster does not allow this: {exc!r}", hint="Compare with `echoswarm acls render`.")
        return ClusterUnreachable(
            f"The reward application's Kafka client gave up: {exc!r}", hint="Start it again once the brokers answer; nothing is lost."
        )

    async def _drain(self) -> None:
        """Score what was read and commit it, within `drain_s`: the next member reads the rest again."""
        self._draining = True
        logger.info("Draining: %s trajectories read and not yet scored", self._batcher.num_waiting + self._batcher.num_in_flight)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                await self._batcher.drained()
        self._raise_failure()
        await self._app.consumer.commit()

    def _measure(self) -> None:
        """Lag and assignment, as Faust's client knows them."""
        if not self.joined:
            return
        consumer = self._app.consumer
        assigned = consumer.assignment()
        self._metrics.partitions.set(len(assigned))
        if assigned != self._assigned:
            for tp in (self._assigned or set()) - assigned:
                self._undone.pop(tp.partition, None)
                self._metrics.lag.remove(str(tp.partition))
            self._assigned = set(assigned)
            logger.info(
                "Reading %s", ", ".join(f"{tp.topic}[{tp.partition}]" for tp in sorted(assigned)) or "no partition: others have them all"
            )
        for tp in assigned:
            highwater, undone = consumer.highwater(tp), self._undone.get(tp.partition)
            if highwater is not None and undone is not None:
                self._metrics.lag.labels(str(tp.partition)).set(max(0, highwater - undone))

    def set_lag(self, work: Mapping[int, PartitionWork]) -> None:
        """Set the lag as the cluster tells it, while the loop is held up and does not measure. On any thread."""
        for tp in self._assigned or ():
            self._metrics.lag.labels(str(tp.partition)).set(work[tp.partition].outstanding)


class _Tokens(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka is not typed
    """The token provider that aiokafka asks."""

    def __init__(self, issuer: Issuer) -> None:
        super().__init__()
        self._source = TokenSource(issuer)

    async def token(self) -> str:
        return await asyncio.to_thread(self._source.token)


def _faust_app(options: AppOptions) -> Any:
    """A stateless app: no tables, no topics of its own, no web server; it keeps only offsets."""
    login = options.login
    credentials: Any = None
    if login.issuer is not None:
        credentials = faust.OAuthCredentials(oauth_cb=_Tokens(login.issuer), ssl_context=login.context)
    elif login.mechanism is not None:
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
        consumer_group_instance_id=options.static_member,
        broker_session_timeout=_SESSION_S,
        broker_heartbeat_interval=_HEARTBEAT_S,
        broker_request_timeout=_REQUEST_S,
        broker_commit_interval=_COMMIT_EVERY_S,
        consumer_auto_offset_reset="earliest",
        store="memory://",
        key_serializer="raw",
        value_serializer="raw",
        producer_acks=-1,
        producer_request_timeout=_DELIVERY_S,
        # The batcher sends a batch in one go, so waiting for more gains nothing.
        producer_linger=0.0,
        producer_max_batch_size=262_144,
        stream_wait_empty=False,
        topic_allow_declare=False,
        topic_disable_leader=True,
        web_enabled=False,
        Monitor=QuietMonitor,
        TableManager=TableManager,
    )
    if options.on_throttle is not None:
        app.on_throttle = options.on_throttle
    if options.on_commit is not None:
        app.on_commit = options.on_commit
    app.fetch_min_bytes = GATHERING_MIN_BYTES if options.gather else 1
    app.transport = Transport(app.conf.broker_consumer, app)
    return app
