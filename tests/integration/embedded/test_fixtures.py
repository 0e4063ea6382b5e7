"""The fixtures of tests/conftest.py give what they promise."""

from __future__ import annotations

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_embedded import EmbeddedKafka
from echo_embedded.ports import free_ports
from echo_embedded.readiness import brokers_named, wait_for_http

pytestmark = pytest.mark.kafka


def test_the_kafka_answers(kafka_bootstrap: str) -> None:
    assert len(brokers_named({"bootstrap.servers": kafka_bootstrap}, 60)) >= 1


def test_the_registry_answers(registry_url: str) -> None:
    with SchemaRegistryClient({"url": registry_url}) as client:
        assert isinstance(client.get_subjects(), list)


def test_the_secured_kafka_answers_its_administrator(secured_kafka: EmbeddedKafka) -> None:
    client = {"bootstrap.servers": secured_kafka.bootstrap, **secured_kafka.client_properties}
    assert len(brokers_named(client, 60)) == 1


def test_a_server_that_does_not_come_up_is_named_at_the_deadline() -> None:
    (port,) = free_ports(1)
    with pytest.raises(DeadlineExceeded, match=f"Nothing answered at http://127.0.0.1:{port} in time"):
        wait_for_http(f"http://127.0.0.1:{port}", Deadline.after(0.3))
