"""The speed of an audit: `audit_run` over trajectories on a real broker, against a bare consumer loop over the same topic.

    python bench/audit.py [--records N] [--json FILE]

In the audited run every trajectory is trained in a step of 512, one snapshot is published, and every promise holds, so the audit skips
nothing. `audit_per_s`: trajectories / seconds of the whole audit; `reading_per_s`: / seconds of reading `trajectories` alone; `bare_per_s`:
the same of `consume` without using the messages. Both take turns, and medians are printed: machines are shared and noisy. `audit_cpu_us`,
`bare_cpu_us`: the reading thread's processor time for each trajectory, which other work changes little: 20 µs are 50,000/s.
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
from buses import RUN, bus_of, create_topics
from command import parser_of, save
from confluent_kafka import Consumer, Producer, TopicPartition
from payload import GROUP_SIZE, make_manifest, make_trajectories

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_embedded import EmbeddedKafka
from echo_replay.audit import audit_run
from echo_replay.verdicts import Verdict
from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE, pack
from echo_schemas.headers import headers_of
from echo_schemas.records import Batch, Mode, Position, RewardColumn, Run, StepReport, Trajectory, VersionSpan, group_id_of
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import RUNS, STEPS, TRAJECTORIES, WEIGHT_CHUNKS, WEIGHTS, weights_key

PARTITIONS = 4
STEP_SAMPLES = 512
# Of a demo's sample, and of one of a few hundred words.
TOKENS = (160, 1_024)
_WEIGHTS = b"weights"
_WAIT_S = 300.0
_FIGURES = ("audit_per_s", "reading_per_s", "bare_per_s", "audit_cpu_us", "bare_cpu_us")

Place = tuple[int, int]


def make_run(bus: Bus, bootstrap: str, count: int, num_tokens: int) -> list[Place]:
    """Make the topics, and a run in which `count` trajectories were trained. Returns the place of each."""
    create_topics(bus, {f"{bus.namespace.name}.{spec.name}": min(spec.partitions, PARTITIONS) for spec in load_topic_specs()})
    places = write_trajectories(bus, bootstrap, count, num_tokens)
    with closing(bus.publisher()) as publisher:
        publisher.publish(RUNS, _run(count)).wait(_WAIT_S)
        blob = bus.blob_writer(publisher).write(WEIGHT_CHUNKS, RUN, "v/0", _WEIGHTS)
        next_seq = count // GROUP_SIZE
        manifest = make_manifest(0, {"weights": _WEIGHTS}, blob=blob, session="s", checkpoint="v0-s", next_seq=next_seq, created_ms=1)
        for key in (weights_key(RUN, 0), weights_key(RUN, None)):
            publisher.publish(WEIGHTS, manifest, key=key, partition=0)
        for version, start in enumerate(range(0, count, STEP_SAMPLES), 1):
            publisher.publish(STEPS, step_report(version, start, places[start : start + STEP_SAMPLES]), partition=0)
        publisher.flush(_WAIT_S)
    return places


def write_trajectories(bus: Bus, bootstrap: str, count: int, num_tokens: int) -> list[Place]:
    """Write the trajectories. Returns the place of each."""
    producer = Producer({**profiles.PRODUCER_THROUGHPUT, "bootstrap.servers": bootstrap})
    sha256 = hashlib.sha256(_WEIGHTS).hexdigest()
    kinds = [
        replace(
            made,
            min_version=0,
            max_version=0,
            version_spans=tuple(VersionSpan(start=span.start, end=span.end, version=0) for span in made.version_spans),
            weights_sha256=sha256,
        )
        for made in make_trajectories(STEP_SAMPLES, num_tokens)
    ]
    places: list[Place] = [(0, 0)] * count
    physical = bus.namespace.topic(TRAJECTORIES)

    def delivered(number: int) -> Any:
        def note(error: Any, message: Any) -> None:
            assert error is None, error
            places[number] = (message.partition(), message.offset())

        return note

    for number in range(count):
        seq, index = divmod(number, GROUP_SIZE)
        record: Trajectory = replace(
            kinds[number % len(kinds)], seq=seq, index=index, group_id=group_id_of(RUN, seq), attempt=f"{seq:016x}"
        )
        value, headers = bus.codec.encode(record), headers_of(record, source="worker-1", time_ms=record.finished_ms)
        while True:
            try:
                producer.produce(physical, value, record.group_id, on_delivery=delivered(number), headers=list(headers))
                break
            except BufferError:
                producer.poll(0.02)
        producer.poll(0)
    assert producer.flush(_WAIT_S) == 0, "waited for the trajectories to be acknowledged"
    return places


def step_report(version: int, start: int, places: Sequence[Place]) -> StepReport:
    """A step that trained the samples from number `start` on."""
    size, numbers = len(places), np.arange(start, start + len(places))
    seqs = numbers // GROUP_SIZE
    batch = Batch(
        num_samples=size,
        partitions=pack([partition for partition, _ in places], TOKEN_DTYPE),
        offsets=pack([offset for _, offset in places], OFFSET_DTYPE),
        seqs=pack(seqs, OFFSET_DTYPE),
        indices=pack(numbers % GROUP_SIZE, TOKEN_DTYPE),
        attempts=tuple(f"{seq:016x}" for seq in np.unique(seqs)),
        group_sizes=pack(np.unique(seqs, return_counts=True)[1], TOKEN_DTYPE),
        rewards=(RewardColumn(name="exact", values=pack(np.zeros(size), VALUE_DTYPE), defaulted=pack(np.zeros(size), FLAG_DTYPE)),),
        advantages=pack(np.zeros(size), LOGPROB_DTYPE),
        order=pack(np.arange(size), TOKEN_DTYPE),
        micro_batches=pack([size], TOKEN_DTYPE),
        updates=pack([1], TOKEN_DTYPE),
    )
    return StepReport(
        run_id=RUN,
        session="s",
        version=version,
        checkpoint=f"v{version}-s",
        parent=f"v{version - 1}-s",
        batch=batch,
        positions=tuple(Position(partition=number, low=0, read_to=0) for number in range(PARTITIONS)),
        time_ms=2,
    )


def _run(count: int) -> Run:
    return Run(
        run_id=RUN,
        mode=Mode.ASYNCHRONOUS,
        task="bench",
        model="bench",
        seed=0,
        config="{}",
        staleness_budget=count,
        publication_period=1,
        group_size=GROUP_SIZE,
        groups_per_step=STEP_SAMPLES // GROUP_SIZE,
        created_ms=1,
    )


def read_bare(bus: Bus, bootstrap: str, count: int) -> tuple[float, float]:
    """Seconds from the first message to the last, and the thread's processor seconds among them."""
    consumer = Consumer({**profiles.READER, "bootstrap.servers": bootstrap, "group.id": "bare"})
    consumer.assign([TopicPartition(bus.namespace.topic(TRAJECTORIES), number, 0) for number in range(PARTITIONS)])
    try:
        read, started_s, worked_s = 0, 0.0, time.thread_time()
        while read < count:
            messages = consumer.consume(2_000, 0.05)
            if messages and not started_s:
                started_s = time.monotonic()
            read += sum(message.error() is None and message.value() is not None for message in messages)
        return time.monotonic() - started_s, time.thread_time() - worked_s
    finally:
        consumer.close()


