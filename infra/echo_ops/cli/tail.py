"""`echoswarm tail`: decoded records on the screen or as JSON lines."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from confluent_kafka import TopicPartition
from rich.markup import escape

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawConsumer, RawMessage
from echo_bus.client.consumer_queries import num_partitions, watermarks
from echo_bus.client.kafka_errors import END_OF_PARTITION, check_error
from echo_bus.errors import TransportError
from echo_bus.message import raw_headers
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, taking
from echo_ops.cli.output import err, out
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.headers import run_of
from echo_schemas.naming import DEAD_LETTER_SUFFIX
from echo_schemas.records import Record
from echo_schemas.topics import BY_NAME

_POLL_S = 0.5
_SILENT_S = 10.0
_MAX_BYTES_SHOWN = 24
_MAX_TEXT_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Filters:
    """Which records to show; None shows all."""

    version: Annotated[int | None, typer.Option(help="Only records whose oldest version is this.")] = None
    group: Annotated[str | None, typer.Option(help="Only this group id.")] = None
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None

    def admit(self, record: Record | None) -> bool:
        """Whether to show `record`. One that cannot be decoded is shown only without filters."""
        if record is None:
            return self == Filters()
        wanted = {"group_id": self.group, "worker_id": self.worker}
        if any(value is not None and getattr(record, name, None) != value for name, value in wanted.items()):
            return False
        version = getattr(record, "min_version", getattr(record, "version", None))
        return self.version is None or version == self.version


@taking("filters", Filters)
def tail(
    topic: Annotated[str, typer.Argument(help="Logical topic, such as trajectories, or trajectories.dlq.")],
    config: Config = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="How many of the newest records of each partition to begin with.")] = 10,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Other runs' records too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    *,
    filters: Filters,
) -> None:
    """Show the newest records of a topic, and with `follow` new ones."""
    logical = topic.removesuffix(DEAD_LETTER_SUFFIX)
    if logical not in BY_NAME:
        raise UserError(f"There is no topic {topic!r}.", hint=f"Known: {', '.join(BY_NAME)}, each also with {DEAD_LETTER_SUFFIX}.")
    bus = reach_bus(read_settings(config), all_runs=all_runs)
    physical = f"{bus.namespace.name}.{topic}"
    with closing(bus.cluster.consumer({**profiles.READER, "client.id": bus.client_id, "enable.partition.eof": True})) as consumer:
        unread, silent_s, num_shown = _position(consumer, physical, last), 0.0, 0
        while follow or unread:
            raw = consumer.poll(_POLL_S)
            if raw is None:
                silent_s += _POLL_S
                if unread and silent_s == _SILENT_S:
                    places = ", ".join(map(str, sorted(unread)))
                    err.print(f"Waiting for the brokers: nothing of partitions {places} has come for {_SILENT_S:g} s. Ctrl-C ends.")
                elif not unread and silent_s % _SILENT_S == 0:
                    # No records, or no brokers?
                    try:
                        num_partitions(consumer, physical)
                    except TransportError as exc:
                        err.print(f"{exc.message} It goes on when they answer; Ctrl-C ends.", markup=False)
                continue
            silent_s = 0.0
            if (problem := raw.error()) is not None:
                if problem.code() == END_OF_PARTITION:
                    # Only the broker knows the end: a partition may end in a marker that no consumer gets, and a slow broker is silent.
                    unread.discard(raw.partition())
                else:
                    check_error(problem, raw)
                continue
            num_shown += _show(bus, raw, filters, as_json=as_json)
    if not num_shown:
        of = "" if bus.run_id is None else f" of {bus.run_id}"
        err.print(f"No such record{of} in {physical}.", markup=False)


def _position(consumer: RawConsumer, physical: str, last: int) -> set[int]:
    """Seek `last` records before the end of every partition; returns the partitions."""
    places = [(physical, number) for number in range(num_partitions(consumer, physical))]
    bounds = watermarks(consumer, places)
    consumer.assign([TopicPartition(*place, max(low, high - last)) for place, (low, high) in bounds.items()])
    return {number for _, number in places}


def _show(bus: Bus, raw: RawMessage, filters: Filters, *, as_json: bool) -> bool:
    """Print a message, unless it is another run's or a filter leaves it out; returns whether it did."""
    record, problem = None, None
    try:
        record = bus.codec.decode(raw.value()) if raw.value() is not None else None
    except InvalidRecord as exc:
        problem = f"{exc.reason.value}: {exc.message}"
    run = record.run_id if record is not None else run_of(raw_headers(raw))
    if bus.run_id is not None and run is not None and run != bus.run_id:
        return False
    if problem is None and not filters.admit(record):
        return False
    headers = {name: _text(value) for name, value in raw_headers(raw)}
    if as_json:
        line = {**_place(raw), "headers": headers, "problem": problem, "record": _plain(record, full=True) if record is not None else None}
        sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
        return True
    place = _place(raw)
    where = f"[bold cyan]{place['topic']}[/][dim]\\[{place['partition']}] @{place['offset']}  {place['time']}[/]"
    out.print(f"{where}  key={escape(repr(place['key']))}")
    out.print("  " + "  ".join(f"{name}={value}" for name, value in headers.items()), style="dim", markup=False)
    if problem is not None:
        out.print(f"  not a record: {problem}", style="red", markup=False)
    elif record is None:
        out.print("  tombstone", style="yellow")
    else:
        out.print(f"  {type(record).__name__} {json.dumps(_plain(record, full=False), ensure_ascii=False)}", markup=False)
    return True


def _place(raw: RawMessage) -> dict[str, Any]:
    key = raw.key()
    return {
        "topic": raw.topic(),
        "partition": raw.partition(),
        "offset": raw.offset(),
        "time": datetime.fromtimestamp(raw.timestamp()[1] / 1000, UTC).isoformat(timespec="milliseconds"),
        "key": None if key is None else key.decode(errors="replace"),
    }


def _text(value: bytes | None) -> str:
    """A header as text; Spring's 4-byte partition as a number."""
    if value is None:
        return "null"
    text = value.decode(errors="replace")
    return text if text.isprintable() else str(int.from_bytes(value, "big")) if len(value) == 4 else value.hex()


def _plain(node: Any, *, full: bool) -> Any:
    """A record as JSON can show it: bytes as their length (or hex when `full`), long texts cut."""
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: _plain(getattr(node, field.name), full=full) for field in dataclasses.fields(node)}
    if isinstance(node, bytes):
        return node.hex() if full or len(node) <= _MAX_BYTES_SHOWN else f"<{len(node)} bytes>"
    if isinstance(node, str):
        return str(node) if full or len(node) <= _MAX_TEXT_SHOWN else f"{node[:_MAX_TEXT_SHOWN]}…"
    if isinstance(node, Mapping):
        return {key: _plain(value, full=full) for key, value in node.items()}
    if isinstance(node, tuple):
        return [_plain(item, full=full) for item in node]
    return node
