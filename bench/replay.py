"""The speed of reading, exporting and rescoring the past: each against a bare loop over the same topic, in the same run.

    python bench/replay.py [--records N] [--many N] [--rounds R] [--json FILE]

`--records` trajectories of 1,024 tokens, each with a reward and a fate, and `--many` of 60 tokens for seeking and memory.

scan_per_s         the history: decoded, joined with rewards and fates
export_per_s       `export_run` of the whole run
rescore_per_s      a reward that costs nothing, on two processes, into `rewards`, from its first values on
bare_decode_per_s  `consume` and fastavro to dictionaries only
bare_export_per_s  the same, into Parquet files of strings and numbers, by pyarrow
seek_s             from an open history to the first record of a step in the middle of many
attach_to_score_s  `echoswarm reward attach` from the command to its first record
peak_mb            the largest resident memory of scan, export and rescore over the many, each in a process of its own

All take turns, and medians are printed: machines are shared and noisy. `cpu_us`: processor time of a record over all threads and scoring
processes, which other work changes little.
"""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
from audit import PARTITIONS, STEP_SAMPLES, make_run
from buses import RUN, bus_of
from command import parser_of, save
from confluent_kafka import Consumer, TopicPartition
from payload import GROUP_SIZE, make_reward
from pyarrow import parquet

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka
from echo_replay.export.exporter import export_run
from echo_replay.history import History
from echo_replay.rescoring.inside import ScoringTask
from echo_replay.rescoring.order import RescoreOrder
from echo_replay.rescoring.rescorer import Estimate, rescore
from echo_replay.rescoring.sinks import topic_rewards
from echo_replay.rescoring.team import Team
from echo_replay.selection import Selection, Steps
from echo_schemas.records import Reward, RewardOutcome, Trajectory
from echo_schemas.schemas import newest
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_settings import Settings
from echo_tasks.catalogue import load_reward

LONG, SHORT = 1_024, 60
_AT_ONCE = 500
_WAIT_S = 300.0
_REWARD = "return"
_CONTEXT = mp.get_context("spawn")
RATES = ("scan_per_s", "export_per_s", "rescore_per_s", "bare_decode_per_s", "bare_export_per_s")

Work = Callable[[str, str, int, int], float]
"""From a broker, a namespace, a number of records and the number of a round: records a second."""


def fill(bootstrap: str, namespace: str, count: int, num_tokens: int) -> None:
    """Make a run in which every trajectory has a reward and was trained."""
    bus = bus_of(bootstrap, namespace)
    places = make_run(bus, bootstrap, count, num_tokens)
    with closing(bus.publisher()) as publisher:
        for number, place in enumerate(places):
            publisher.publish(REWARDS, make_reward(*divmod(number, GROUP_SIZE), place, float(number % 2)), partition=place[0])
        publisher.flush(_WAIT_S)


def scan(bootstrap: str, namespace: str, count: int, _round: int) -> float:
    """The history."""
    with History(bus_of(bootstrap, namespace), RUN) as history:
        started_s = time.monotonic()
        found = sum(bool(told.rewards) and told.step is not None for told in history.read())
        seconds = time.monotonic() - started_s
    assert found == count, f"{found} of {count} records have rewards and a fate"
    return count / seconds


