"""A secured embedded Kafka: users by SCRAM over TLS, and nothing without an ACL."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.readiness import brokers_named
from tests.thorough import only_thorough

pytestmark = pytest.mark.kafka
TOPIC = "secret"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the secured cluster keeps its data and certificates."""
    return tmp_path_factory.mktemp("secured") / "kafka"


@pytest.fixture(scope="module")
def kafka(folder: Path) -> Iterator[EmbeddedKafka]:
    """One secured broker with one topic."""
    with EmbeddedKafka(secure=True, folder=folder, jvm=Jvm(jit=Jit.QUICK)) as cluster:
        _create_topic(cluster, 1)
        yield cluster


def _admin(kafka: EmbeddedKafka) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka.bootstrap, **kafka.client_properties})


def _create_topic(kafka: EmbeddedKafka, replicas: int) -> None:
    admin = _admin(kafka)
    admin.create_topics([NewTopic(TOPIC, 1, replicas)])[TOPIC].result(WAIT_S)


def _write(bootstrap: str, client: dict[str, str]) -> KafkaError | None:
    """The error with which one record was refused; None if it was acknowledged."""
    results: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": bootstrap, "message.timeout.ms": 50_000, "log_level": 0, **client})
    producer.produce(TOPIC, b"value", on_delivery=lambda error, _: results.append(error))
    assert producer.flush(WAIT_S) == 0, "the record was neither acknowledged nor refused in time"
    return results[0]


def test_a_user_may_do_only_what_an_acl_allows(kafka: EmbeddedKafka) -> None:
    alice = kafka.add_user("alice", "her password")
    error = _write(kafka.bootstrap, alice)
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    acl = AclBinding(ResourceType.TOPIC, TOPIC, ResourcePatternType.LITERAL, "User:alice", "*", AclOperation.WRITE, AclPermissionType.ALLOW)
    admin = _admin(kafka)
    admin.create_acls([acl])[acl].result(WAIT_S)
    # A broker hears of a rule a moment after the controller has it.
    deadline = Deadline.after(WAIT_S)
    while (error := _write(kafka.bootstrap, alice)) is not None:
        assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
        assert not deadline.expired(), "waited for the rule to be known"


def test_a_wrong_password_and_an_open_connection_are_refused(kafka: EmbeddedKafka) -> None:
    kafka.add_user("bob", "his password")
    errors: list[KafkaError] = []
    client: dict[str, Any] = {"bootstrap.servers": kafka.bootstrap, **kafka.client_properties, "log_level": 0}
    client |= {"sasl.username": "bob", "sasl.password": "another", "error_cb": errors.append}
    admin = AdminClient(client)
    deadline = Deadline.after(WAIT_S)
    while KafkaError._AUTHENTICATION not in [error.code() for error in errors]:
        assert not deadline.expired(), f"waited for the refusal: {errors}"
        with pytest.raises(KafkaException):
            admin.list_topics(timeout=1)
        admin.poll(0)
    assert len(brokers_named({"bootstrap.servers": kafka.bootstrap}, 1.0)) == 0


def test_secrets_are_readable_by_their_owner_only(kafka: EmbeddedKafka, folder: Path) -> None:
    for name in ("security/broker.pem", "security/admin.password", "node-1.properties"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600, name
    assert "PASSWORD" not in repr(kafka).upper()


def test_an_open_cluster_has_no_users(kafka: EmbeddedKafka) -> None:
    assert kafka.client_properties["security.protocol"] == "SASL_SSL"
    with pytest.raises(TransportError, match="Only a secured"):
        EmbeddedKafka().add_user("alice", "her password")


@only_thorough
def test_three_secured_brokers_form_a_cluster() -> None:
    with EmbeddedKafka(3, secure=True, jvm=Jvm(jit=Jit.QUICK)) as cluster:
        _create_topic(cluster, 3)
        assert _write(cluster.bootstrap, cluster.client_properties) is None
