"""Targets of a replay: a topic, a file of JSON lines or of Avro, a folder, or a stream.

A topic gets the original bytes of value and key, the headers, the timestamp, and one more header with the record's origin. A JSON line
holds the same bytes in base64 and the decoded fields. Files and folders appear by one rename when all is written. `replay` fills them, at
the pace of `at_rate` or `at_original_pace`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Protocol

from confluent_kafka import KafkaError, KafkaException
from fastavro import parse_schema
from fastavro.write import Writer as AvroWriter

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawMessage
from echo_bus.client.kafka_errors import translate
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import DeadlineExceeded, DeliveryFailed
from echo_bus.message import raw_headers
from echo_replay.history import HistoryRecord
from echo_schemas.converters import converter_of
from echo_schemas.errors import UserError
from echo_schemas.naming import DEAD_LETTER_SUFFIX
from echo_schemas.records import Trajectory
from echo_schemas.schemas import newest
from echo_schemas.topics import BY_NAME, RUNS

REPLAYED_FROM = "echo-replayed-from"
"""The additional header of a replayed record: `<topic>/<partition>/<offset>`."""
STREAM = "-"
_LINES, _AVRO = ".jsonl", ".avro"
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_ASK_S = 10.0
_DELIVERED_S = 150.0
_FULL_BUFFER_S = 0.1
Sleep = Callable[[float], None]


class Sink(Protocol):
    """Takes records one after another. Exactly one of `finish` and `abandon` ends it."""

    def write(self, record: HistoryRecord) -> None:
        """Blocks while the sink is full. Raises TransportError, OSError."""

    def finish(self) -> None:
        """Complete the target. Raises as `write`."""

    def abandon(self) -> None:
        """Remove what is half-written, as far as the target allows it."""


def open_sink(bus: Bus, target: str, stream: IO[str], about: dict[str, Any]) -> Sink:
    """`-`: `stream`. A name with `.jsonl` or `.avro` behind it: a file. A name with a slash, or a folder: a folder. Else a topic. `about`:
    the selection, for a folder's manifest or the metadata of an Avro file. Raises UserError if the target cannot be written."""
    if target == STREAM:
        return StreamSink(stream)
    if target.endswith(_LINES):
        return FileSink(_free(Path(target)))
    if target.endswith(_AVRO):
        return AvroSink(_free(Path(target)), about)
    if "/" in target or Path(target).is_dir():
        return FolderSink(_free(Path(target)), about)
    return TopicSink(bus, target)


def is_whole(target: str) -> bool:
    """Whether the target appears only when all is written: a file or a folder."""
    return target != STREAM and (target.endswith((_LINES, _AVRO)) or "/" in target or Path(target).is_dir())


class StreamSink:
    """JSON lines to standard output."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, record: HistoryRecord) -> None:
        self._stream.write(line_of(record))

    def finish(self) -> None:
        self._stream.flush()

    def abandon(self) -> None:
        """Nothing to remove: written lines stay."""


class FileSink:
    """One file of JSON lines, renamed to its name when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staged = path.with_name(f".{path.name}.{os.getpid()}")
        self._file = self._staged.open("wb")

    def write(self, record: HistoryRecord) -> None:
        self._file.write(line_of(record).encode())

    def finish(self) -> None:
        _close_synced(self._file)
        self._staged.rename(self._path)

    def abandon(self) -> None:
        self._file.close()
        self._staged.unlink(missing_ok=True)


