"""The dropped samples: counted by reason, version and worker, and a window of them, the newest first. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

from echo_ops.harmless import harmless
from echo_ops.viewer.steps import histogram
from echo_ops.viewer.windows import Json, Window
from echo_replay.history import History
from echo_schemas.records import DropReason

_REASONS = tuple(DropReason)
# Ranges of versions with a count each.
_MOST_BARS = 60


def dropped_page(history: History, window: Window, *, reason: str = "", version: int | None = None, worker: str = "") -> Json:
    """Filters: a reason, the learner's version at that time, and the worker (a drop names it only if the worker is the reason)."""
    table = history.fates.drops()
    keep = np.ones(len(table.seqs), np.bool_)
    if reason:
        keep &= table.reasons == next((code for code, each in enumerate(_REASONS) if each.value == reason), -1)
    if version is not None:
        keep &= table.versions == version
    if worker:
        keep &= np.array([each == worker for each in table.workers], np.bool_)
    chosen = np.flatnonzero(keep)
    # A seq that is dropped whole has no length.
    records = chosen[(table.partitions[chosen] >= 0) & (table.num_tokens[chosen] > 0)]
    newest = chosen[np.argsort(-table.times_ms[chosen], kind="stable")]
    workers, counts = np.unique([table.workers[at] for at in chosen if table.workers[at]], return_counts=True)
    return {
        "window": window.plain(len(chosen)),
        "num_dropped": len(table.seqs),
        "reasons": count_reasons(table.reasons[chosen]),
        "versions": _by_version(table.versions[chosen]),
        "lengths": histogram(table.num_tokens[records].astype(np.float64)),
        "workers": {harmless(str(name)): int(count) for name, count in zip(workers, counts, strict=True)},
        "drops": [
            {
                "partition": int(table.partitions[at]) if table.partitions[at] >= 0 else None,
                "offset": int(table.offsets[at]) if table.partitions[at] >= 0 else None,
                "seq": int(table.seqs[at]),
                "why": _REASONS[int(table.reasons[at])].value,
                "version": int(table.versions[at]),
                "time_ms": int(table.times_ms[at]),
                "worker": harmless(table.workers[at]),
                "detail": harmless(table.details[at]),
                "sampled_by": int(table.sampled_by[at]) if table.sampled_by[at] >= 0 else None,
                "num_tokens": int(table.num_tokens[at]),
            }
            for at in window.of(newest.tolist())
        ],
    }


def count_reasons(codes: np.typing.NDArray[np.integer[Any]]) -> Json:
    """How often each reason occurs, by its value."""
    found, counts = np.unique(codes, return_counts=True)
    return {_REASONS[code].value: count for code, count in zip(found.tolist(), counts.tolist(), strict=True)}


def _by_version(versions: np.typing.NDArray[np.int64]) -> list[Json]:
    """Counts by version, or by ranges of versions if there are many."""
    if not len(versions):
        return []
    low, high = int(versions.min()), int(versions.max())
    length = -(-(high - low + 1) // _MOST_BARS)
    places, counts = np.unique((versions - low) // length, return_counts=True)
    return [
        {"first": low + place * length, "last": min(high, low + (place + 1) * length - 1), "count": count}
        for place, count in zip(places.tolist(), counts.tolist(), strict=True)
    ]
