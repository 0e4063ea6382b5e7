"""A transaction that could not be rolled back in its time."""

from __future__ import annotations

from contextlib import closing

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, RunControl, RunState
from echo_schemas.topics import CONTROL

SPACE = Namespace("echo.test")
ORDER = Control(run_id="demo", epoch=1, run=RunControl(state=RunState.PAUSED), issued_by="test", time_ms=1)


def publish_and_fail(writer: TransactionalWriter) -> None:
    with writer.transaction() as transaction:
        transaction.publish(CONTROL, ORDER)
        raise ZeroDivisionError


def test_the_next_transaction_rolls_it_back_first(caplog: pytest.LogCaptureFixture) -> None:
    cluster = MemoryCluster()
    cluster.admin().create_topics([NewTopic(SPACE.topic(CONTROL), num_partitions=1, replication_factor=1)])
    bus = Bus(cluster=cluster, namespace=SPACE, role="learner", run_id="demo")

    def before(operation: str) -> None:
        if operation == "abort_transaction":
            raise KafkaException(KafkaError(KafkaError.REQUEST_TIMED_OUT, "the coordinator is away"))

    with closing(bus.transactions("learner")) as writer:
        writer.start()
        cluster.faults.before = before
        with pytest.raises(ZeroDivisionError):
            publish_and_fail(writer)
        assert "the next one waits for it: A transaction failed while rolling back: the coordinator is away." in caplog.text
        cluster.faults.before = None
        with writer.transaction() as transaction:
            transaction.publish(CONTROL, ORDER)
    with closing(bus.orders()) as orders:
        assert orders.items() == {"demo/run": ORDER}
