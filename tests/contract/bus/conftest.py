"""The bus over both clusters: every test here runs in memory and on a real Kafka."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client.cluster import Cluster
from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.profiles import PRODUCER_LATENCY, group_properties
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock, Deadline, SystemClock
from echo_bus.group.consumer import ConsumerLoop
from echo_bus.group.state import LoopLimits
from echo_bus.message import Handler
from echo_bus.metrics import BusMetrics
from echo_bus.reading.reader import LogReader
from echo_memory import MemoryCluster
from echo_schemas.codec import Codec, lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, DropReason, Progress
from echo_schemas.topics import Topic

NUM_PARTITIONS = 4
PATIENCE_S = 60.0


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.kafka)])
def bus_cluster(request: pytest.FixtureRequest) -> Cluster:
    if request.param == "memory":
        return MemoryCluster()
    return KafkaCluster(request.getfixturevalue("kafka_bootstrap"))


@dataclass
class RunningLoop:
    """A loop on its own thread."""

    loop: ConsumerLoop
    thread: threading.Thread
    errors: list[BaseException] = field(default_factory=list)

    def stop(self) -> None:
        """Drain and wait. Raises what `run` raised."""
        self.loop.stop()
        self.join()

    def join(self) -> None:
        """Wait for the end. Raises what `run` raised."""
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), "the loop did not end"
        if self.errors:
            raise self.errors[0]


@dataclass
class Kit:
    """Makes the parts of a bus on one cluster, in one namespace."""

    cluster: Cluster
    namespace: Namespace
    codec: Codec = field(default_factory=lock_file_codec)
    metrics: BusMetrics = field(default_factory=lambda: BusMetrics(CollectorRegistry()))
    clock: Clock = field(default_factory=SystemClock)
    opened: list[Any] = field(default_factory=list)

    @property
    def bus(self) -> Bus:
        """The front door to it."""
        return Bus(cluster=self.cluster, namespace=self.namespace, codec=self.codec, metrics=self.metrics, clock=self.clock, role="view")

    def create(self, *topics: Topic, num_partitions: int = NUM_PARTITIONS) -> None:
        """Make topics and their dead letters."""
        admin = self.cluster.admin()
        names = [name for topic in topics for name in (self.namespace.topic(topic), self.namespace.dead_letters(topic))]
        compacted = {self.namespace.topic(topic) for topic in topics if topic.compacted}
        new = [NewTopic(name, num_partitions, 1, config={"cleanup.policy": "compact" if name in compacted else "delete"}) for name in names]
        for created in admin.create_topics(new).values():
            created.result(PATIENCE_S)
        # A broker under load tells of a topic a moment after it has made it.
        deadline = Deadline.after(PATIENCE_S)
        while not all(name in (known := admin.list_topics(timeout=PATIENCE_S).topics) and known[name].partitions for name in names):
            assert not deadline.expired(), f"waited for {names}"

    def publisher(self) -> Publisher:
        publisher = Publisher(self.cluster.producer(PRODUCER_LATENCY), self.bus)
        self.opened.append(publisher)
        return publisher

    def reader(self, *topics: Topic, run_id: str | None = None, **options: Any) -> LogReader:
        reader = replace(self.bus, run_id=run_id).reader(topics, **options)
        self.opened.append(reader)
        return reader

    @contextmanager
    def running(
        self, topic: Topic, handler: Handler, *, limits: LoopLimits | None = None, group: str = "group", **options: Any
    ) -> Iterator[RunningLoop]:
        """A loop that runs inside the block; `options`: the wire's. The group learns of a departure at once, as the loop leaves it."""
        properties = group_properties(self.namespace.group(group), client_id="test", **options.pop("group_options", {}))
        properties |= options.pop("properties", {})
        on_assignment = options.pop("on_assignment", None)
        loop = ConsumerLoop(
            self.cluster,
            replace(self.bus, **options),
            [topic],
            handler,
            properties={**properties, "heartbeat.interval.ms": 200} if "group.protocol" not in properties else properties,
            dead_letters=self.publisher(),
            limits=limits,
        )
        if on_assignment is not None:
            loop.on_assignment(on_assignment)

        def run() -> None:
            try:
                loop.run()
            except BaseException as exc:  # the test raises it where it waits for the loop
                running.errors.append(exc)

        running = RunningLoop(loop, threading.Thread(target=run, daemon=True))
        running.thread.start()
        try:
            yield running
        finally:
            loop.stop()
            running.thread.join(PATIENCE_S)

    def committed(self, topic: Topic, group: str = "group") -> int:
        """How many messages the group has committed, over all partitions; topics here begin at 0."""
        from echo_bus.requests.dispatch import WorkObserver

        observer = WorkObserver(self.cluster, physical=self.namespace.topic(topic), group=self.namespace.group(group), client_id="observer")
        try:
            return sum(work.first_open for work in observer.observe(observer.num_partitions()).values())
        finally:
            observer.close()

    def value(self, name: str, **labels: str) -> float:
        """A metric's value, 0 if it was never touched."""
        return self.metrics.registry.get_sample_value(f"echo_bus_{name}", labels) or 0.0


@pytest.fixture
def kit(bus_cluster: Cluster, namespace: Namespace) -> Iterator[Kit]:
    kit = Kit(bus_cluster, namespace)
    yield kit
    for part in reversed(kit.opened):
        part.close()


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition` holds. Fails with `what`."""
    deadline, pause = Deadline.after(PATIENCE_S), threading.Event()
    while not condition():
        assert not deadline.expired(), f"waited in vain: {what}"
        pause.wait(0.01)


@pytest.fixture
def until() -> Callable[[Callable[[], object], str], None]:
    return wait_until


@pytest.fixture
def drop() -> Callable[..., Drop]:
    def make(seq: int, run_id: str = "demo") -> Drop:
        return Drop(run_id=run_id, group_id=f"{run_id}/{seq}", seq=seq, why=DropReason.STALE, learner_version=3, time_ms=5)

    return make


@pytest.fixture
def progress() -> Callable[..., Progress]:
    def make(version: int, run_id: str = "demo") -> Progress:
        return Progress(
            run_id=run_id, session="a", version=version, published=version, groups_trained=0, groups_dropped=0,
            groups_ready=0, next_seq=0, time_ms=1,
        )  # fmt: skip

    return make
