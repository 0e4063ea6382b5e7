"""A minute of the run: each worker's groups with their versions, the learner's training and waiting, the publications of weights, and the
delays of rewards. It reads a bounded number of records, however long the stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echo_bus.client.profiles import GLIMPSE
from echo_ops.harmless import harmless
from echo_ops.viewer.steps import find_step
from echo_ops.viewer.windows import Json
from echo_replay.history import History
from echo_replay.raw_log import RawLog
from echo_schemas.errors import InvalidRecord
from echo_schemas.projection import Projection
from echo_schemas.records import Purpose, Reward, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES

MOST_SECONDS = 3_600
# Most trajectories and rewards that are read for one picture: a screen has fewer points.
_MOST_RECORDS, _MOST_REWARDS = 1_500, 3_000
_MOST_LAGS = 600
# A sample that was begun within the stretch, and its rewards, may be written after it.
_MARGIN_MS = 30_000
# Larger fetches than GLIMPSE has: a few thousand records of one or two partitions would need twenty of those.
_STRETCH = {**GLIMPSE, "max.partition.fetch.bytes": 1_048_576, "queued.min.messages": 2_000}
_FIELDS = ("run_id", "worker_id", "group_id", "attempt", "purpose", "seq", "min_version", "started_ms", "finished_ms")


@dataclass(frozen=True, slots=True)
class _Sample:
    """The shown fields of a trajectory. `place`: partition and offset; `time_ms`: of its record; `version`: the oldest of its tokens."""

    place: tuple[int, int]
    time_ms: int
    worker: str
    group_id: str
    attempt: str
    purpose: str
    seq: int
    version: int
    started_ms: int
    finished_ms: int


def timeline_page(history: History, *, until_ms: int | None, seconds: int, step: int | None) -> Json:
    """The stretch of `seconds` that ends at `until_ms`, or lies around `step`; without both it ends at the newest step.

    Raises UserError for an unknown step; TransportError.
    """
    steps = list(history.log.steps)
    length_ms = seconds * 1000
    if step is not None:
        until_ms = find_step(history, step).report.time_ms + length_ms // 4
    if until_ms is None:
        until_ms = steps[-1].report.time_ms if steps else 0
    since_ms = until_ms - length_ms
    samples, is_cut = _read(history, since_ms, until_ms)
    return {
        "since_ms": since_ms,
        "until_ms": until_ms,
        "seconds": seconds,
        "run_since_ms": steps[0].report.time_ms if steps else None,
        "run_until_ms": steps[-1].report.time_ms if steps else None,
        "steps": [
            {
                "version": each.version,
                "time_ms": each.report.time_ms,
                "training_ms": int(each.report.training_s * 1000),
                "idle_ms": int(each.report.idle_s * 1000),
            }
            for each in steps
            if each.report.time_ms >= since_ms and each.report.time_ms - (each.report.training_s + each.report.idle_s) * 1000 <= until_ms
        ],
        "broadcasts": [
            {"version": manifest.version, "time_ms": manifest.created_ms, "num_bytes": manifest.num_bytes}
            for _, is_current, manifest in list(history.log.manifests)
            if not is_current and since_ms <= manifest.created_ms <= until_ms
        ],
        "lanes": [
            {"worker": harmless(name), "spans": spans} for name, spans in sorted(_lanes(history, samples, since_ms, until_ms).items())
        ],
        "lags": _lags(history, {each.place: each.time_ms for each in samples}),
        "is_cut": is_cut,
    }


def _read(history: History, since_ms: int, until_ms: int) -> tuple[list[_Sample], bool]:
    """The samples written in the stretch or shortly afterwards, and whether some were left out."""
    read = Projection(Trajectory, _FIELDS, history.bus.codec.ids).read
    run_id = history.run_id.encode()
    found: list[_Sample] = []
    with RawLog(history.bus, history.bus.namespace.topic(TRAJECTORIES), _STRETCH) as log:
        ranges, is_cut = _ranges(log, max(0, since_ms), max(0, until_ms + _MARGIN_MS), _MOST_RECORDS)
        for raw in itertools.chain.from_iterable(log.within(ranges)):
            try:
                run, worker, group, attempt, purpose, *numbers = read(raw.value())
            except InvalidRecord:
                continue
            if run == run_id:
                texts = (text.decode(errors="replace") for text in (worker, group, attempt, purpose))
                found.append(_Sample((raw.partition() or 0, raw.offset() or 0), raw.timestamp()[1], *texts, *numbers))
    return found, is_cut


def _ranges(log: RawLog, since_ms: int, until_ms: int, most: int) -> tuple[dict[int, tuple[int, int]], bool]:
    """The offsets of a stretch of time, about `most` of all partitions together, and whether some were left out.

    If there are too many records, as many whole partitions as fit are read, because a partition holds all samples of its groups. If not
    even one fits, its end is read.
    """
    starts, ends = log.offsets_at(since_ms), log.offsets_at(until_ms)
    there = {number: (start, ends[number]) for number, start in starts.items() if start < ends[number]}
    found: dict[int, tuple[int, int]] = {}
    left = most
    for number, (start, end) in sorted(there.items()):
        if found and end - start > left:
            continue
        found[number] = (max(start, end - most), end)
        left -= end - start
    return found, any(there[number] != found.get(number) for number in there)


def _lanes(history: History, samples: list[_Sample], since_ms: int, until_ms: int) -> dict[str, list[Json]]:
    """Each worker's groups: from the start of the first sample to the end of the last one."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in samples:
        if each.finished_ms < since_ms or each.started_ms > until_ms:
            continue
        key = (each.worker, each.group_id, each.attempt)
        if (span := groups.get(key)) is None:
            groups[key] = span = {
                "group": each.group_id.rpartition("/")[2],
                "purpose": each.purpose,
                "version": each.version,
                "start_ms": each.started_ms,
                "end_ms": each.finished_ms,
                "num_samples": 0,
                **_fate(history, each),
            }
        span["num_samples"] += 1
        span["version"] = min(span["version"], each.version)
        span["start_ms"], span["end_ms"] = min(span["start_ms"], each.started_ms), max(span["end_ms"], each.finished_ms)
    lanes: dict[str, list[Json]] = {}
    for (worker, _, _), span in groups.items():
        lanes.setdefault(worker, []).append(span)
    # Partitions come in any order.
    return {worker: sorted(spans, key=lambda span: (int(span["start_ms"]), str(span["group"]))) for worker, spans in lanes.items()}