class AvroSink(FileSink):
    """An Avro object container file: a record for each trajectory, with its place, headers, rewards and fate (Avro 1.11 specification,
    "Object Container Files"). It holds unreadable trajectories as bytes."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        super().__init__(path)
        self._plain = converter_of(Trajectory).to_plain
        metadata = {"echoswarm.about": json.dumps(about)}
        self._writer = AvroWriter(self._file, _replayed_schema(), codec="deflate", metadata=metadata)

    def write(self, record: HistoryRecord) -> None:
        raw, drop = record.raw, record.drop
        self._writer.write(
            {
                "partition": record.where.partition,
                "offset": record.where.offset,
                "time_ms": record.time_ms,
                "key": raw.key(),
                "headers": [{"name": name, "value": value} for name, value in raw_headers(raw)],
                "fate": record.fate.value,
                "step": record.step,
                "advantage": record.entry.advantage,
                "drop_reason": None if drop is None else drop.why.value,
                "rewards": dict(record.rewards),
                "trajectory": None if record.trajectory is None else self._plain(record.trajectory),
                "unreadable": raw.value() if record.trajectory is None else None,
            }
        )

    def finish(self) -> None:
        self._writer.flush()
        super().finish()


class FolderSink:
    """A file of JSON lines for each partition, and `manifest.json`: the selection, and each file's records and checksum."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self._path, self._about = path, about
        self._staged = path.with_name(f".{path.name}.{os.getpid()}")
        self._staged.mkdir()
        self._files: dict[int, tuple[IO[bytes], Any]] = {}
        self._counts: dict[int, int] = {}

    def write(self, record: HistoryRecord) -> None:
        number = record.where.partition
        if number not in self._files:
            self._files[number] = (self._staged / _file_of(number)).open("wb"), hashlib.sha256()
        file, digest = self._files[number]
        line = line_of(record).encode()
        file.write(line)
        digest.update(line)
        self._counts[number] = self._counts.get(number, 0) + 1

    def finish(self) -> None:
        files = {}
        for number, (file, digest) in sorted(self._files.items()):
            _close_synced(file)
            files[_file_of(number)] = {"partition": number, "records": self._counts[number], "sha256": digest.hexdigest()}
        content = json.dumps({**self._about, "files": files}, indent=1, ensure_ascii=False)
        (self._staged / "manifest.json").write_text(content + "\n", encoding="utf-8")
        self._staged.rename(self._path)

    def abandon(self) -> None:
        for file, _ in self._files.values():
            file.close()
        shutil.rmtree(self._staged, ignore_errors=True)


class TopicSink:
    """An existing topic that belongs to no pipeline. Records written before a failure stay in it: a log cannot take them back."""

    def __init__(self, bus: Bus, topic: str) -> None:
        self._topic, self._clock = topic, bus.clock
        _refuse_own(bus, topic)
        self._producer = bus.cluster.producer({**profiles.PRODUCER_THROUGHPUT, "client.id": bus.client_id})
        found = self._producer.list_topics(timeout=_ASK_S).topics
        if topic not in found:
            raise UserError(
                f"There is no topic {topic}.", hint="Create it first, with as many partitions as you like, or name a file ending in .jsonl."
            )
        namespace, _, logical = topic.rpartition(".")
        if logical in BY_NAME and f"{namespace}.{RUNS.name}" in found:
            raise UserError(f"{topic} belongs to the pipeline in the namespace {namespace!r}.", hint="Name a topic of your own.")
        self._problem: KafkaError | None = None

    def write(self, record: HistoryRecord) -> None:
        origin = f"{record.raw.topic()}/{record.where.partition}/{record.where.offset}".encode()
        headers = [*raw_headers(record.raw), (REPLAYED_FROM, origin)]
        while True:
            self._raise_problem()
            try:
                self._producer.produce(
                    self._topic,
                    record.raw.value(),
                    record.raw.key(),
                    on_delivery=self._delivered,
                    timestamp=record.time_ms,
                    headers=headers,
                )
                break
            except BufferError:
                self._producer.poll(_FULL_BUFFER_S)
            except KafkaException as exc:
                raise translate(exc, self._topic) from exc
        self._producer.poll(0)

    def finish(self) -> None:
        deadline = Deadline.after(_DELIVERED_S, self._clock)
        while self._producer.flush(1.0):
            self._raise_problem()
            if deadline.expired():
                raise DeadlineExceeded(f"Not all records were acknowledged on {self._topic} within {_DELIVERED_S:g} s.")
        self._raise_problem()

    def abandon(self) -> None:
        self._producer.purge()
        self._producer.flush(1.0)

    def _delivered(self, error: KafkaError | None, _message: RawMessage) -> None:
        if error is not None and self._problem is None:
            self._problem = error

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise DeliveryFailed(
                f"{self._topic} did not accept a record: {self._problem.str()}.",
                hint="The records before it were written; start the replay again after them.",
            )


def line_of(record: HistoryRecord) -> str:
    """One line of JSON, all ASCII, so that it holds no terminal control codes: the decoded fields, and under `raw` the bytes in base64."""
    raw = record.raw
    content = {
        "from": {"topic": raw.topic(), "partition": record.where.partition, "offset": record.where.offset},
        "time_ms": record.time_ms,
        **spoken(record),
        "raw": {
            "key": _text(raw.key()),
            "value": _text(raw.value()),
            "headers": [[name, _text(value)] for name, value in raw_headers(raw)],
        },
    }
    return json.dumps(content) + "\n"


