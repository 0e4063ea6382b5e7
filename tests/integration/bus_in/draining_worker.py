"""A process as roles are built: a consumer loop that drains on SIGTERM. Run by test_sigterm.py with a bootstrap and a namespace."""

from __future__ import annotations

import sys
import threading

from prometheus_client import CollectorRegistry

from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.profiles import PRODUCER_LATENCY
from echo_bus.client.publisher import Publisher
from echo_bus.clock import SystemClock
from echo_bus.dead_letters import DeadLetters
from echo_bus.group.consumer import ConsumerLoop, group_properties
from echo_bus.message import Accepted, Completion, Message, Outcome
from echo_bus.metrics import BusMetrics
from echo_runtime.signals import drain_on_signals
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.topics import DROPS

_WORK_S = 0.3


def handle(message: Message) -> Outcome:
    """Work that ends a moment later, on another thread."""
    completion = Completion()
    timer = threading.Timer(_WORK_S, completion.done)
    timer.daemon = True
    timer.start()
    sys.stdout.write(f"{message.offset}\n")
    sys.stdout.flush()
    return Accepted(completion)


def main(bootstrap: str, name: str) -> None:
    cluster, namespace, codec = KafkaCluster(bootstrap), Namespace(name), lock_file_codec()
    metrics = BusMetrics(CollectorRegistry())
    publisher = Publisher(
        cluster.producer(PRODUCER_LATENCY), namespace=namespace, codec=codec, metrics=metrics, clock=SystemClock(), source="worker"
    )
    loop = ConsumerLoop(
        cluster,
        [DROPS],
        handle,
        properties=group_properties(namespace.group("worker"), client_id="worker"),
        namespace=namespace,
        codec=codec,
        dead_letters=DeadLetters(publisher, namespace=namespace, group="worker", metrics=metrics),
        metrics=metrics,
    )
    with drain_on_signals(loop.stop):
        loop.run()
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
