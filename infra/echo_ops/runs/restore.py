"""Restores an archived run into Kafka: each record at its old offset, with its bytes, its headers and its time.

Records name one another by partition and offset, and signatures name the topic. So the topics must be empty, of the same namespace, and have
the same number of partitions. Fillers, which no reader takes for a record, stand in the place of other messages between the records (marks
of transactions, other runs). Offsets that retention had removed are removed again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translated
from echo_bus.client.publisher import Publisher
from echo_ops.runs.archive import Archive, ArchivedTopic, Digest, archived_records, kept_of, read_archive
from echo_replay.raw_log import RawLog
from echo_schemas.errors import UserError
from echo_schemas.headers import FILLER_RUN, RUN
from echo_schemas.topic_files import TopicSpec, load_topic_specs

_WAIT_S = 60.0
_VERY_OLD_MS = 1
# Compacted topics refuse a record without a key.
_FILLER_KEY, _FILLER_HEADERS = f"{FILLER_RUN}/filler".encode(), ((RUN, FILLER_RUN.encode()),)
# Restored records keep their old time. Without these limits they stay until `topics apply` sets the limits of the topic files again.
_LIMITS = ("retention.ms", "retention.bytes")
# Whose time a record has, the writer's or the broker's. Set to the writer's while the records are restored.
_TIME = "message.timestamp.type"


def restore_run(bus: Bus, home: Path) -> Archive:
    """Write the archive in `home` into the topics of its namespace, and read it back.

    Raises UserError for a folder without a whole archive, unsuitable topics, or a log that differs from the archive; TransportError.
    """
    archive = read_archive(home)
    if archive.namespace != bus.namespace.name:
        raise UserError(
            f"The archive is of the namespace {archive.namespace!r}, and this is {bus.namespace.name!r}.",
            hint=f"Its signatures name its topics: set [kafka] namespace = {archive.namespace!r}, on any cluster.",
        )
    topics = {f"{archive.namespace}.{name}": topic for name, topic in archive.topics.items()}
    for physical, topic in topics.items():
        _require_empty(bus, physical, topic)
    _alter(bus, archive, lambda spec: [_set(key, "-1") for key in _LIMITS if key in spec.config] + [_set(_TIME, "CreateTime")])
    with closing(bus.publisher()) as publisher:
        for name, topic in archive.topics.items():
            _write(publisher, f"{archive.namespace}.{name}", topic, home, name)
            publisher.flush(_WAIT_S)
    _let_brokers_tell_the_time(bus, archive)
    _remove_before(bus, topics)
    for physical, topic in topics.items():
        _compare(bus, archive.run_id, physical, topic)
    return archive


def _require_empty(bus: Bus, physical: str, topic: ArchivedTopic) -> None:
    with RawLog(bus, physical) as log:
        if log.num_partitions != len(topic.bounds):
            raise UserError(
                f"{physical} has {log.num_partitions} partitions and had {len(topic.bounds)}.",
                hint="Make the topics anew, with as many: the records name one another by partition and offset.",
            )
        if any(log.ends.values()):
            raise UserError(
                f"{physical} has held records already.",
                hint="A run comes back into new topics: `echoswarm runs delete` or another cluster, then `echoswarm topics apply`.",
            )


def _let_brokers_tell_the_time(bus: Bus, archive: Archive) -> None:
    """Set the time type of the topic's file; without one, the default of the cluster."""

    def entry(spec: TopicSpec) -> list[ConfigEntry]:
        if _TIME in spec.config:
            return [_set(_TIME, spec.config[_TIME])]
        return [ConfigEntry(_TIME, None, incremental_operation=AlterConfigOpType.DELETE)]

    _alter(bus, archive, entry)


def _set(key: str, value: str) -> ConfigEntry:
    return ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)


def _alter(bus: Bus, archive: Archive, entries_of: Callable[[TopicSpec], list[ConfigEntry]]) -> None:
    resources = [
        ConfigResource(ResourceType.TOPIC, f"{archive.namespace}.{spec.name}", incremental_configs=entries_of(spec))
        for spec in load_topic_specs()
        if spec.name in archive.topics
    ]
    _done(bus, lambda admin: admin.incremental_alter_configs(resources, request_timeout=_WAIT_S))


def _write(publisher: Publisher, physical: str, topic: ArchivedTopic, home: Path, name: str) -> None:
    positions = [0] * len(topic.bounds)
    # A filler has the time of the next record: readers look up offsets by time.
    times = [_VERY_OLD_MS] * len(topic.bounds)

    def fill(number: int, end: int) -> None:
        for _ in range(positions[number], end):
            publisher.publish_bytes(physical, None, key=_FILLER_KEY, headers=_FILLER_HEADERS, partition=number, time_ms=times[number])
        positions[number] = end

    for kept in archived_records(home, name):
        number, headers = kept["partition"], [(header["name"], header["value"]) for header in kept["headers"]]
        times[number] = kept["time_ms"]
        fill(number, kept["offset"])
        publisher.publish_bytes(
            physical, kept["value"], key=kept["key"], headers=headers, partition=number, time_ms=kept["time_ms"]
        )  # fmt: skip
        positions[number] += 1
    for number, (_, end) in enumerate(topic.bounds):
        fill(number, end)


def _remove_before(bus: Bus, topics: dict[str, ArchivedTopic]) -> None:
    """Remove the offsets that were removed before the archive was made."""
    lows = [
        TopicPartition(physical, number, low) for physical, topic in topics.items() for number, (low, _) in enumerate(topic.bounds) if low
    ]
    if lows:
        _done(bus, lambda admin: admin.delete_records(lows, request_timeout=_WAIT_S))


def _compare(bus: Bus, run_id: str, physical: str, topic: ArchivedTopic) -> None:
    digest = Digest()
    with RawLog(bus, physical) as log:
        for kept in kept_of(chain.from_iterable(log.messages()), run_id):
            digest.add(kept)
    if (digest.count, digest.text) != (topic.records, topic.digest):
        raise UserError(
            f"{physical} does not hold what was written: {digest.count:,} records of {topic.records:,}.",
            hint="Does another process write to it? Remove the topics (`echoswarm runs delete`) and begin again.",
        )


def _done(bus: Bus, ask: Callable[[Any], dict[Any, Future[Any]]]) -> None:
    # Keep the client in a variable: one that is collected cancels its requests.
    admin = bus.cluster.admin()
    with translated("the cluster"):
        for future in ask(admin).values():
            future.result()
