"""The data path against a bare client: trajectories through codec, publisher, a real broker with acks=all, and a consumer.

    python bench/datapath.py [--quick] [--json FILE]

Writer and reader are separate processes. "Ours" is Publisher, broker, and ConsumerLoop, which gives decoded records to a handler and
commits; "bare" is a confluent-kafka loop with fastavro to and from plain dictionaries, no headers, no checks, no commits. Both write the
same payloads. They run in turn, and medians are printed, because machines are shared and noisy.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Sequence
from typing import Any

import fastavro
from buses import bus_of, create_topics
from command import parser_of, save
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka import Message as ClientMessage
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from payload import make_reward, make_trajectories

from echo_bus.client import profiles
from echo_bus.message import ACCEPTED, Message, Outcome
from echo_bus.reading.decoding import Decoder
from echo_bus.signatures import Signer, TrustedKey, Verifier, key_id_of
from echo_bus.wire import Wire
from echo_embedded import EmbeddedKafka
from echo_runtime.tracing import GroupTracer
from echo_schemas.codec import lock_file_codec
from echo_schemas.converters import converter_of
from echo_schemas.naming import Namespace
from echo_schemas.records import Reward, Trajectory
from echo_schemas.schemas import newest
from echo_schemas.topics import REWARDS, TRAJECTORIES, Topic
from echo_settings import Settings

PARTITIONS = 4
TOKENS = 1_024
CODEC_TOKENS = 2_048
DISTINCT = 512
GROUP = 8
SENT = "bench-sent-ns"
_CONTEXT = mp.get_context("spawn")
_JOIN_S = 120.0


# The writers. Each waits for `go` and reports the time of its start.


def write_ours(bootstrap: str, namespace: str, count: int, go: Any, began: Any) -> None:
    """Through Publisher: validation, Avro, headers, receipts, metrics."""
    payloads = make_trajectories(DISTINCT, TOKENS)
    publisher = bus_of(bootstrap, namespace, "writer").publisher()
    publisher.num_partitions(TRAJECTORIES)
    go.wait(_JOIN_S)
    began.value = time.monotonic()
    for number in range(count):
        publisher.publish(TRAJECTORIES, payloads[number % DISTINCT])
    publisher.close(_JOIN_S)


def write_bare(bootstrap: str, namespace: str, count: int, go: Any, began: Any) -> None:
    """The simplest writer of the same values: fastavro from a dictionary, produce, poll."""
    schema = newest(Trajectory.SCHEMA).parsed
    convert = converter_of(Trajectory).to_plain
    payloads = [(record.group_id, convert(record)) for record in make_trajectories(DISTINCT, TOKENS)]
    producer = Producer({**profiles.PRODUCER_THROUGHPUT, "bootstrap.servers": bootstrap})
    topic = Namespace(namespace).topic(TRAJECTORIES)
    producer.list_topics(topic, timeout=_JOIN_S)
    go.wait(_JOIN_S)
    began.value = time.monotonic()
    for number in range(count):
        key, plain = payloads[number % DISTINCT]
        buffer = io.BytesIO()
        buffer.write(b"\x00\x3b\x9a\xca\x0d")
        fastavro.schemaless_writer(buffer, schema, plain)
        while True:
            try:
                producer.produce(topic, buffer.getvalue(), key)
                break
            except BufferError:
                producer.poll(0.02)
        producer.poll(0)
    producer.flush(_JOIN_S)


def write_paced(bootstrap: str, namespace: str, count: int, per_s: float) -> None:
    """Write one record every 1/per_s seconds, each with the time of the call."""
    payloads = make_trajectories(DISTINCT, TOKENS)
    publisher = bus_of(bootstrap, namespace, "writer").publisher(profiles.PRODUCER_LATENCY)
    start = time.monotonic()
    for number in range(count):
        delay = start + number / per_s - time.monotonic()
        if delay > 0:
            time.sleep(delay)
        publisher.publish(TRAJECTORIES, payloads[number % DISTINCT], headers=[(SENT, str(time.monotonic_ns()).encode())])
    publisher.close(_JOIN_S)


# The readers. Each sets `ready` when it reads, and reports the times of its first and last record.


def read_ours(bootstrap: str, namespace: str, count: int, ready: Any, results: Any, group: str = "readers") -> None:
    """Through ConsumerLoop: decoded, checked, handed to a handler, committed. A new `group` reads from the beginning."""
    latencies: list[int] = []
    seen, first, last = 0, 0.0, 0.0

    def handle(message: Message) -> Outcome:
        nonlocal seen, first, last
        seen += 1
        if seen == 1:
            first = time.monotonic()
        sent = message.headers.get(SENT) if timed else None
        if sent is not None:
            latencies.append(time.monotonic_ns() - int(sent))
        if seen == count:
            last = time.monotonic()
            loop.stop()
        return ACCEPTED

    timed = namespace.endswith("latency")
    bus = bus_of(bootstrap, namespace, "reader")
    letters = bus.publisher(profiles.PRODUCER_LATENCY)
    loop = bus.consumer([TRAJECTORIES], group, handle, letters)
    loop.on_assignment(lambda keys: ready.set())
    loop.run()
    letters.close()
    results.put((first, last, latencies))


def read_bare(bootstrap: str, namespace: str, count: int, ready: Any, results: Any) -> None:
    """The simplest reader of the same values: consume in batches, fastavro to a dictionary."""
    schema = newest(Trajectory.SCHEMA).parsed
    consumer = Consumer({**profiles.READER, "auto.offset.reset": "earliest", "bootstrap.servers": bootstrap, "group.id": "bare"})
    topic = Namespace(namespace).topic(TRAJECTORIES)
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    ready.set()
    seen, first = 0, 0.0
    while seen < count:
        for message in consumer.consume(500, 0.05):
            if message.error() is None:
                first = first or time.monotonic()
                buffer = io.BytesIO(message.value() or b"")
                buffer.seek(5)
                fastavro.schemaless_reader(buffer, schema, None)
                seen += 1
    results.put((first, time.monotonic(), []))
    consumer.close()


def run(target: Callable[..., None], *arguments: Any) -> Any:
    """Start a child process."""
    process = _CONTEXT.Process(target=target, args=arguments)
    process.start()
    return process


def finish(*processes: Any) -> None:
    """Wait for children, and stop the benchmark if one failed."""
    for process in processes:
        process.join(_JOIN_S)
        if process.exitcode != 0:
            sys.exit(f"A child process ended with {process.exitcode}.")


class DataPath:
    """Runs the measurements on one broker, each in a namespace of its own."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._number = 0

    def namespace(self, label: str) -> str:
        """A fresh namespace with its one topic."""
        self._number += 1
        name = f"bench.{self._number}.{label}"
        create_topics(bus_of(self._bootstrap, name), {Namespace(name).topic(TRAJECTORIES): PARTITIONS})
        return name

    def at_once(self, write: Any, read: Any, count: int) -> tuple[float, str]:
        """Records per second from the first written to the last read record, both processes at work; and the namespace."""
        namespace = self.namespace("once")
        go, ready, began, results = _CONTEXT.Event(), _CONTEXT.Event(), _CONTEXT.Value("d", 0.0), _CONTEXT.Queue()
        reader = run(read, self._bootstrap, namespace, count, ready, results)
        writer = run(write, self._bootstrap, namespace, count, go, began)
        if not ready.wait(_JOIN_S):
            sys.exit("The reader did not become ready.")
        go.set()
        _, last, _ = results.get(timeout=_JOIN_S)
        finish(writer, reader)
        return count / (last - began.value), namespace

    def back(self, read: Any, namespace: str, count: int) -> float:
        """Records per second from the first to the last record read, of an existing log."""
        ready, results = _CONTEXT.Event(), _CONTEXT.Queue()
        reader = run(read, self._bootstrap, namespace, count, ready, results)
        first, last, _ = results.get(timeout=_JOIN_S)
        finish(reader)
        return float((count - 1) / (last - first))

    def latency(self, count: int, per_s: float, skip: int) -> tuple[float, float]:
        """p50 and p99 in milliseconds from the writer's call to the handler, without the first `skip` records."""
        namespace = self.namespace("latency")
        ready, results = _CONTEXT.Event(), _CONTEXT.Queue()
        reader = run(read_ours, self._bootstrap, namespace, count, ready, results)
        if not ready.wait(_JOIN_S):
            sys.exit("The reader did not become ready.")
        writer = run(write_paced, self._bootstrap, namespace, count, per_s)
        _, _, latencies = results.get(timeout=_JOIN_S)
        finish(writer, reader)
        ordered = sorted(latencies[skip:])
        return ordered[len(ordered) // 2] / 1e6, ordered[int(len(ordered) * 0.99)] / 1e6


def codec_cost(rounds: int) -> dict[str, float]:
    """Microseconds of process time for one 2,048-token trajectory: median of rounds in which ours and bare take turns."""
    codec, (record,) = lock_file_codec(), make_trajectories(1, CODEC_TOKENS)
    schema, payload = newest(Trajectory.SCHEMA).parsed, codec.encode(record)
    plain, body = converter_of(Trajectory).to_plain(record), payload[5:]

    def bare_encode() -> bytes:
        buffer = io.BytesIO()
        fastavro.schemaless_writer(buffer, schema, plain)
        return buffer.getvalue()

    steps: dict[str, Callable[[], object]] = {
        "encode_us": lambda: codec.encode(record),
        "bare_encode_us": bare_encode,
        "decode_us": lambda: codec.decode(payload),
        "bare_decode_us": lambda: fastavro.schemaless_reader(io.BytesIO(body), schema, None),
    }
    number = 200
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timeit.timeit(step, number=number, timer=time.process_time) / number * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def signature_cost(rounds: int) -> dict[str, float]:
    """Microseconds of process time a record: signing, and reading with the learner's decoder, with and without checking signatures."""
    codec, namespace, private = lock_file_codec(), Namespace("bench"), Ed25519PrivateKey.generate()
    public = private.public_key()
    keys = {key_id_of(public): TrustedKey(id="bench", public=public, role="redrive", names=("*",))}
    groups: dict[str, tuple[Topic, Sequence[Trajectory | Reward]]] = {
        "trajectory": (TRAJECTORIES, make_trajectories(GROUP, TOKENS)),
        "reward": (REWARDS, [make_reward(1, index, (0, index)) for index in range(256)]),
    }
    figures: dict[str, float] = {}
    for name, (topic, records) in groups.items():
        physical = namespace.topic(topic)
        pairs = [(record.group_id.encode(), codec.encode(record)) for record in records]
        signer = Signer(private)
        headers = signer.sign(physical, pairs)
        raws = [
            ClientMessage(topic=physical, partition=0, offset=number, key=key, value=value, headers=[header], timestamp=(1, 1))
            for number, ((key, value), header) in enumerate(zip(pairs, headers, strict=True))
        ]

        def read(verifier: Verifier | None, topic: Topic = topic, raws: list[Any] = raws) -> None:
            decoder = Decoder(Wire(namespace=namespace, role="bench", codec=codec, run_id="bench", verifier=verifier), [topic])
            for raw in raws:
                decoder.decode(raw)

        steps: dict[str, Callable[[], object]] = {
            f"sign_{name}_us": lambda: signer.sign(physical, pairs),  # noqa: B023  called before the next one
            f"read_{name}_us": lambda: read(None),
            # A new verifier each time: every signature is checked once, as in a log that is read for the first time.
            f"read_signed_{name}_us": lambda: read(Verifier(lambda: keys)),
        }
        times: dict[str, list[float]] = {step: [] for step in steps}
        for _ in range(rounds):
            for step, call in steps.items():
                times[step].append(timeit.timeit(call, number=4, timer=time.process_time) / 4 / len(raws) * 1e6)
        figures |= {step: statistics.median(values) for step, values in times.items()}
    return figures


def trace_cost(rounds: int) -> dict[str, float]:
    """Microseconds of process time that tracing one group in a hundred adds to a trajectory; spans are made, encoded and dropped."""
    records = make_trajectories(4_096, 64)

    class Nowhere(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            encode_spans(spans).SerializeToString()
            return SpanExportResult.SUCCESS

    processor = BatchSpanProcessor(Nowhere())
    tracer = GroupTracer(processor, Settings.model_validate({"traces": {"share": 0.01}}), "worker", "worker.1")

    def publish() -> None:
        for record in records:
            if (followed := tracer.writes(record)) is not None:
                followed[1]()
        processor.force_flush()

    times = [timeit.timeit(publish, number=1, timer=time.process_time) / len(records) * 1e6 for _ in range(rounds)]
    return {"trace_us": statistics.median(times)}


def measure(*, quick: bool) -> dict[str, Any]:
    """All figures, and their conditions."""
    count, rounds = (2_000, 1) if quick else (30_000, 3)
    figures: dict[str, Any] = codec_cost(5 if quick else 100) | signature_cost(5 if quick else 100) | trace_cost(3 if quick else 30)
    payload = len(lock_file_codec().encode(make_trajectories(1, TOKENS)[0]))
    with EmbeddedKafka() as kafka:
        path = DataPath(kafka.bootstrap)
        path.at_once(write_ours, read_ours, count)  # a warm-up, not counted
        once: dict[str, list[float]] = {"concurrent_per_s": [], "bare_concurrent_per_s": []}
        back: dict[str, list[float]] = {"readback_per_s": [], "bare_readback_per_s": []}
        for _ in range(rounds):
            rate, namespace = path.at_once(write_ours, read_ours, count)
            once["concurrent_per_s"].append(rate)
            once["bare_concurrent_per_s"].append(path.at_once(write_bare, read_bare, count)[0])
            back["readback_per_s"].append(path.back(read_ours_again, namespace, count))
            back["bare_readback_per_s"].append(path.back(read_bare, namespace, count))
        figures |= {name: statistics.median(values) for name, values in {**once, **back}.items()}
        paced, skip = (1_000, 200) if quick else (8_000, 2_000)
        # The broker still compiles this path after tens of thousands of records: the first run is a warm-up and does not count.
        runs = [path.latency(paced, 1_000.0, skip) for _ in range(rounds + 1)][1:]
        figures["p50_ms"] = statistics.median(p50 for p50, _ in runs)
        figures["p99_ms"] = statistics.median(p99 for _, p99 in runs)
    figures["conditions"] = {
        "cores": os.cpu_count(),
        "broker": "Apache Kafka 4.3.1, embedded, 1 broker, full JIT",
        "acks": "all, idempotent, replication 1",
        "partitions": PARTITIONS,
        "payload_bytes": payload,
        "bytes_per_token": round(payload / TOKENS, 2),
        "records": count,
        "rounds": rounds,
    }
    return figures


def read_ours_again(bootstrap: str, namespace: str, count: int, ready: Any, results: Any) -> None:
    """As `read_ours`, in a group without commits."""
    read_ours(bootstrap, namespace, count, ready, results, "again")


def show(figures: dict[str, Any]) -> None:
    """The table."""

    def ratio(name: str, bare: str) -> str:
        return f"{figures[name] / figures[bare]:.2f}"

    rows = [
        ("written and read at once", "concurrent_per_s", "bare_concurrent_per_s", "{:,.0f}/s", ">= 0.7"),
        ("read back", "readback_per_s", "bare_readback_per_s", "{:,.0f}/s", ">= 0.6"),
        ("encode, 2,048 tokens", "encode_us", "bare_encode_us", "{:.1f} µs", "<= 1.7"),
        ("decode, 2,048 tokens", "decode_us", "bare_decode_us", "{:.1f} µs", "<= 1.7"),
    ]
    print(f"{'':28}{'ours':>12}{'bare':>12}{'ratio':>8}   target")
    for label, name, bare, form, target in rows:
        print(f"{label:28}{form.format(figures[name]):>12}{form.format(figures[bare]):>12}{ratio(name, bare):>8}   {target}")
    for name in ("trajectory", "reward"):
        signed, unsigned = figures[f"read_signed_{name}_us"], figures[f"read_{name}_us"]
        print(f"{f'signing a {name}':28}{figures[f'sign_{name}_us']:>9.1f} µs{'':20}   <= 100 µs")
        print(f"{f'verifying a {name}':28}{signed - unsigned:>9.1f} µs, beside {unsigned:.1f} µs of decoding   <= 100 µs")
    print(f"{'following 1 % of the groups':28}{figures['trace_us']:>9.2f} µs a trajectory")
    print(f"{'latency at 1,000/s, p50':28}{figures['p50_ms']:>9.2f} ms{'':20}   <= 1.5 ms")
    print(f"{'latency at 1,000/s, p99':28}{figures['p99_ms']:>9.2f} ms{'':20}   <= 10 ms")
    print("\n".join(f"  {name}: {value}" for name, value in figures["conditions"].items()))


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a look and for tests; the figures mean little")
    options = parser.parse_args()
    figures = measure(quick=options.quick)
    show(figures)
    save(options.json, figures)


if __name__ == "__main__":
    main()
