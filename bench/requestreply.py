"""Request and reply over Kafka: from handing a small request over to having its reply, on a warm embedded broker.

    python bench/requestreply.py [--requests N] [--warm-up N] [--json FILE]

Requester and server are processes of their own, as learner and worker are: `Requester`, the broker with acks=all, a `ConsumerLoop` of the
workers' group, `ReplyServer`, the broker again. The server answers at once, so what is measured is the way there and back. One at a time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import statistics
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka.admin import NewTopic

from echo_bus import profiles
from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.embedded import EmbeddedKafka
from echo_bus.kafka import KafkaCluster
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.metrics import BusMetrics
from echo_bus.request_reply_server import Begin, ReplyServer
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import ChatMessage, Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Sampling
from echo_schemas.topics import REPLIES, REQUESTS, Topic

_CONTEXT = mp.get_context("spawn")
_WAIT_S = 120.0
_NAMESPACE = "bench.requestreply"
_DEADLINE_MS = 60_000


def bus_of(bootstrap: str, role: str) -> Bus:
    """A bus for one process of the benchmark."""
    return Bus(
        cluster=KafkaCluster(bootstrap),
        namespace=Namespace(_NAMESPACE),
        codec=lock_file_codec(),
        metrics=BusMetrics(),
        clock=SystemClock(),
        role=role,
        run_id="bench",
    )


def serve(bootstrap: str, stop: Any) -> None:
    """A worker that has its receipt ready."""
    bus = bus_of(bootstrap, "worker")
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        server = ReplyServer(publisher, REPLIES, namespace=bus.namespace, metrics=bus.metrics, clock=bus.clock)

        def handle(message: Message) -> Outcome:
            request, address = message.record, server.address_of(message)
            if isinstance(request, RolloutRequest) and address is not None and server.begin(address) is Begin.NEW:
                server.answer(address, receipt(request, address.correlation))
            return ACCEPTED

        loop = bus.consumer([REQUESTS], "worker", handle, publisher)
        thread = threading.Thread(target=loop.run)
        thread.start()
        stop.wait(_WAIT_S)
        loop.stop()
        thread.join()


def receipt(request: RolloutRequest, correlation: str) -> RolloutReply:
    """What a worker says of a group of 16."""
    return RolloutReply(
        run_id=request.run_id,
        correlation=correlation,
        group_id=request.group_id,
        attempt="0123456789abcdef",
        worker_id="worker-0",
        outcome=ReplyOutcome.DONE,
        version=request.required_version,
        weights_sha256="0" * 64,
        where=tuple(Coordinates(partition=3, offset=request.seq * 16 + index) for index in range(16)),
        time_ms=0,
    )


def request_of(seq: int) -> RolloutRequest:
    """One as a sequential learner sends it."""
    return RolloutRequest(
        run_id="bench",
        group_id=f"bench/{seq}",
        seq=seq,
        purpose=Purpose.TRAIN,
        task="reverse-digits",
        messages=(ChatMessage(role="user", content="391846"),),
        group_size=16,
        sampling=Sampling(max_new_tokens=8),
        required_version=7,
        exact=True,
        learner_version=7,
        issued_ms=0,
    )


def measure(bootstrap: str, *, num_requests: int, warm_up: int) -> list[float]:
    """Milliseconds of each request after the warm-up."""
    stop = _CONTEXT.Event()
    server = _CONTEXT.Process(target=serve, args=(bootstrap, stop), daemon=True)
    server.start()
    bus = bus_of(bootstrap, "learner")
    times_ms = []
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher, closing(bus.requester(publisher, 0)) as requester:
        requester.start()
        for seq in range(warm_up + num_requests):
            started_s = time.perf_counter()
            pending = requester.send(REQUESTS, request_of(seq), deadline_ms=bus.clock.time_ms() + _DEADLINE_MS, partition=seq % 4)
            pending.wait()
            if seq >= warm_up:
                times_ms.append((time.perf_counter() - started_s) * 1000)
    stop.set()
    server.join(_WAIT_S)
    return times_ms


def create_topics(bootstrap: str) -> None:
    """Four partitions of requests, two of replies, and where bad letters go."""
    namespace = Namespace(_NAMESPACE)

    def topics(topic: Topic, count: int) -> list[NewTopic]:
        return [NewTopic(name, count, 1) for name in (namespace.topic(topic), namespace.dead_letters(topic))]

    admin = KafkaCluster(bootstrap).admin()
    for future in admin.create_topics([*topics(REQUESTS, 4), *topics(REPLIES, 2)]).values():
        future.result(_WAIT_S)


def main() -> None:
    """Measure, print, and write the numbers where --json says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--warm-up", type=int, default=1_000, help="requests that are not counted: the broker compiles its hot paths")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    arguments = parser.parse_args()
    with EmbeddedKafka() as kafka:
        create_topics(kafka.bootstrap)
        times_ms = measure(kafka.bootstrap, num_requests=arguments.requests, warm_up=arguments.warm_up)
    cuts = statistics.quantiles(times_ms, n=100)
    figures = {
        "p50_ms": round(cuts[49], 3),
        "p95_ms": round(cuts[94], 3),
        "p99_ms": round(cuts[98], 3),
        "max_ms": round(max(times_ms), 3),
        "conditions": {"cores": len(os.sched_getaffinity(0)), "requests": len(times_ms), "load": round(os.getloadavg()[0], 1)},
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
