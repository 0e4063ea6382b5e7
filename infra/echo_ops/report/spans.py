"""When groups were generated, read from the log for a few seconds of the run, for the report's close-up."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_schemas.records import Purpose, Trajectory
from echo_schemas.topics import TRAJECTORIES

_PATIENCE_S = 10.0
# A group that began before the window may be published within it, one that began in it after it.
_MARGIN_MS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpan:
    """One group: its worker, its times in milliseconds since the epoch, and its oldest version."""

    worker_id: str
    seq: int
    version: int
    started_ms: int
    finished_ms: int


def read_spans(bus: Bus, start_ms: int, end_ms: int) -> list[GenerationSpan]:
    """Training groups that were generated between two times, in order of their start. Raises TransportError."""
    spans: dict[tuple[str, str], GenerationSpan] = {}
    with closing(bus.look([TRAJECTORIES])) as reader:
        reader.start(reader.offsets_at(start_ms))
        for messages in reader.read_to_end(Deadline.after(_PATIENCE_S), reader.offsets_at(end_ms + _MARGIN_MS)):
            for message in messages:
                record = message.record
                if isinstance(record, Trajectory) and record.purpose is Purpose.TRAIN:
                    key = (record.group_id, record.attempt)
                    spans[key] = _joined(spans.get(key), record)
    found = [span for span in spans.values() if span.finished_ms >= start_ms and span.started_ms <= end_ms]
    return sorted(found, key=lambda span: (span.started_ms, span.seq))


def _joined(span: GenerationSpan | None, record: Trajectory) -> GenerationSpan:
    return GenerationSpan(
        worker_id=record.worker_id,
        seq=record.seq,
        version=record.min_version if span is None else min(span.version, record.min_version),
        started_ms=record.started_ms if span is None else min(span.started_ms, record.started_ms),
        finished_ms=record.finished_ms if span is None else max(span.finished_ms, record.finished_ms),
    )
