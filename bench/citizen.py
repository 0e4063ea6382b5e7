"""Waiting times of an operator: for a secured Kafka, a list of a hundred thousand dead letters, a scrape of a learner with many series.

python bench/citizen.py [--letters N] [--rounds N] [--json FILE]

secure_ready_s   `echoswarm kafka up --secure`, from the call to its end: the broker answers, users and access lists exist; each round
dlq_list_s       `echoswarm dlq list` of N letters with values of a kilobyte, start included; the worst round, and processor time
scrape_ms        GET /metrics of a learner's metrics, every bounded label full; median and worst of a hundred; `cpu`: processor
                     time of server and client together
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from command import parser_of, save
from confluent_kafka import Message as ClientMessage

from echo_bus.dead_letters import dead_letter_of
from echo_bus.metrics import BusMetrics
from echo_learner.metrics import LearnerMetrics
from echo_runtime.opening import open_bus
from echo_runtime.server import MetricsServer
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import TRAJECTORIES
from echo_settings import load_settings

_VALUE_BYTES = 1_000
_NUM_WRITERS = 40
_SCRAPES = 100
# More names than any label keeps: further names share one series.
_NAMES = 1_000
_STEP_METRICS = 200


def main() -> None:
    """Measure, and print one JSON object."""
    parser = parser_of(__doc__)
    parser.add_argument("--letters", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, Any] = {**scraped(), **operated(arguments.letters, arguments.rounds)}
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    save(arguments.json, found)


def scraped() -> dict[str, Any]:
    """A scrape over loopback, from the request to the last byte."""
    learner = LearnerMetrics()
    bus = BusMetrics(learner.registry)
    for number in range(_NAMES):
        worker = learner.worker_label.of(f"gpu-{number}")
        learner.claims.labels(worker, "kept").inc()
        learner.claims.labels(worker, "unsure").inc()
        learner.cost.labels(learner.kind_label.of(f"kind-{number}"), "busy").inc()
    for number in range(_STEP_METRICS):
        learner.step.labels(f"metric_{number}").set(number)
    for spec in load_topic_specs():
        bus.records_published.labels(spec.name).inc()
        bus.bytes_published.labels(spec.name).inc()
        bus.publish_seconds.labels(spec.name).observe(0.01)
        bus.publish_blocked_seconds.labels(spec.name).inc()
    with MetricsServer(learner.registry) as server:
        times, began_cpu_s = [], time.process_time()
        for _ in range(_SCRAPES):
            started_s = time.perf_counter()
            with urllib.request.urlopen(f"{server.url}/metrics") as page:
                body = page.read()
            times.append(1000 * (time.perf_counter() - started_s))
        cpu_ms = 1000 * (time.process_time() - began_cpu_s) / _SCRAPES
    num_series = sum(not line.startswith(b"#") for line in body.splitlines())
    return {
        "series": num_series,
        "scrape_ms": round(statistics.median(times), 1),
        "scrape_worst_ms": round(max(times), 1),
        "scrape_cpu_ms": round(cpu_ms, 1),
    }


def operated(num_letters: int, num_rounds: int) -> dict[str, Any]:
    """Run the commands, each as a process."""
    with tempfile.TemporaryDirectory(prefix="echoswarm-citizen-") as name:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ECHO_")} | {"ECHO_STATE_FOLDER": name}
        os.environ["ECHO_STATE_FOLDER"] = name
        try:
            ready_s = []
            for number in range(num_rounds):
                ready_s.append(_took(environ, "kafka", "up", "--secure"))
                if number < num_rounds - 1:
                    _took(environ, "kafka", "down", "--delete-data")
            _took(environ, "topics", "apply")
            _write_letters(num_letters)
            began_cpu_s = _children_cpu_s()
            list_s = max(_took(environ, "dlq", "list") for _ in range(num_rounds))
            list_cpu_s = (_children_cpu_s() - began_cpu_s) / num_rounds
        finally:
            _took(environ, "kafka", "down", "--delete-data")
    return {
        "secure_ready_s": [round(each, 1) for each in ready_s],
        "letters": num_letters,
        "dlq_list_s": round(list_s, 1),
        "dlq_list_cpu_s": round(list_cpu_s, 1),
    }


def _children_cpu_s() -> float:
    """Processor time of the commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _took(environ: dict[str, str], *words: str) -> float:
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-m", "echo_ops.cli", *words], env=environ, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started_s


def _write_letters(num_letters: int) -> None:
    """Write dead letters of `trajectories`, as a learner would."""
    bus = open_bus(load_settings(None, {}), "learner")
    value, physical = os.urandom(_VALUE_BYTES), bus.namespace.topic(TRAJECTORIES)
    reasons = list(InvalidReason)
    publisher = bus.publisher()
    for number in range(num_letters):
        headers: list[Any] = [("ce_source", f"echo.demo.worker.{number % _NUM_WRITERS}".encode()), ("echo-run", b"demo")]
        raw: Any = ClientMessage(
            topic=physical, partition=number % 8, offset=number, key=b"demo/1", value=value, headers=headers, timestamp=(1, 1_000)
        )
        letter = dead_letter_of(raw, InvalidRecord(reasons[number % len(reasons)], "It was wrong."), group="echo.demo.learner", whole=True)
        publisher.publish_bytes(bus.namespace.dead_letters(TRAJECTORIES), letter.value, key=letter.key, headers=letter.headers)
    publisher.close(120.0)


if __name__ == "__main__":
    main()