def export(bootstrap: str, namespace: str, count: int, _round: int) -> float:
    """The whole run into a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        started_s = time.monotonic()
        done = export_run(bus_of(bootstrap, namespace), RUN, Path(folder))
        seconds = time.monotonic() - started_s
    assert done.num_new == count
    return count / seconds


def score(bootstrap: str, namespace: str, count: int, number: int) -> float:
    """A rescore under a name of its own."""
    bus = replace(bus_of(bootstrap, namespace), role="rescore")
    begun: list[tuple[float, int]] = []

    def begin(estimate: Estimate) -> bool:
        begun.append((time.monotonic(), estimate.num))
        return True

    order = RescoreOrder(run_id=RUN, name=f"again{number}", code_version="1", compared="exact")
    task = ScoringTask(path=_REWARD, order=order, settings=Settings())
    team = Team(task, load_reward(_REWARD), 2)
    with History(bus, RUN) as history, topic_rewards(bus, RUN, order.name) as sink, team:
        told = history.undecoded(answered=order.name)
        done = rescore(order, told, team, sink, codec=bus.codec, clock=bus.clock, tried=begin)
    ((started_s, num_before),) = begun
    assert done.outcomes[RewardOutcome.SCORED] == count
    return (count - num_before) / (time.monotonic() - started_s)


def bare_decode(bootstrap: str, namespace: str, count: int, _round: int) -> float:
    """`consume` and fastavro."""
    return _bare(bootstrap, namespace, count, lambda _records: None)


def bare_export(bootstrap: str, namespace: str, count: int, _round: int) -> float:
    """The same, into one Parquet file."""
    with tempfile.TemporaryDirectory() as folder:
        writers: list[Any] = []

        def write(records: list[dict[str, Any]]) -> None:
            plain = [
                {name: record[name] for name in ("group_id", "seq", "prompt", "completion", "token_ids", "logprobs")} for record in records
            ]
            table = pa.Table.from_pylist(plain)
            if not writers:
                writers.append(parquet.ParquetWriter(Path(folder) / "all.parquet", table.schema, compression="zstd"))
            writers[0].write_table(table)

        rate = _bare(bootstrap, namespace, count, write)
        writers[0].close()
        return rate


def _bare(bootstrap: str, namespace: str, count: int, take: Callable[[list[dict[str, Any]]], None]) -> float:
    schema = newest(Trajectory.SCHEMA).parsed
    consumer = Consumer({**profiles.READER, "bootstrap.servers": bootstrap, "group.id": "bare"})
    topic = bus_of(bootstrap, namespace).namespace.topic(TRAJECTORIES)
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    try:
        read, started_s = 0, 0.0
        while read < count:
            messages = [message for message in consumer.consume(_AT_ONCE, 0.05) if message.error() is None]
            started_s = started_s or (time.monotonic() if messages else 0.0)
            records: list[Any] = []
            for message in messages:
                buffer = io.BytesIO(message.value() or b"")
                buffer.seek(5)
                records.append(fastavro.schemaless_reader(buffer, schema, None))
            read += len(records)
            if records:
                take(records)
        return count / (time.monotonic() - started_s)
    finally:
        consumer.close()


WORKS: dict[str, Work] = {
    "scan_per_s": scan,
    "export_per_s": export,
    "rescore_per_s": score,
    "bare_decode_per_s": bare_decode,
    "bare_export_per_s": bare_export,
}


def seek(bus: Bus, count: int) -> float:
    """Seconds to the first record of a step in the middle."""
    with History(bus, RUN) as history:
        middle = count // STEP_SAMPLES // 2
        started_s = time.monotonic()
        told = next(history.read(Selection(range=Steps(middle, middle)), rewards=False))
        seconds = time.monotonic() - started_s
    assert told.step == middle
    return seconds


def attach(bootstrap: str, namespace: str) -> float:
    """Seconds from the command to its first record."""
    environment = {**os.environ, "ECHO_KAFKA__BOOTSTRAP": bootstrap, "ECHO_KAFKA__NAMESPACE": namespace, "ECHO_RUN__NAME": RUN}
    with tempfile.TemporaryDirectory() as folder, closing(bus_of(bootstrap, namespace).reader([REWARDS])) as reader:
        reader.start({place: high for place, (_, high) in reader.bounds().items()})
        (Path(folder) / "mine.py").write_text("def one(sample):\n    return 1.0\n", encoding="utf-8")
        commands = [sys.executable, "-m", "echo_ops.cli", "reward"]
        started_s, deadline = time.monotonic(), Deadline.after(_WAIT_S)
        asked = subprocess.Popen(
            [*commands, "attach", "mine.py:one", "--from", "beginning", "--sample", "0.02"], cwd=folder, env=environment
        )
        while not any(isinstance(message.record, Reward) and message.record.application == "one" for message in reader.read(timeout_s=0.1)):
            assert not deadline.expired(), "waited for the first record of what was attached"
        seconds = time.monotonic() - started_s
        assert asked.wait(_WAIT_S) == 0
        subprocess.run([*commands, "detach", "one"], cwd=folder, env=environment, check=True, timeout=_WAIT_S)
    return seconds


def alone(work: str, bootstrap: str, namespace: str, count: int, number: int) -> tuple[float, float, float]:
    """The result of `work`, the most megabytes of its process, and its processor time for a record in microseconds."""
    receiving, sending = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_alone, args=(work, bootstrap, namespace, count, number, sending))
    process.start()
    sending.close()
    try:
        found: tuple[float, float, float] = receiving.recv()
    except EOFError:
        sys.exit(f"{work} has failed")
    process.join(_WAIT_S)
    return found


def _alone(work: str, bootstrap: str, namespace: str, count: int, number: int, sending: Any) -> None:
    # Import first, so that imports are not measured.
    bus_of(bootstrap, namespace)
    import echo_replay.export.columns  # noqa: F401

    before_s = _cpu_s()
    rate = WORKS[work](bootstrap, namespace, count, number)
    sending.send((rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, (_cpu_s() - before_s) / count * 1e6))


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def measure(records: int, many: int, rounds: int) -> dict[str, Any]:
    """All figures."""
    taken: dict[str, list[float]] = {name: [] for name in RATES}
    cpu: dict[str, list[float]] = {name: [] for name in RATES}
    peaks: dict[str, float] = {}
    with EmbeddedKafka() as kafka:
        fill(kafka.bootstrap, "bench.long", records, LONG)
        for number in range(rounds):
            # In a run of its own: later measurements would read the records of a rescore.
            again = f"bench.again{number}"
            fill(kafka.bootstrap, again, records, LONG)
            for name in RATES:
                namespace = again if name == "rescore_per_s" else "bench.long"
                rate, _, cpu_us = alone(name, kafka.bootstrap, namespace, records, number)
                taken[name].append(rate)
                cpu[name].append(cpu_us)
                print(f"  {name} {rate:,.0f}, {cpu_us:.0f} us", flush=True)
        attach_s = attach(kafka.bootstrap, "bench.long")
        fill(kafka.bootstrap, "bench.many", many, SHORT)
        seek_s = seek(bus_of(kafka.bootstrap, "bench.many"), many)
        for name in RATES[:3]:
            rate, peaks[name], _ = alone(name, kafka.bootstrap, "bench.many", many, 0)
            print(f"  {many:,} short ones: {name} {rate:,.0f}, {peaks[name]:,.0f} MB", flush=True)
    figures: dict[str, Any] = {name: round(statistics.median(values), 1) for name, values in taken.items()}
    figures["cpu_us"] = {name: round(statistics.median(values), 1) for name, values in cpu.items()}
    return {**figures, "seek_s": round(seek_s, 3), "attach_to_score_s": round(attach_s, 2), "peak_mb": round(max(peaks.values()))}


def main() -> None:
    """The command."""
    parser = parser_of(__doc__)
    parser.add_argument("--records", type=int, default=40_960, help="trajectories of 1,024 tokens, a multiple of 512")
    parser.add_argument("--many", type=int, default=1_048_576, help="trajectories of 60 tokens, a multiple of 512")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = measure(options.records, options.many, options.rounds)
    bare, bare_us = figures["bare_decode_per_s"], figures["cpu_us"]["bare_decode_per_s"]
    for name, value in figures.items():
        if name in RATES:
            cpu_us = figures["cpu_us"][name]
            print(f"{name:20}{value:>12,.0f}  {value / bare:.2f} of bare decoding; {cpu_us:.0f} us, {bare_us / cpu_us:.2f} of it")
        elif name != "cpu_us":
            print(f"{name:20}{value:>12,.2f}")
    save(options.json, figures)


if __name__ == "__main__":
    main()
