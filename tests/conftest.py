"""Fixtures of every test: a real Kafka, started once a session, and a namespace that no other test uses."""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Iterator

import pytest

from echo_bus.embedded import EmbeddedKafka, Jit, Jvm
from echo_schemas.errors import EchoError
from echo_schemas.naming import Namespace

_log = logging.getLogger(__name__)
_BOOTSTRAP_VARIABLE = "ECHO_KAFKA__BOOTSTRAP"
_CONTAINER_IMAGE = "apache/kafka:4.3.1"
_session = uuid.uuid4().hex[:8]
_counter = itertools.count(1)


@pytest.fixture(scope="session")
def kafka_bootstrap() -> Iterator[str]:
    """A real Kafka's addresses: from ECHO_KAFKA__BOOTSTRAP, else embedded, else a container, else a skip."""
    if external := os.environ.get(_BOOTSTRAP_VARIABLE):
        yield external
        return
    try:
        kafka = EmbeddedKafka(jvm=Jvm(jit=Jit.QUICK)).start()
    except EchoError as exc:
        _log.warning("No embedded Kafka: %s", exc)
        yield from _container_bootstrap(str(exc))
        return
    yield kafka.bootstrap
    kafka.stop()


def _container_bootstrap(why_not_embedded: str) -> Iterator[str]:
    try:
        from testcontainers.kafka import KafkaContainer

        container = KafkaContainer(_CONTAINER_IMAGE).with_kraft().start()
    except Exception as exc:  # whatever Docker's client raises: no container means no Kafka, and the skip says so
        pytest.skip(f"No Kafka: {why_not_embedded} And no container: {exc}")
    with container:
        yield container.get_bootstrap_server()


@pytest.fixture
def namespace() -> Namespace:
    """A namespace of this test alone, so that tests share a broker without seeing one another's topics."""
    return Namespace(f"test.{_session}.{next(_counter)}")
