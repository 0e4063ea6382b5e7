"""What a person is told where the cluster says no."""

from __future__ import annotations

from echo_bus.client.kafka_errors import refusal, refused
from echo_schemas.naming import Namespace
from echo_schemas.rights import Resource, acls_of_role


def test_one_operation_that_ran_into_a_refusal() -> None:
    error = refused("Write", Resource.TOPIC, "echo.demo.rewards")
    assert error.message == "The cluster refuses this login WRITE on the topic echo.demo.rewards."
    assert "--allow-principal User:LOGIN --operation Write --topic echo.demo.rewards" in error.hint
    assert "echoswarm acls render" in error.hint
    assert error.resource is Resource.TOPIC


def test_many_are_named_in_one_sentence() -> None:
    worker = acls_of_role("worker", Namespace("echo.demo"))
    error = refusal(*worker, bootstrap="broker-1:9092")
    assert error.message.startswith(f"The cluster refuses User:echo.demo.worker {worker[0].words}, {worker[1].words}, {worker[2].words}")
    assert f"and {len(worker) - 3} more." in error.message
    assert "--bootstrap-server broker-1:9092" in error.hint
