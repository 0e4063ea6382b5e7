"""A process as roles are built: a consumer loop that drains on SIGTERM. Run by test_sigterm.py with a bootstrap and a namespace."""

from __future__ import annotations

import sys
import threading

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.profiles import PRODUCER_LATENCY
from echo_bus.message import Accepted, Completion, Message, Outcome
from echo_runtime.signals import drain_on_signals
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
    bus = Bus(cluster=KafkaCluster(bootstrap), namespace=Namespace(name), role="worker")
    publisher = bus.publisher(PRODUCER_LATENCY)
    loop = bus.consumer([DROPS], "worker", handle, publisher)
    with drain_on_signals(loop.stop):
        loop.run()
    publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
