"""Checks that a cluster works for every role: one record is written, read and committed, and each is timed.

The record is a tombstone on `control` for an unused key. Every reader ignores it, and compaction removes it.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from confluent_kafka import TopicPartition

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.consumer_queries import committed_offsets, open_asker
from echo_bus.client.kafka_errors import translated
from echo_bus.errors import DeadlineExceeded
from echo_replay.raw_log import RawLog
from echo_schemas.topics import CONTROL

_KEY = "doctor/probe"
_WAIT_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Seconds until all in-sync replicas acknowledged the record, until it was read, and until its position was committed and read back."""

    write_s: float
    read_s: float
    commit_s: float


def probe(bus: Bus) -> Probe:
    """Raises TransportError if writing, reading or committing fails."""
    clock = bus.clock
    begun_s = clock.monotonic_s()
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        where = publisher.publish_tombstone(CONTROL, _KEY).wait(_WAIT_S)
    written_s = clock.monotonic_s()
    with RawLog(bus, bus.namespace.topic(CONTROL), profiles.GLIMPSE) as log:
        found = [raw.key() for raw in log.between(where.partition, [where.offset])]
    if found != [_KEY.encode()]:
        raise DeadlineExceeded(f"The record that was written at offset {where.offset} of {CONTROL.name} is not there.")
    read_s = clock.monotonic_s()
    _commit(bus, where.partition, where.offset + 1)
    return Probe(write_s=written_s - begun_s, read_s=read_s - written_s, commit_s=clock.monotonic_s() - read_s)


def _commit(bus: Bus, partition: int, offset: int) -> None:
    physical, group = bus.namespace.topic(CONTROL), bus.namespace.group("replay", "doctor")
    with closing(open_asker(bus.cluster, group, bus.client_id)) as asker, translated(f"the group {group}"):
        asker.commit(offsets=[TopicPartition(physical, partition, offset)], asynchronous=False)
        found = committed_offsets(asker, group, [(physical, partition)])
    if found != {(physical, partition): offset}:
        raise DeadlineExceeded(f"The group {group} has not committed what was asked of it: {found}.")
