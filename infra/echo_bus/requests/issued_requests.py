"""The requests of a run that still matter, read from the end of `requests` backwards, because the topic holds a whole day.

A request matters if no worker has committed it, or if its seq is not below the floor. Within a partition seqs are first issued in ascending
order, so reading back stops at the first issue of a seq below the floor, or at the beginning. If one partition has such an issue, or the
run's first manifest says when the run began, the other partitions need nothing from before that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from echo_bus.clock import MAX_CLOCK_ERROR_MS, Deadline
from echo_bus.reading.reader import LogReader, Place
from echo_schemas.records import Purpose, RolloutRequest

# Offsets of a partition that are read first; four times as many each time that this is not enough.
_TAIL = 256
_WIDER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedRequest:
    """The fields of a request that are kept."""

    partition: int
    offset: int
    seq: int
    purpose: Purpose
    group_id: str
    deadline_ms: int | None
    issued_ms: int
    resends: int


class _Backwards:
    """Reads partitions backwards; `found`: their requests by (partition, offset)."""

    def __init__(self, reader: LogReader, floor: int, committed: Mapping[int, int], since_ms: int | None) -> None:
        self._reader = reader
        self._floor = floor
        bounds = reader.bounds()
        self.ends = {place: end for place, (_, end) in bounds.items()}
        self._lows = {place: low for place, (low, _) in bounds.items()}
        if since_ms is not None:
            self._nothing_before(since_ms)
        # Unfinished requests count, however old they are.
        self._most = {place: max(self._lows[place], min(end, committed.get(place[1], 0))) for place, end in self.ends.items()}
        self.found: dict[tuple[int, int], IssuedRequest] = {}
        self._first_ms: int | None = None
        self._below: set[Place] = set()

    def read(self, patience: Deadline) -> None:
        """Read until every partition reaches far enough back. Raises as `LogReader.read_to_end`."""
        window = _TAIL
        starts = self._starts(window)
        self._read(starts, self.ends, patience)
        while wider := [place for place, start in starts.items() if place not in self._below and start > self._lows[place]]:
            if self._first_ms is not None:
                self._nothing_before(self._first_ms)
            window *= _WIDER
            before, starts = starts, self._starts(window)
            self._read({place: starts[place] for place in wider}, {place: before[place] for place in wider}, patience)
            starts = {place: starts[place] if place in wider else before[place] for place in before}

    def _starts(self, window: int) -> dict[Place, int]:
        return {place: max(self._lows[place], min(self._most[place], end - window)) for place, end in self.ends.items()}

    def _read(self, starts: Mapping[Place, int], ends: Mapping[Place, int], patience: Deadline) -> None:
        """Read from `starts` up to `ends`, in these partitions only."""
        # Retention may have deleted records since.
        lows = {place: low for place, (low, _) in self._reader.bounds().items()}
        self._reader.start({place: max(lows[place], offset) for place, offset in {**self.ends, **starts}.items()})
        for messages in self._reader.read_to_end(Deadline.after(patience.remaining_s(), patience.clock), ends):
            for message in messages:
                request, place = message.record, (message.topic.name, message.partition)
                if not isinstance(request, RolloutRequest):
                    continue
                self.found[message.partition, message.offset] = IssuedRequest(
                    partition=message.partition,
                    offset=message.offset,
                    seq=request.seq,
                    purpose=request.purpose,
                    group_id=request.group_id,
                    deadline_ms=request.deadline_ms,
                    issued_ms=request.issued_ms,
                    resends=request.resends,
                )
                if request.purpose is Purpose.TRAIN and not request.resends and request.seq < self._floor:
                    self._below.add(place)
                    self._first_ms = max(self._first_ms or 0, message.timestamp_ms)

    def _nothing_before(self, time_ms: int) -> None:
        found = self._reader.offsets_at(max(0, time_ms - MAX_CLOCK_ERROR_MS))
        self._lows = {place: max(low, min(found[place], self.ends[place])) for place, low in self._lows.items()}


def read_issued(
    reader: LogReader, *, floor: int, committed: Mapping[int, int], since_ms: int | None, patience: Deadline
) -> list[IssuedRequest]:
    """The run's requests that matter, in the order of each partition; older ones may be missing. `reader` reads `requests` alone.

    `floor`: every seq below it is decided. `committed`: the workers' committed offsets by partition. `since_ms`: the run wrote no request
    before this time; None if unknown. Raises DeadlineExceeded if nothing comes for `patience`, or as `LogReader.read`.
    """
    backwards = _Backwards(reader, floor, committed, since_ms)
    backwards.read(patience)
    return [backwards.found[place] for place in sorted(backwards.found)]
