"""The disk space of a namespace on the brokers, and how far back its log goes at the present rate.

Kafka's Python clients cannot ask for the size of a log, so it is estimated: the mean size of each partition's newest records times the
number of all. That is before compression, so the disks hold less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.errors import TopicMissing
from echo_bus.message import raw_headers
from echo_replay.raw_log import RawLog
from echo_schemas.topic_files import TopicSpec, load_topic_specs

# The present rate is that of the last ten minutes.
_RECENT_MS = 600_000
_SAMPLE = 10
# Approximate overhead of a record in a batch, besides key, value and headers.
_OVERHEAD_BYTES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionUse:
    """Records of a partition, recent ones among them, and the mean bytes of its newest."""

    records: int
    recent: int
    mean_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicUse:
    """A topic. `num_bytes`: of one replica. `horizon_s`: seconds until a record that is written now is removed, at the present rate; None:
    retention does not remove it.
    """

    name: str
    num_bytes: float
    bytes_per_s: float
    horizon_s: float | None
    is_by_size: bool


def use_of(spec: TopicSpec, partitions: Mapping[int, PartitionUse], *, recent_s: float = _RECENT_MS / 1000) -> TopicUse:
    """Size and horizon of a topic; the horizon is that of its fastest partition."""
    paces = {number: each.recent * each.mean_bytes / recent_s for number, each in partitions.items()}
    horizon_s, is_by_size = None, False
    if "delete" in spec.config["cleanup.policy"]:
        by_time_ms, by_size = int(spec.config.get("retention.ms", -1)), int(spec.config.get("retention.bytes", -1))
        fastest = max(paces.values(), default=0.0)
        sized_s = by_size / fastest if by_size >= 0 and fastest > 0 else None
        timed_s = by_time_ms / 1000 if by_time_ms >= 0 else None
        horizon_s = min((each for each in (sized_s, timed_s) if each is not None), default=None)
        is_by_size = horizon_s is not None and horizon_s == sized_s
    return TopicUse(
        name=spec.name,
        num_bytes=sum(each.records * each.mean_bytes for each in partitions.values()),
        bytes_per_s=sum(paces.values()),
        horizon_s=horizon_s,
        is_by_size=is_by_size,
    )


def read_use(bus: Bus) -> list[TopicUse]:
    """Every existing topic of the files with records, the largest first. Raises TransportError."""
    found = []
    for spec in load_topic_specs():
        try:
            with RawLog(bus, f"{bus.namespace.name}.{spec.name}", profiles.GLIMPSE) as log:
                used = use_of(spec, _partitions(log, bus.clock.time_ms()))
        except TopicMissing:
            continue
        if used.num_bytes:
            found.append(used)
    return sorted(found, key=lambda each: each.num_bytes, reverse=True)


def _partitions(log: RawLog, now_ms: int) -> dict[int, PartitionUse]:
    recent = log.offsets_at(now_ms - _RECENT_MS)
    ranges = {number: (max(log.lows[number], end - _SAMPLE), end) for number, end in log.ends.items()}
    sizes: dict[int, list[int]] = {number: [] for number in ranges}
    for messages in log.within(ranges):
        for raw in messages:
            sizes[raw.partition() or 0].append(_size_of(raw))
    return {
        number: PartitionUse(
            records=log.ends[number] - log.lows[number],
            recent=log.ends[number] - recent[number],
            mean_bytes=sum(each) / len(each) if each else 0.0,
        )
        for number, each in sizes.items()
    }


def _size_of(raw: RawMessage) -> int:
    headers = sum(len(name) + len(value) for name, value in raw_headers(raw))
    return len(raw.key() or b"") + len(raw.value() or b"") + headers + _OVERHEAD_BYTES
