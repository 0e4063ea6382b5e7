"""Request and reply over Kafka: from handing a small request over to having its reply, on a warm embedded broker.

    python bench/requestreply.py [--requests N] [--warm-up N] [--json FILE]

Who asks and who answers are processes of their own, as a sequential learner and a worker are, and use what those use: a publisher with
acks=all, a `ConsumerLoop` of the workers' group, `ReplyServer`, and the learner's `ReplyInbox`, which wakes it. The answer comes at
once, so what is measured is the way there and back. One at a time.
In turn with it, "bare": the same bytes between two plain clients without group, codec, headers or cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing as mp
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.kafka import KafkaCluster
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.requests.request_reply import Begin, ReplyServer, reply_headers
from echo_embedded import EmbeddedKafka
from echo_learner.sequential.replies import PARTITION, ReplyInbox
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import ChatMessage, Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Sampling
from echo_schemas.topics import REPLIES, REQUESTS, Topic

_CONTEXT = mp.get_context("spawn")
_WAIT_S = 120.0
_NAMESPACE = "bench.requestreply"
_DEADLINE_MS = 60_000
_GROUP_PARTITIONS = 4
_BARE_REQUESTS, _BARE_REPLIES = f"{_NAMESPACE}.bare-requests", f"{_NAMESPACE}.bare-replies"
# Requests of one kind before it is the other's turn.
_TURN = 50


def bus_of(bootstrap: str, role: str) -> Bus:
    """A bus for one process of the benchmark."""
    return Bus(
        cluster=KafkaCluster(bootstrap),
        namespace=Namespace(_NAMESPACE),
        role=role,
        run_id="bench",
    )


def serve(bootstrap: str, stop: Any) -> None:
    """A worker that has its receipt ready."""
    bus = bus_of(bootstrap, "worker")
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        server = ReplyServer(publisher, REPLIES, bus)

        def handle(message: Message) -> Outcome:
            request, address = message.record, server.address_of(message)
            if isinstance(request, RolloutRequest) and address is not None and server.begin(address) is Begin.NEW:
                server.answer(address, receipt(request, address.correlation_text))
            return ACCEPTED

        loop = bus.consumer([REQUESTS], "worker", handle, publisher)
        thread = threading.Thread(target=loop.run)
        thread.start()
        stop.wait(_WAIT_S)
        loop.stop()
        thread.join()


def serve_bare(bootstrap: str, stop: Any) -> None:
    """The least that answers."""
    consumer, producer = bare_clients(bootstrap, _BARE_REQUESTS)
    answer = lock_file_codec().encode(receipt(request_of(0), "0" * 32))
    while not stop.is_set():
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            producer.produce(_BARE_REPLIES, answer, partition=0)
            producer.poll(0)
    producer.flush(_WAIT_S)
    consumer.close()


def bare_clients(bootstrap: str, topic: str) -> tuple[Consumer, Producer]:
    """A consumer at the end of a topic, and a producer, with the project's own properties."""
    consumer = Consumer({**profiles.READER, "group.id": "bare", "bootstrap.servers": bootstrap, "auto.offset.reset": "latest"})
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    return consumer, Producer({**profiles.PRODUCER_LATENCY, "bootstrap.servers": bootstrap})


class BareRequester:
    """Asks the bare server."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer, self._producer = bare_clients(bootstrap, _BARE_REPLIES)
        self._value = lock_file_codec().encode(request_of(0))

    def ask(self) -> None:
        """There and back. Asked again each second, for the server may read from after the first request on."""
        for _ in range(int(_WAIT_S)):
            self._producer.produce(_BARE_REQUESTS, self._value, partition=0)
            self._producer.poll(0)
            message = self._consumer.poll(1.0)
            if message is not None and message.error() is None:
                return
        raise TimeoutError("The bare server did not answer.")


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


def measure(bootstrap: str, *, num_requests: int, warm_up: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each request after the warm-up: ours, and bare."""
    stop = _CONTEXT.Event()
    servers = [_CONTEXT.Process(target=target, args=(bootstrap, stop), daemon=True) for target in (serve, serve_bare)]
    for server in servers:
        server.start()
    bus, bare = bus_of(bootstrap, "learner"), BareRequester(bootstrap)
    ours_ms: list[float] = []
    bare_ms: list[float] = []
    answered = threading.Event()
    inbox = ReplyInbox(bus.reader([REPLIES]), lambda reply: answered.set())
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher, closing(inbox):
        inbox.start()
        asked = itertools.count()

        def ask() -> None:
            number = next(asked)
            correlation, deadline_ms = f"bench-{number}", bus.clock.time_ms() + _DEADLINE_MS
            headers = reply_headers(correlation, topic=bus.namespace.topic(REPLIES), partition=PARTITION, deadline_ms=deadline_ms)
            answered.clear()
            publisher.publish(REQUESTS, request_of(number), partition=number % _GROUP_PARTITIONS, headers=headers)
            while correlation not in (found for found, _ in inbox.take()):
                if not answered.wait(_WAIT_S):
                    raise TimeoutError("The server did not answer.")
                answered.clear()

        # The first answers say that both read.
        ask()
        bare.ask()
        for start in range(0, warm_up + num_requests, _TURN):
            ours = [timed_ms(ask) for _ in range(_TURN)]
            plain = [timed_ms(bare.ask) for _ in range(_TURN)]
            if start >= warm_up:
                ours_ms += ours
                bare_ms += plain
    stop.set()
    for server in servers:
        server.join(_WAIT_S)
    return ours_ms, bare_ms


def timed_ms(call: Callable[[], None]) -> float:
    """How long `call` took."""
    started_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_s) * 1000


def create_topics(bootstrap: str) -> None:
    """Partitions for both kinds, and where bad letters go."""
    namespace = Namespace(_NAMESPACE)

    def topics(topic: Topic, count: int) -> list[NewTopic]:
        return [NewTopic(name, count, 1) for name in (namespace.topic(topic), namespace.dead_letters(topic))]

    admin = KafkaCluster(bootstrap).admin()
    wanted = [*topics(REQUESTS, _GROUP_PARTITIONS), *topics(REPLIES, 1), NewTopic(_BARE_REQUESTS, 1, 1), NewTopic(_BARE_REPLIES, 1, 1)]
    for future in admin.create_topics(wanted).values():
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
        ours_ms, bare_ms = measure(kafka.bootstrap, num_requests=arguments.requests, warm_up=arguments.warm_up)
    ours, bare = statistics.quantiles(ours_ms, n=100), statistics.quantiles(bare_ms, n=100)
    figures = {
        "p50_ms": round(ours[49], 3),
        "p99_ms": round(ours[98], 3),
        "bare_p50_ms": round(bare[49], 3),
        "bare_p99_ms": round(bare[98], 3),
        "p50_ratio": round(ours[49] / bare[49], 2),
        "p99_ratio": round(ours[98] / bare[98], 2),
        "conditions": {"cores": len(os.sched_getaffinity(0)), "requests": len(ours_ms), "load": round(os.getloadavg()[0], 1)},
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