def measure(count: int, rounds: int) -> dict[str, Any]:
    """All figures, and their conditions."""
    figures: dict[str, Any] = {}
    with EmbeddedKafka() as kafka:
        for num_tokens in TOKENS:
            bus = bus_of(kafka.bootstrap, f"bench.audit{num_tokens}")
            make_run(bus, kafka.bootstrap, count, num_tokens)
            taken: dict[str, list[float]] = {name: [] for name in _FIGURES}
            for _ in range(rounds):
                worked_s = time.thread_time()
                report = audit_run(bus, RUN)
                worked_s = time.thread_time() - worked_s
                assert report.verdict is Verdict.PROVED, report.to_plain()
                assert report.counts["trained"] == count
                bare_s, bare_worked_s = read_bare(bus, kafka.bootstrap, count)
                values = (
                    count / report.seconds,
                    count / report.reading_s,
                    count / bare_s,
                    worked_s / count * 1e6,
                    bare_worked_s / count * 1e6,
                )
                for name, value in zip(_FIGURES, values, strict=True):
                    taken[name].append(value)
            figures[f"{num_tokens}_tokens"] = {name: round(statistics.median(values), 1) for name, values in taken.items()}
    return figures | {"conditions": {"cores": os.cpu_count(), "records": count, "rounds": rounds, "partitions": PARTITIONS}}


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--records", type=int, default=131_072, help="trajectories of the run, a multiple of 512")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = measure(options.records, options.rounds)
    print(f"{'':14}" + "".join(f"{name:>16}" for name in _FIGURES))
    for name, values in figures.items():
        if name != "conditions":
            print(f"{name:14}" + "".join(f"{values[each]:>16,.1f}" for each in _FIGURES))
    print("\n".join(f"  {name}: {value}" for name, value in figures["conditions"].items()))
    save(options.json, figures)


if __name__ == "__main__":
    main()
