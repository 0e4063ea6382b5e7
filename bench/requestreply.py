"""Request and reply over Kafka: from handing a small request over to having its reply, on a warm embedded broker.

    python bench/requestreply.py [--requests N] [--warm-up N] [--json FILE]

The requester and the server are separate processes, as a sequential learner and a worker are, with the same parts: a publisher with
acks=all, a `ConsumerLoop` of the workers' group, `ReplyServer`, and the learner's `ReplyInbox`. The server answers immediately, so only
the transport is measured. One request at a time.
In turn with it, "bare": the same bytes between two plain clients without group, codec, headers or cache.
"""

from __future__ import annotations

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
from typing import Any

from buses import bus_of, create_topics
from command import parser_of, save
from confluent_kafka import OFFSET_END, Consumer, Producer, TopicPartition

from echo_bus.client import profiles
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.requests.request_reply import Begin, ReplyServer, reply_headers
from echo_embedded import EmbeddedKafka
from echo_learner.sequential.replies import PARTITION, ReplyInbox
from echo_schemas.codec import lock_file_codec
from echo_schemas.records import ChatMessage, Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, Sampling
from echo_schemas.topics import REPLIES, REQUESTS

_CONTEXT = mp.get_context("spawn")
_WAIT_S = 120.0
_NAMESPACE = "bench.requestreply"
_DEADLINE_MS = 60_000
_GROUP_PARTITIONS = 4
_BARE_REQUESTS, _BARE_REPLIES = f"{_NAMESPACE}.bare-requests", f"{_NAMESPACE}.bare-replies"
# Requests of one kind before the other's turn.
_TURN = 50


def serve(bootstrap: str, stop: Any) -> None:
    """A worker that answers at once."""
    bus = bus_of(bootstrap, _NAMESPACE, "worker")
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
    """Answer with plain clients."""
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
    """A consumer at the end of a topic, and a producer, with the project's properties."""
    consumer = Consumer({**profiles.READER, "group.id": "bare", "bootstrap.servers": bootstrap, "auto.offset.reset": "latest"})
    consumer.assign([TopicPartition(topic, 0, OFFSET_END)])
    return consumer, Producer({**profiles.PRODUCER_LATENCY, "bootstrap.servers": bootstrap})


class BareRequester:
    """Asks the bare server."""

    def __init__(self, bootstrap: str) -> None:
        self._consumer, self._producer = bare_clients(bootstrap, _BARE_REPLIES)
        self._value = lock_file_codec().encode(request_of(0))

    def ask(self) -> None:
        """Send and wait for the answer. Sends again each second: the server may begin to read after the first request."""
        for _ in range(int(_WAIT_S)):
            self._producer.produce(_BARE_REQUESTS, self._value, partition=0)
            self._producer.poll(0)
            message = self._consumer.poll(1.0)
            if message is not None and message.error() is None:
                return
        raise TimeoutError("The bare server did not answer.")


def receipt(request: RolloutRequest, correlation: str) -> RolloutReply:
    """A worker's reply for a group of 16."""
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
    """A request of a sequential learner."""
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
    """The milliseconds of each request after the warm-up: ours, and bare."""
    stop = _CONTEXT.Event()
    servers = [_CONTEXT.Process(target=target, args=(bootstrap, stop), daemon=True) for target in (serve, serve_bare)]
    for server in servers:
        server.start()
    bus, bare = bus_of(bootstrap, _NAMESPACE, "learner"), BareRequester(bootstrap)
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

        # The first answers show that both servers read.
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
    """The duration of `call`."""
    started_s = time.perf_counter()
    call()
    return (time.perf_counter() - started_s) * 1000


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--warm-up", type=int, default=1_000, help="uncounted requests: the broker compiles its hot paths")
    arguments = parser.parse_args()
    with EmbeddedKafka() as kafka:
        bus = bus_of(kafka.bootstrap, _NAMESPACE)
        groups = {bus.namespace.topic(REQUESTS): _GROUP_PARTITIONS, bus.namespace.dead_letters(REQUESTS): _GROUP_PARTITIONS}
        singles = (bus.namespace.topic(REPLIES), bus.namespace.dead_letters(REPLIES), _BARE_REQUESTS, _BARE_REPLIES)
        create_topics(bus, groups | dict.fromkeys(singles, 1))
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
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
