"""The broker's server.properties, for one node or three: small, on loopback only, with a fast fail-over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from echo_bus.client.profiles import BROKER_FAILOVER

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NodePorts:
    """A node's ports: `broker` for clients and other brokers, `controller` for the controllers' quorum."""

    broker: int
    controller: int


# Small: internal topics of three partitions, and threads for two cores.
_SMALL = MappingProxyType(
    {
        "num.network.threads": "2",
        "num.io.threads": "2",
        "num.recovery.threads.per.data.dir": "1",
        "log.cleaner.dedupe.buffer.size": "16777216",
        "offsets.topic.num.partitions": "3",
        "transaction.state.log.num.partitions": "3",
        "share.coordinator.state.topic.num.partitions": "3",
    }
)
# Prompt: compaction within a second, consumer groups without a start delay, short sessions allowed.
_PROMPT = MappingProxyType(
    {
        "auto.create.topics.enable": "false",
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        "group.consumer.min.heartbeat.interval.ms": "100",
        "group.consumer.heartbeat.interval.ms": "1000",
        "group.consumer.min.session.timeout.ms": "1000",
        "group.consumer.session.timeout.ms": "6000",
        "log.cleaner.backoff.ms": "500",
        "log.initial.task.delay.ms": "1000",
        "log.retention.check.interval.ms": "1000",
    }
)
# A single broker has no successor, so a pause of the machine should not fence it; but after a kill it can start again only when its old
# session has ended. No other controller wants to see empty metadata records twice a second: with these and half as many heartbeats an idle
# broker takes half the processor time.
_ALONE = MappingProxyType(
    {"broker.session.timeout.ms": "4000", "broker.heartbeat.interval.ms": "1000", "metadata.max.idle.interval.ms": "0"}
)


def node_properties(
    node_id: int, ports: Sequence[NodePorts], data: Path, *, security: Mapping[str, str], extra: Mapping[str, str]
) -> dict[str, str]:
    """All properties of node `node_id` (from 1), given every node's ports.

    `security` replaces the open listener; `extra` wins over all. Voters are static, so that ports may change between starts without a
    change of the stored quorum.
    """
    num_brokers = len(ports)
    replicas, min_in_sync = (3, 2) if num_brokers >= 3 else (1, 1)
    own = ports[node_id - 1]
    listener = "SASL_SSL" if security else "PLAINTEXT"
    properties = {
        "process.roles": "broker,controller",
        "node.id": str(node_id),
        "controller.quorum.voters": ",".join(f"{i}@{HOST}:{node.controller}" for i, node in enumerate(ports, start=1)),
        "controller.listener.names": "CONTROLLER",
        "listeners": f"{listener}://{HOST}:{own.broker},CONTROLLER://{HOST}:{own.controller}",
        "advertised.listeners": f"{listener}://{HOST}:{own.broker}",
        "listener.security.protocol.map": f"{listener}:{listener},CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": listener,
        "log.dirs": str(data),
        "default.replication.factor": str(replicas),
        "min.insync.replicas": str(min_in_sync),
    }
    for prefix in ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic"):
        properties[f"{prefix}.replication.factor"] = str(replicas)
    for prefix in ("transaction.state.log", "share.coordinator.state.topic"):
        properties[f"{prefix}.min.isr"] = str(min_in_sync)
    return {**properties, **_SMALL, **_PROMPT, **(BROKER_FAILOVER if num_brokers > 1 else _ALONE), **security, **extra}


def render(properties: Mapping[str, str]) -> str:
    """The text of a Java properties file. Only backslashes in our values need an escape."""
    return "".join(f"{key}={value.replace(chr(92), chr(92) * 2)}\n" for key, value in sorted(properties.items()))
