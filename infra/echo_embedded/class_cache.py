"""A cache of Kafka's parsed and linked classes (JEP 483, 514): with it a broker starts in half the time.

Built once per user, Kafka version and Java runtime by running a broker for a moment, in about fifteen seconds. It is valid for one class
path and one runtime; the JVM checks this and ignores a cache that does not fit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_embedded.folders import exclusive
from echo_embedded.installation import Installation
from echo_embedded.java import Java
from echo_embedded.readiness import SILENT
from echo_schemas.errors import EchoError

_log = logging.getLogger(__name__)

# Since Java 25 the cache is created in one step.
_OLDEST_JAVA = 25
_NUM_RECORDS = 500
_EXERCISE_TIMEOUT_S = 60.0


def ready_class_cache(
    java: Java, installation: Installation, train: Callable[[Path], None], *, report: Callable[[str], None]
) -> Path | None:
    """The cache for this runtime, built first with `train` if there is none; None if this Java has no such cache.

    `train(path)` runs a broker that writes its cache to `path` as it stops. A failure is logged, remembered and not repeated: the cache
    only saves time.
    """
    if java.major < _OLDEST_JAVA:
        return None
    cache = installation.folder / f"classes-{java.identity()}.aot"
    failed = cache.with_suffix(".failed")
    if cache.is_file():
        return cache
    with exclusive(cache.with_suffix(".lock")):
        if cache.is_file():
            return cache
        if failed.exists():
            return None
        report("Preparing a fast start of the embedded broker (once, about 15 s)")
        scratch = cache.with_suffix(".tmp")
        try:
            train(scratch)
            scratch.replace(cache)
        except (EchoError, KafkaException, OSError) as exc:
            _log.warning("The embedded broker will start without a class cache: %s", exc)
            failed.write_text(f"{exc}\n", encoding="utf-8")
            return None
    return cache


def flags_for(cache: Path | None) -> list[str]:
    """The launcher's options for the cache; the JVM logs only errors about it."""
    return [] if cache is None else [f"-XX:AOTCache={cache}", "-Xlog:aot*=error"]


def exercise(bootstrap: str) -> None:
    """Use the broker as clients do, to load the classes for the cache: create a topic, write in a transaction, read in a group.

    Raises DeadlineExceeded or confluent-kafka's KafkaException.
    """
    topic = "warm-up"
    servers: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap}
    admin = AdminClient(servers, logger=SILENT)
    admin.create_topics([NewTopic(topic, 4, 1)])[topic].result(_EXERCISE_TIMEOUT_S)
    producer = Producer({**servers, "transactional.id": topic, "compression.type": "lz4"}, logger=SILENT)
    producer.init_transactions(_EXERCISE_TIMEOUT_S)
    producer.begin_transaction()
    for index in range(_NUM_RECORDS):
        producer.produce(topic, bytes(1000), str(index))
    producer.commit_transaction(_EXERCISE_TIMEOUT_S)
    reading = {"group.id": topic, "auto.offset.reset": "earliest", "enable.auto.commit": False}
    with closing(Consumer({**servers, **reading}, logger=SILENT)) as consumer:
        consumer.subscribe([topic])
        _read(consumer, Deadline.after(_EXERCISE_TIMEOUT_S))
        consumer.commit(asynchronous=False)


def _read(consumer: Consumer, deadline: Deadline) -> None:
    num_read = 0
    while num_read < _NUM_RECORDS:
        if deadline.expired():
            raise DeadlineExceeded(f"Only {num_read} of {_NUM_RECORDS} records were read back from a new broker.")
        num_read += len(consumer.consume(_NUM_RECORDS, 0.2))
