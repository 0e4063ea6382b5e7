"""Where a reward application begins to read: at the log's end, at its beginning, at a version or at a time.

Threads: every function asks the cluster and blocks the caller.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from confluent_kafka import KafkaException, TopicPartition

from echo_bus.bus import Bus
from echo_bus.client.consumer_queries import committed_offsets, open_asker
from echo_bus.client.kafka_errors import translate
from echo_bus.clock import Deadline
from echo_schemas.errors import UserError
from echo_schemas.records import StepReport
from echo_schemas.topics import STEPS, TRAJECTORIES

_READ_S = 30.0


class Since(StrEnum):
    NOW = "now"
    BEGINNING = "beginning"
    VERSION = "version"
    TIME = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """Where to begin. `version` and `time_ms` (Unix): for these kinds only."""

    since: Since
    version: int = 0
    time_ms: int = 0


def parse_beginning(text: str) -> Beginning:
    """`now`, `beginning`, `version:120` or a time such as `2026-11-20T10:00`, UTC unless it says otherwise. Raises UserError."""
    if text in {Since.NOW, Since.BEGINNING}:
        return Beginning(since=Since(text))
    kind, _, number = text.partition(":")
    if kind == Since.VERSION and number.isdecimal():
        version = int(number)
        return Beginning(since=Since.VERSION, version=version) if version else Beginning(since=Since.BEGINNING)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UserError(
            f"{text!r} is no place to begin at.", hint="Write now, beginning, version:120, or a time such as 2026-11-20T10:00 (UTC)."
        ) from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    # Brokers refuse times before 1970.
    return Beginning(since=Since.TIME, time_ms=max(0, round(moment.timestamp() * 1000)))


def offsets_of(bus: Bus, beginning: Beginning) -> dict[int, int]:
    """The first offset to read of every partition of `trajectories`. Raises UserError for a version that the run has not reached, or
    TransportError.
    """
    with closing(bus.look([TRAJECTORIES])) as reader:
        if beginning.since in {Since.NOW, Since.BEGINNING}:
            which = 0 if beginning.since is Since.BEGINNING else 1
            found = {place: bounds[which] for place, bounds in reader.bounds().items()}
        else:
            time_ms = beginning.time_ms if beginning.since is Since.TIME else _trained_ms(bus, beginning.version)
            found = reader.offsets_at(time_ms)
    return {partition: offset for (_, partition), offset in found.items()}


def as_time(bus: Bus, beginning: Beginning) -> str:
    """The same beginning as text for a process that may not read `steps`: a version becomes the time at which it was trained.

    Raises as `offsets_of`.
    """
    if beginning.since in {Since.NOW, Since.BEGINNING}:
        return beginning.since.value
    time_ms = beginning.time_ms if beginning.since is Since.TIME else _trained_ms(bus, beginning.version)
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")


def num_between(bus: Bus, starts: dict[int, int]) -> int:
    """The number of offsets of `trajectories` from `starts` to its present end. Raises TransportError."""
    with closing(bus.look([TRAJECTORIES])) as reader:
        return sum(max(0, high - max(low, starts.get(partition, low))) for (_, partition), (low, high) in reader.bounds().items())


def positions_of(bus: Bus, group: str) -> dict[int, int]:
    """The offsets of `trajectories` that `group` has committed; empty for a new group. Raises TransportError."""
    physical = bus.namespace.topic(TRAJECTORIES)
    with closing(bus.look([TRAJECTORIES])) as reader:
        places = [(physical, partition) for _, partition in reader.places]
    with closing(open_asker(bus.cluster, group, bus.client_id)) as asker:
        return {partition: offset for (_, partition), offset in committed_offsets(asker, group, places).items()}


def place_group(bus: Bus, group: str, starts: dict[int, int]) -> None:
    """Let `group` begin at `starts`. Raises UserError if it has members, whose commits would undo this; TransportError."""
    physical = bus.namespace.topic(TRAJECTORIES)
    offsets = [TopicPartition(physical, partition, offset) for partition, offset in starts.items()]
    try:
        with closing(open_asker(bus.cluster, group, bus.client_id)) as asker:
            asker.commit(offsets=offsets, asynchronous=False)
    except KafkaException as exc:
        if exc.args[0].name() in _HAS_MEMBERS:
            raise UserError(
                f"The group {group} has members, so it cannot begin anew.",
                hint="End them first (`echoswarm reward detach`), or leave out --from.",
            ) from exc
        raise translate(exc, group) from exc


# Errors of a commit from outside for a group that has members.
_HAS_MEMBERS = frozenset({"UNKNOWN_MEMBER_ID", "ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS"})


def _trained_ms(bus: Bus, version: int) -> int:
    """The time at which `version` was trained, before all its trajectories. Raises UserError if it was not trained yet."""
    newest = 0
    with closing(bus.look([STEPS])) as reader:
        reader.start()
        for messages in reader.read_to_end(Deadline.after(_READ_S, bus.clock)):
            for message in messages:
                if isinstance(message.record, StepReport):
                    newest = message.record.version
                    if newest >= version:
                        return message.record.time_ms
    raise UserError(f"Version {version} is not trained yet: the run is at {newest}.", hint="Write now, or an earlier version.")
