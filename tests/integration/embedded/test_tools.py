"""Kafka's own tools run from the locked jars, and see what our clients wrote."""

from __future__ import annotations

import subprocess

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from echo_embedded.tools import tool_command
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace

pytestmark = pytest.mark.kafka
WAIT_S = 60.0


def _run(name: str, *arguments: str) -> str:
    done = subprocess.run([*tool_command(name), *arguments], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_console_consumer_shows_key_headers_and_value(kafka_bootstrap: str, namespace: Namespace) -> None:
    topic = f"{namespace.name}.echo"
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(WAIT_S)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(topic, b"the value", b"the key", headers=[("ce_type", b"Trajectory")])
    assert producer.flush(WAIT_S) == 0, "the record was not acknowledged in time"
    shown = ["--formatter-property", "print.key=true", "--formatter-property", "print.headers=true"]
    arguments = ["--topic", topic, "--from-beginning", "--max-messages", "1", "--timeout-ms", "120000", *shown]
    assert _run("kafka-console-consumer", "--bootstrap-server", kafka_bootstrap, *arguments) == "ce_type:Trajectory\tthe key\tthe value\n"
    assert topic in _run("kafka-topics", "--bootstrap-server", kafka_bootstrap, "--list").splitlines()


@pytest.mark.parametrize("name", ["kafka-acls", "kafka-configs", "kafka-transactions"])
def test_other_tools_find_their_classes_too(name: str) -> None:
    done = subprocess.run([*tool_command(name), "--help"], capture_output=True, text=True, timeout=240, check=False)
    assert "ClassNotFound" not in done.stderr
    assert "NoClassDefFound" not in done.stderr
    assert "bootstrap-server" in done.stdout + done.stderr


def test_another_tool_is_refused_with_the_list() -> None:
    with pytest.raises(UserError, match=r"'kafka-streams' is not among .* kafka-acls"):
        tool_command("kafka-streams")
