"""The headers of every record: CloudEvents attributes and ours, all UTF-8 text, so that tools can filter without decoding."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterable
from datetime import UTC, datetime

from echo_schemas.records import Record, Trajectory

RUN = "echo-run"
VERSION = "echo-version"
GROUP = "echo-group"
SOURCE = "ce_source"
SIGNATURE = "echo-signature"
FILLER_RUN = "-"
"""The run that the fillers of a restored run name. No run's name begins like this."""

# 10^18 is below 2^63, the limit of Avro's and Kafka's numbers; and Python refuses to read numbers of thousands of digits.
_MOST_DIGITS = 18

Header = tuple[str, bytes]
_SPEC_VERSION: Header = ("ce_specversion", b"1.0")

# Seeded by the operating system, as `uuid4` is, which takes ten times as long. No other code seeds it; a forked process seeds it anew.
_names = random.Random()
os.register_at_fork(after_in_child=_names.seed)


def headers_of(record: Record, *, source: str, time_ms: int) -> list[Header]:
    """CloudEvents binary-mode headers, `echo-run`, and if the record has them `echo-group` and `echo-version` (the oldest version).

    `echo-version` shows a stale trajectory without decoding its body; an exempt trajectory has none, because it is never stale. `source`:
    the writer's client id. Called for every record, so repeated parts are cached."""
    group_id = getattr(record, "group_id", None)
    # A trajectory's own name, so that a consumer can recognise duplicates.
    name = record.name.encode() if isinstance(record, Trajectory) else fresh_name()
    headers = headers_for(record.SCHEMA, name, run_id=record.run_id, group_id=group_id, source=source, time_ms=time_ms)
    if isinstance(record, Trajectory) and not record.is_exempt:
        headers.append((VERSION, b"%d" % record.min_version))
    return headers


def headers_for(schema: str, name: bytes, *, run_id: str, group_id: str | None, source: str, time_ms: int) -> list[Header]:
    """The same headers without the record itself, and without `echo-version`; `name` becomes `ce_id`."""
    seconds, millis = divmod(time_ms, 1000)
    headers = [
        _SPEC_VERSION,
        ("ce_id", name),
        _type_of(schema),
        _source_of(source),
        ("ce_time", b"%b.%03dZ" % (_second_of(seconds), millis)),
        (RUN, run_id.encode()),
    ]
    if group_id is not None:
        headers.append((GROUP, group_id.encode()))
    return headers


def fresh_name() -> bytes:
    """A unique name: 128 random bits."""
    return b"%032x" % _names.getrandbits(128)


def run_of(headers: Iterable[Header] | None) -> str | None:
    """The run named in the headers; None if they name none."""
    return _text(headers, RUN)


def group_of(headers: Iterable[Header] | None) -> str | None:
    """The group named in the headers; None if they name none."""
    return _text(headers, GROUP)


def oldest_version(headers: Iterable[Header] | None) -> int | None:
    """The oldest version named in the headers; None if it is missing or not a number: then the body decides."""
    return number_of(_text(headers, VERSION))


def number_of(text: str | bytes | None) -> int | None:
    """The number in decimal digits in `text`; None for any other text, and for more than 18 digits."""
    if text is None or len(text) > _MOST_DIGITS or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


def _text(headers: Iterable[Header] | None, name: str) -> str | None:
    for key, value in headers or ():
        if key == name and value is not None:
            return value.decode(errors="replace")
    return None


@functools.cache
def _type_of(schema: str) -> Header:
    return ("ce_type", f"echoswarm.{schema}".encode())


@functools.lru_cache(maxsize=64)
def _source_of(source: str) -> Header:
    return (SOURCE, source.encode())


@functools.lru_cache(maxsize=16)
def _second_of(seconds: int) -> bytes:
    """RFC 3339 date and time of one second, without zone."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()