def _fate(history: History, sample: _Sample) -> Json:
    """The fate of a group's first sample, for the group."""
    entry = history.fates.of(*sample.place, Purpose(sample.purpose), sample.seq)
    return {"fate": entry.fate.value, "step": entry.step}


def _lags(history: History, written: Mapping[tuple[int, int], int]) -> list[Json]:
    """Seconds from a trajectory's record to its reward's record, by the log's times."""
    found: list[Json] = []
    for name, place, time_ms in _rewards(history, written):
        found.append({"name": harmless(name), "time_ms": time_ms, "seconds": max(0.0, (time_ms - written[place]) / 1000)})
    length = -(-len(found) // _MOST_LAGS) or 1
    return sorted(found, key=lambda lag: (int(lag["time_ms"]), str(lag["name"]), float(lag["seconds"])))[::length]


def _rewards(history: History, written: Mapping[tuple[int, int], int]) -> Iterator[tuple[str, tuple[int, int], int]]:
    if not written:
        return
    read = Projection(Reward, ("run_id", "of.partition", "of.offset", "name"), history.bus.codec.ids).read
    run_id = history.run_id.encode()
    # A reward lies in its trajectory's partition.
    partitions = {partition for partition, _ in written}
    with RawLog(history.bus, history.bus.namespace.topic(REWARDS), _STRETCH) as log:
        starts, ends = log.offsets_at(min(written.values())), log.offsets_at(max(written.values()) + _MARGIN_MS)
        most = _MOST_REWARDS // len(partitions)
        ranges = {
            number: (max(starts[number], ends[number] - most), ends[number]) for number in partitions if starts[number] < ends[number]
        }
        for raw in itertools.chain.from_iterable(log.within(ranges)):
            try:
                run, partition, offset, name = read(raw.value())
            except InvalidRecord:
                continue
            if run == run_id and (partition, offset) in written:
                yield name.decode(errors="replace"), (partition, offset), raw.timestamp()[1]