def spoken(record: HistoryRecord) -> dict[str, Any]:
    """A trajectory with its fate and rewards, for JSON."""
    drop = record.drop
    return {
        "fate": record.fate.value,
        "step": record.step,
        "advantage": record.entry.advantage,
        "drop": None if drop is None else {"why": drop.why.value, "learner_version": drop.learner_version, "detail": drop.detail},
        "rewards": dict(record.rewards),
        "trajectory": None if record.trajectory is None else _plain(record.trajectory),
    }


def _plain(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "name": trajectory.name,
        "group_id": trajectory.group_id,
        "seq": trajectory.seq,
        "index": trajectory.index,
        "purpose": trajectory.purpose.value,
        "task": trajectory.task,
        "worker_id": trajectory.worker_id,
        "versions": [[span.start, span.end, span.version] for span in trajectory.version_spans],
        "generated": [[span.start, span.end] for span in trajectory.generated],
        "finish_reason": trajectory.finish_reason.value,
        "prompt": trajectory.prompt,
        "completion": trajectory.completion,
        "token_ids": trajectory.tokens.tolist(),
        "logprobs": trajectory.logprob_values.tolist(),
        "turn_rewards": list(trajectory.turn_rewards),
        "metadata": dict(trajectory.metadata),
    }


def _replayed_schema() -> Any:
    header = {
        "type": "record",
        "name": "Header",
        "fields": [{"name": "name", "type": "string"}, {"name": "value", "type": ["null", "bytes"]}],
    }
    kinds: dict[str, Any] = {
        "partition": "int",
        "offset": "long",
        "time_ms": "long",
        "key": ["null", "bytes"],
        "headers": {"type": "array", "items": header},
        "fate": "string",
        "step": ["null", "long"],
        "advantage": ["null", "float"],
        "drop_reason": ["null", "string"],
        "rewards": {"type": "map", "values": "double"},
        "trajectory": ["null", newest(Trajectory.SCHEMA).parsed],
        "unreadable": ["null", "bytes"],
    }
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    return parse_schema({"type": "record", "name": "Replayed", "namespace": "echoswarm.replay", "fields": fields})


def _text(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode()


def _close_synced(file: IO[bytes]) -> None:
    """Close a file whose content survives a loss of power from now on."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _file_of(partition: int) -> str:
    return f"trajectories-{partition:05}{_LINES}"


def _free(path: Path) -> Path:
    """`path`. Raises UserError if it exists, or its parent folder does not."""
    if path.exists():
        raise UserError(f"{path} is there already.", hint="Name another one, or remove it.")
    if not path.absolute().parent.is_dir():
        raise UserError(f"There is no folder {path.absolute().parent}.", hint="Make it first.")
    return path


def _refuse_own(bus: Bus, topic: str) -> None:
    if not _TOPIC.fullmatch(topic):
        raise UserError(
            f"{topic!r} is no name of a topic.", hint="A topic's name has letters, digits, '.', '_' and '-'; a file's ends in .jsonl."
        )
    logical = topic.removesuffix(DEAD_LETTER_SUFFIX)
    if logical in BY_NAME or bus.namespace.logical(logical) is not None:
        raise UserError(
            f"{topic} is one of the pipeline's own topics: its readers would take replayed records for new ones.",
            hint="Name a topic of your own.",
        )


def at_rate(records: Iterable[HistoryRecord], rate: float, clock: Clock, sleep: Sleep = time.sleep) -> Iterator[HistoryRecord]:
    """At most `rate` a second. After a pause of the source there is no burst."""
    due_s = clock.monotonic_s()
    for each in records:
        now_s = clock.monotonic_s()
        if due_s > now_s:
            sleep(due_s - now_s)
        due_s = max(due_s, now_s) + 1.0 / rate
        yield each


def at_original_pace(records: Iterable[HistoryRecord], clock: Clock, sleep: Sleep = time.sleep) -> Iterator[HistoryRecord]:
    """Each at its original distance in time from the first one. `records` is in the order of time."""
    begun_s = clock.monotonic_s()
    first_ms: int | None = None
    for each in records:
        first_ms = each.time_ms if first_ms is None else first_ms
        early_s = (each.time_ms - first_ms) / 1000 - (clock.monotonic_s() - begun_s)
        if early_s > 0:
            sleep(early_s)
        yield each


def replay(records: Iterable[HistoryRecord], sink: Sink) -> int:
    """Write all; return how many. After any failure, an interrupt included, the sink abandons what is half-written. Raises as the sink."""
    count = 0
    try:
        for each in records:
            sink.write(each)
            count += 1
    except BaseException:  # see above
        sink.abandon()
        raise
    sink.finish()
    return count
