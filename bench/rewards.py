"""Trajectories scored per second by one reward process and by two, on a real broker, with a reward that costs nothing.

    python bench/rewards.py [--count N] [--json FILE]

The topic is filled beforehand with trajectories of 1,024 tokens; the time runs from the first reward's timestamp to the last one's. For two
processes only the time in which both worked counts, without the group's assignment. The CPU time of a trajectory, including the start and
the end of the process, does not depend on other load on the machine.
"""

from __future__ import annotations

import multiprocessing as mp
import sys
import time
from typing import Any

from buses import create_topics
from command import parser_of, save
from confluent_kafka import Consumer, TopicPartition
from payload import make_trajectories

from echo_bus.client import profiles
from echo_embedded import EmbeddedKafka
from echo_runtime.opening import open_bus
from echo_runtime.process import open_role
from echo_schemas.naming import Namespace
from echo_schemas.topics import CONTROL, PROGRESS, REWARDS, TRAJECTORIES
from echo_settings import Settings

PARTITIONS = 4
TOKENS = 1_024
DISTINCT = 512
_CONTEXT = mp.get_context("spawn")
_WAIT_S = 180.0
_SOURCE = "ce_source"


def settings_of(bootstrap: str, namespace: str) -> Settings:
    """Settings of the run `bench` with the built-in reward `exact`."""
    return Settings.model_validate(
        {"run": {"name": "bench"}, "kafka": {"bootstrap": bootstrap, "namespace": namespace}, "rewards": {"exact": 1.0}}
    )


def score(bootstrap: str, namespace: str, name: str, ready: Any, go: Any, seconds: Any) -> None:
    """One reward process. It imports before the start, so that two processes start together. `seconds` [2]: the duration of the imports,
    and the CPU time after them."""
    began_s = time.monotonic()
    import echo_streams.faust_app  # noqa: F401  a slow import
    from echo_streams.run import run_reward

    seconds[0] = time.monotonic() - began_s
    with open_role(settings_of(bootstrap, namespace), "reward", name=name) as process:
        ready.release()
        go.wait(_WAIT_S)
        cpu_s = time.process_time()
        run_reward(process)
        seconds[1] = time.process_time() - cpu_s


def fill(bootstrap: str, namespace: str, count: int) -> None:
    """Make the topics and write `count` trajectories."""
    bus = open_bus(settings_of(bootstrap, namespace), "filler")
    space = bus.namespace
    wide, narrow = (
        (space.topic(TRAJECTORIES), space.topic(REWARDS)),
        (space.dead_letters(TRAJECTORIES), space.topic(PROGRESS), space.topic(CONTROL)),
    )
    create_topics(bus, dict.fromkeys(wide, PARTITIONS) | dict.fromkeys(narrow, 1))
    payloads = make_trajectories(DISTINCT, TOKENS)
    publisher = bus.publisher()
    for number in range(count):
        publisher.publish(TRAJECTORIES, payloads[number % DISTINCT])
    publisher.close(_WAIT_S)


def timestamps(bootstrap: str, namespace: str, count: int, processes: list[Any]) -> dict[str, list[int]]:
    """The timestamps in ms of `count` rewards, by the process that wrote them. Waits for them."""
    topic = Namespace(namespace).topic(REWARDS)
    consumer = Consumer({**profiles.READER, "bootstrap.servers": bootstrap, "group.id": "bench", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    found: dict[str, list[int]] = {}
    seen, deadline_s = 0, time.monotonic() + _WAIT_S
    while seen < count:
        if time.monotonic() > deadline_s or not all(process.is_alive() for process in processes):
            sys.exit(f"waited for {count} rewards, but only {seen} came")
        for message in consumer.consume(1_000, 0.5):
            if message.error() is None:
                source = dict(message.headers() or ())[_SOURCE]
                assert isinstance(source, bytes), "each of our records names its source"
                found.setdefault(source.decode(), []).append(message.timestamp()[1])
                seen += 1
    consumer.close()
    return found


def measure(bootstrap: str, num_processes: int, count: int) -> tuple[float, float, float]:
    """Rewards per second, the CPU seconds of one, and the seconds of a process's imports."""
    namespace = f"bench.rewards.{num_processes}"
    fill(bootstrap, namespace, count)
    ready, go = _CONTEXT.Semaphore(0), _CONTEXT.Event()
    seconds = [_CONTEXT.Array("d", 2) for _ in range(num_processes)]
    processes = [
        _CONTEXT.Process(target=score, args=(bootstrap, namespace, f"p{number}", ready, go, seconds[number]))
        for number in range(num_processes)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            if not ready.acquire(timeout=_WAIT_S):
                sys.exit("a reward process did not start")
        go.set()
        found = timestamps(bootstrap, namespace, count, processes)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(_WAIT_S)
    if len(found) < num_processes:
        sys.exit(f"only {len(found)} of {num_processes} processes scored anything; raise --count")
    begin, end = max(map(min, found.values())), min(map(max, found.values()))
    inside = sum(begin <= time_ms <= end for times in found.values() for time_ms in times)
    cpu_s = sum(pair[1] for pair in seconds) / count
    return inside / max(0.001, (end - begin) / 1000), cpu_s, seconds[0][0]


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--count", type=int, default=40_000)
    arguments = parser.parse_args()
    with EmbeddedKafka() as kafka:
        one, cpu_s, import_s = measure(kafka.bootstrap, 1, arguments.count)
        two, _, _ = measure(kafka.bootstrap, 2, 2 * arguments.count)
    numbers = {
        "one_process_per_s": round(one),
        "two_processes_per_s": round(two),
        "cpu_us": round(cpu_s * 1e6),
        "import_s": round(import_s, 2),
    }
    sys.stdout.write(f"one process {one:,.0f}/s, two processes {two:,.0f}/s, {cpu_s * 1e6:.0f} us of CPU each, imports {import_s:.2f} s\n")
    save(arguments.json, numbers)


if __name__ == "__main__":
    main()
