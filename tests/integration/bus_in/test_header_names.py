"""A header whose name is no UTF-8, which only a writer of its own making can write: its reader goes on, and decides by the body.

confluent-kafka's own `headers()` raises for it, or not if garbage is collected meanwhile, and what it made ends the process that looks
at it.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.client import AIOKafkaClient
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline, SystemClock
from echo_bus.metrics import BusMetrics
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import Drop, DropReason
from echo_schemas.topics import DROPS

WAIT_S = 60.0


class _Name:
    """What aiokafka takes for a header's name."""

    def encode(self, _: str) -> bytes:
        return b"\xff\xfe"


async def _produce(bootstrap: str, physical: str, records: list[tuple[bytes, bytes]]) -> None:
    """Write (key, value) pairs under such headers."""
    builder: Any = _DefaultRecordBatchBuilderPy(
        magic=2, compression_type=0, is_transactional=False, producer_id=-1, producer_epoch=-1, base_sequence=-1, batch_size=100_000
    )
    # Not a time long ago: the topic's retention would take the records.
    now_ms = SystemClock().time_ms()
    for number, (key, value) in enumerate(records):
        builder.append(number, now_ms, key, value, [(_Name(), b"x"), (_Name(), None)])
    client: Any = AIOKafkaClient(bootstrap_servers=bootstrap)
    await client.bootstrap()
    try:
        client.add_topic(physical)
        deadline, batch, error = Deadline.after(WAIT_S), bytes(builder.build()), -1
        # Nobody leads a topic that was just made, and a leader that has just been elected does not know it yet.
        while error:
            assert not deadline.expired(), f"waited for the batch to be written; error {error}"
            await client.force_metadata_update()
            leader = client.cluster.leader_for_partition(TopicPartition(physical, 0))
            if leader in {None, -1}:
                continue
            answer = await client.send(leader, ProduceRequest(None, -1, 10_000, [(physical, [(0, batch)])]))
            error = answer.topics[0][1][0][1]
    finally:
        await client.close()


@pytest.fixture(params=[False, True], ids=["as ever", "while garbage is collected"])
def garbage(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whether garbage is looked for at every other object."""
    usual = gc.get_threshold()
    if request.param:
        gc.set_threshold(1, 10_000, 10_000)
    yield
    gc.set_threshold(*usual)


@pytest.mark.kafka
@pytest.mark.usefixtures("garbage")
def test_a_header_name_that_is_no_text_stops_no_reader(kafka_bootstrap: str, namespace: Namespace) -> None:
    cluster, physical, codec = KafkaCluster(kafka_bootstrap), namespace.topic(DROPS), lock_file_codec()
    admin = cluster.admin()
    for created in admin.create_topics([NewTopic(physical, 1, 1), NewTopic(namespace.dead_letters(DROPS), 1, 1)]).values():
        created.result(WAIT_S)
    drop = Drop(run_id="demo", group_id="demo/1", seq=1, why=DropReason.STALE, learner_version=3, time_ms=5)
    asyncio.run(_produce(kafka_bootstrap, physical, [(b"demo/1", codec.encode(drop)), (b"other", codec.encode(drop)), (b"x", b"garbage")]))
    metrics = BusMetrics(CollectorRegistry())
    bus = Bus(cluster=cluster, namespace=namespace, codec=codec, metrics=metrics, role="view", run_id="demo")
    with closing(bus.publisher()) as publisher, closing(bus.reader([DROPS], on_invalid=bus.dead_letters(publisher).send)) as reader:
        deadline = Deadline.after(WAIT_S)
        # A leader that has just been elected does not show what it has at once.
        while reader.start()[DROPS.name, 0] < 3:
            assert not deadline.expired(), "waited for the records"
        messages = [message for batch in reader.read_to_end(deadline) for message in batch]
    assert [(message.record, dict(message.headers)) for message in messages] == [(drop, {})]
    letters = [
        metrics.registry.get_sample_value("echo_bus_dead_letters_total", {"topic": physical, "reason": reason}) for reason in _REASONS
    ]
    assert letters == [1.0, 1.0]


_REASONS = ("key_mismatch", "bad_magic")
