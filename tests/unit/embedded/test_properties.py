"""The broker's properties: one node, three nodes, secured, and what wins over what."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_embedded.properties import NodePorts, node_properties, render

PORTS = [NodePorts(20_001, 20_002), NodePorts(20_003, 20_004), NodePorts(20_005, 20_006)]


def test_a_single_node_replicates_nothing() -> None:
    properties = node_properties(1, PORTS[:1], Path("/data"), security={}, extra={})
    replicas = {key: value for key, value in properties.items() if key.endswith("replication.factor")}
    assert len(replicas) == 4
    assert set(replicas.values()) == {"1"}
    assert properties["min.insync.replicas"] == "1"
    assert properties["log.dirs"] == "/data"


def test_three_nodes_survive_the_loss_of_one_and_notice_it_quickly() -> None:
    properties = node_properties(2, PORTS, Path("/data"), security={}, extra={})
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:20002,2@127.0.0.1:20004,3@127.0.0.1:20006"
    assert properties["listeners"] == "PLAINTEXT://127.0.0.1:20003,CONTROLLER://127.0.0.1:20004"
    assert properties["default.replication.factor"] == properties["offsets.topic.replication.factor"] == "3"
    assert properties["min.insync.replicas"] == properties["transaction.state.log.min.isr"] == "2"
    assert properties["broker.session.timeout.ms"] == "2000"


def test_a_single_node_is_fenced_less_eagerly() -> None:
    properties = node_properties(1, PORTS[:1], Path("/data"), security={}, extra={})
    assert int(properties["broker.session.timeout.ms"]) > 2000
    assert int(properties["broker.session.timeout.ms"]) >= 4 * int(properties["broker.heartbeat.interval.ms"])
    assert "replica.lag.time.max.ms" not in properties


@pytest.mark.parametrize("num_brokers", [1, 3])
def test_every_address_is_on_loopback_and_no_client_creates_topics(num_brokers: int) -> None:
    properties = node_properties(1, PORTS[:num_brokers], Path("/data"), security={}, extra={})
    for key in ("listeners", "advertised.listeners"):
        assert all(listener.split("://")[1].startswith("127.0.0.1:") for listener in properties[key].split(","))
    assert properties["auto.create.topics.enable"] == "false"


def test_security_replaces_the_open_listener_and_its_protocol_map() -> None:
    security = {"listener.security.protocol.map": "CONTROLLER:SSL,SASL_SSL:SASL_SSL"}
    properties = node_properties(1, PORTS[:1], Path("/data"), security=security, extra={})
    assert properties["listeners"].startswith("SASL_SSL://")
    assert properties["inter.broker.listener.name"] == "SASL_SSL"
    assert "PLAINTEXT" not in render(properties)


def test_the_callers_properties_win() -> None:
    properties = node_properties(1, PORTS[:1], Path("/data"), security={}, extra={"num.io.threads": "7"})
    assert properties["num.io.threads"] == "7"


def test_backslashes_survive_javas_properties_format() -> None:
    assert render({"b": "C:\\x", "a": "1"}) == "a=1\nb=C:\\\\x\n"
