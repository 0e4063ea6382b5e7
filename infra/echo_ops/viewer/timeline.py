"""A minute of the run: what each worker generated under which version, when the learner trained and waited, when weights went out, and how
long rewards took. What is read is bounded, however long the stretch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from echo_bus.client.profiles import LOOK
from echo_ops.cli.harmless import harmless
from echo_ops.viewer.steps import find_step
from echo_ops.viewer.windows import Json
from echo_replay.history import History, Told
from echo_replay.raw_log import RawLog
from echo_replay.selection import Offsets, Selection
from echo_schemas.errors import InvalidRecord
from echo_schemas.projection import Projection
from echo_schemas.records import Purpose, Reward
from echo_schemas.topics import REWARDS, TRAJECTORIES

MOST_SECONDS = 3_600
# Records that are read for one picture, of trajectories and of rewards: a screen has fewer points.
_MOST_RECORDS = 3_000
_MOST_LAGS = 600
# A sample that was begun within the stretch may be written after it, and so may its rewards.
_MARGIN_MS = 30_000


def timeline_page(history: History, *, until_ms: int | None, seconds: int, step: int | None) -> Json:
    """The stretch of `seconds` that ends at `until_ms`, or around a step, or (neither) at the newest step.

    Raises UserError for an unknown step; TransportError.
    """
    steps = list(history.log.steps)
    length_ms = seconds * 1000
    if step is not None:
        until_ms = find_step(history, step).report.time_ms + length_ms // 4
    if until_ms is None:
        until_ms = steps[-1].report.time_ms if steps else 0
    since_ms = until_ms - length_ms
    told, is_cut = _read(history, since_ms, until_ms)
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
        "lanes": [{"worker": harmless(name), "spans": spans} for name, spans in sorted(_lanes(told, since_ms, until_ms).items())],
        "lags": _lags(history, {(each.where.partition, each.where.offset): each.time_ms for each in told}),
        "is_cut": is_cut,
    }


def _read(history: History, since_ms: int, until_ms: int) -> tuple[list[Told], bool]:
    """What was written in the stretch or shortly afterwards; of too much the first of each partition."""
    with RawLog(history.bus, history.bus.namespace.topic(TRAJECTORIES), LOOK) as log:
        starts, ends = log.offsets_at(max(0, since_ms)), log.offsets_at(max(0, until_ms + _MARGIN_MS))
    each = _MOST_RECORDS // max(1, len(starts))
    is_cut = any(ends[number] - start > each for number, start in starts.items())
    ranges = {number: (start, min(ends[number], start + each) - 1) for number, start in starts.items() if start < ends[number]}
    if not ranges:
        return [], False
    return [told for told in history.read(Selection(range=Offsets(ranges)), rewards=False) if told.trajectory is not None], is_cut


def _lanes(told: list[Told], since_ms: int, until_ms: int) -> dict[str, list[Json]]:
    """By worker its groups: begun with the first sample, ended with the last one."""
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for each in told:
        trajectory = each.trajectory
        if trajectory is None or trajectory.finished_ms < since_ms or trajectory.started_ms > until_ms:
            continue
        span = groups.setdefault(
            (trajectory.worker_id, trajectory.group_id, trajectory.attempt),
            {
                "group": trajectory.group_id.rpartition("/")[2],
                "purpose": trajectory.purpose.value,
                "version": trajectory.min_version,
                "start_ms": trajectory.started_ms,
                "end_ms": trajectory.finished_ms,
                "num_samples": 0,
                "fate": each.fate.value if trajectory.purpose is Purpose.TRAIN else trajectory.purpose.value,
                "step": each.step,
            },
        )
        span["num_samples"] += 1
        span["version"] = min(span["version"], trajectory.min_version)
        span["start_ms"], span["end_ms"] = min(span["start_ms"], trajectory.started_ms), max(span["end_ms"], trajectory.finished_ms)
    lanes: dict[str, list[Json]] = {}
    for (worker, _, _), span in groups.items():
        lanes.setdefault(worker, []).append(span)
    return {worker: sorted(spans, key=lambda span: int(span["start_ms"])) for worker, spans in lanes.items()}


def _lags(history: History, written: Mapping[tuple[int, int], int]) -> list[Json]:
    """Seconds from a trajectory's record to that of its reward, by the log's own times."""
    found: list[Json] = []
    for name, place, time_ms in _rewards(history, written):
        found.append({"name": harmless(name), "time_ms": time_ms, "seconds": max(0.0, (time_ms - written[place]) / 1000)})
    length = -(-len(found) // _MOST_LAGS) or 1
    return sorted(found, key=lambda lag: int(lag["time_ms"]))[::length]


def _rewards(history: History, written: Mapping[tuple[int, int], int]) -> Iterator[tuple[str, tuple[int, int], int]]:
    if not written:
        return
    read = Projection(Reward, ("run_id", "of.partition", "of.offset", "name"), history.bus.codec.ids).read
    run_id = history.run_id.encode()
    with RawLog(history.bus, history.bus.namespace.topic(REWARDS), LOOK) as log:
        starts, ends = log.offsets_at(min(written.values())), log.offsets_at(max(written.values()) + _MARGIN_MS)
        most = 2 * _MOST_RECORDS // max(1, len(starts))
        ranges = {number: (start, min(ends[number], start + most)) for number, start in starts.items() if start < ends[number]}
        for batch in log.within(ranges):
            for raw in batch:
                try:
                    run, partition, offset, name = read(raw.value())
                except InvalidRecord:
                    continue
                if run == run_id and (partition, offset) in written:
                    yield name.decode(errors="replace"), (partition, offset), raw.timestamp()[1]
