"""Records as Arrow tables: the columns of every table of an export. Imports pyarrow.

Times are Unix milliseconds, as in the records. `kafka`: the place of the row's own record; `trajectory`: the place of its trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from echo_bus.client.cluster import RawMessage
from echo_replay.export.arrays import KAFKA, PLACE, attribute_array, messages_array, numbers_array
from echo_replay.export.layout import Table
from echo_replay.fates import BookEntry
from echo_replay.history import HistoryRecord
from echo_replay.steps import Step
from echo_schemas.records import Drop, Reward, WorkerStatus

REWARD_PREFIX = "reward_"
"""The prefix of a reward's own column."""
MOST_REWARD_COLUMNS = 200
"""So many rewards get a column; more are only in the table of rewards. Bounds the columns of rewards with ever new names."""

_SPAN = [("start", pa.int32()), ("end", pa.int32())]
_SAMPLING = pa.struct(
    [
        ("max_new_tokens", pa.int64()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("top_k", pa.int64()),
        ("min_p", pa.float64()),
        ("seed", pa.int64()),
        ("stop", pa.list_(pa.string())),
    ]
)
_NUMBERS = pa.map_(pa.string(), pa.float64())

_TRAJECTORIES = pa.schema(
    [
        ("group_id", pa.string()),
        ("seq", pa.int64()),
        ("attempt", pa.string()),
        ("index", pa.int64()),
        ("group_size", pa.int64()),
        ("purpose", pa.string()),
        ("task", pa.string()),
        ("source", pa.string()),
        ("entry", pa.string()),
        ("prompt", pa.string()),
        ("completion", pa.string()),
        ("tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("logprob_source", pa.string()),
        ("logprob_distribution", pa.string()),
        ("generated", pa.list_(pa.struct(_SPAN))),
        ("version_spans", pa.list_(pa.struct([*_SPAN, ("version", pa.int64())]))),
        ("min_version", pa.int64()),
        ("max_version", pa.int64()),
        ("num_tokens", pa.int64()),
        ("num_generated", pa.int64()),
        ("weights_sha256", pa.string()),
        ("worker_id", pa.string()),
        ("engine", pa.string()),
        ("sampling", _SAMPLING),
        ("finish_reason", pa.string()),
        ("turn_rewards", pa.list_(pa.float64())),
        ("requested_ms", pa.int64()),
        ("started_ms", pa.int64()),
        ("finished_ms", pa.int64()),
        ("metadata", pa.map_(pa.string(), pa.string())),
        ("fate", pa.string()),
        ("step", pa.int64()),
        ("advantage", pa.float32()),
        ("drop_reason", pa.string()),
        ("drop_detail", pa.string()),
        ("dropped_at_version", pa.int64()),
        ("drop_of_group", pa.bool_()),
        ("kafka", KAFKA),
    ]
)
_REWARDS = pa.schema(
    [
        ("trajectory", PLACE),
        ("group_id", pa.string()),
        ("seq", pa.int64()),
        ("attempt", pa.string()),
        ("index", pa.int64()),
        ("name", pa.string()),
        ("outcome", pa.string()),
        ("value", pa.float64()),
        ("components", _NUMBERS),
        ("code_version", pa.string()),
        ("application", pa.string()),
        ("error", pa.string()),
        ("seconds", pa.float64()),
        ("time_ms", pa.int64()),
        ("kafka", KAFKA),
    ]
)
_STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("time_ms", pa.int64()),
        ("session", pa.string()),
        ("checkpoint", pa.string()),
        ("snapshot_sha256", pa.string()),
        ("num_samples", pa.int64()),
        ("is_sequential", pa.bool_()),
        ("budget", pa.int64()),
        ("world_size", pa.int64()),
        ("idle_s", pa.float64()),
        ("training_s", pa.float64()),
        ("staleness", pa.list_(pa.int64())),
        ("metrics", _NUMBERS),
        (
            "rewards",
            pa.list_(
                pa.struct([("name", pa.string()), *((name, pa.float64()) for name in ("mean", "std", "minimum", "maximum", "stderr"))])
            ),
        ),
        ("workers", pa.list_(pa.struct([("worker_id", pa.string()), ("staleness", pa.list_(pa.int64()))]))),
        ("missing", pa.string()),
    ]
)
_SAMPLES = pa.schema(
    [
        ("step", pa.int64()),
        ("position", pa.int64()),
        ("trajectory", PLACE),
        ("seq", pa.int64()),
        ("index", pa.int64()),
        ("attempt", pa.string()),
        ("advantage", pa.float32()),
    ]
)
_DROPS = pa.schema(
    [
        ("trajectory", PLACE),
        ("group_id", pa.string()),
        ("seq", pa.int64()),
        ("attempt", pa.string()),
        ("why", pa.string()),
        ("detail", pa.string()),
        ("version", pa.int64()),
        ("learner_version", pa.int64()),
        ("num_tokens", pa.int64()),
        ("worker_id", pa.string()),
        ("time_ms", pa.int64()),
    ]
)
_WORKERS = pa.schema(
    [
        ("worker_id", pa.string()),
        ("kind", pa.string()),
        ("host", pa.string()),
        ("engine", pa.string()),
        ("state", pa.string()),
        ("installed_version", pa.int64()),
        ("rollouts", pa.int64()),
        ("rollouts_per_s", pa.float64()),
        ("tokens_per_s", pa.float64()),
        ("busy_s", pa.float64()),
        ("in_flight", pa.int64()),
        ("capacity", pa.int64()),
        ("price_per_hour", pa.float64()),
        ("time_ms", pa.int64()),
    ]
)
_RECORDS = pa.schema([("value", pa.binary()), ("kafka", KAFKA)])
SCHEMAS: Mapping[Table, Any] = {
    Table.TRAJECTORIES: _TRAJECTORIES,
    Table.REWARDS: _REWARDS,
    Table.STEPS: _STEPS,
    Table.SAMPLES: _SAMPLES,
    Table.DROPS: _DROPS,
    Table.WORKERS: _WORKERS,
    Table.RECORDS: _RECORDS,
}


def schema_of(reward_names: Iterable[str]) -> Any:
    """The schema of trajectories, with a column for each reward."""
    columns = [pa.field(REWARD_PREFIX + name, pa.float64()) for name in sorted(reward_names)]
    return pa.schema([*_TRAJECTORIES, *columns])


def choose_names(known: Iterable[str], new: Iterable[str]) -> tuple[str, ...]:
    """The rewards that get a column: first those that had one, then new ones in alphabetical order. SQL ignores case, so of two names that
    differ only in case the first gets one."""
    chosen = {name.lower(): name for name in known}
    for name in sorted(new):
        if len(chosen) < MOST_REWARD_COLUMNS:
            chosen.setdefault(name.lower(), name)
    return tuple(chosen.values())


def names_in(schema: Any) -> frozenset[str]:
    """The rewards with a column in a schema of trajectories."""
    return frozenset(name.removeprefix(REWARD_PREFIX) for name in schema.names if name.startswith(REWARD_PREFIX))


def trajectories_table(records: Sequence[HistoryRecord], reward_names: Iterable[str]) -> Any:
    """A row for each of `records`. An unreadable record has only fate and `kafka`."""
    schema = schema_of(reward_names)
    trajectories = [each.trajectory for each in records]
    tokens = numbers_array([None if trajectory is None else trajectory.token_ids for trajectory in trajectories], pa.int32())
    logprobs = numbers_array([None if trajectory is None else trajectory.logprobs for trajectory in trajectories], pa.float32())
    columns = {
        "tokens": tokens,
        "logprobs": logprobs,
        "num_tokens": pc.list_value_length(tokens).cast(pa.int64()),
        "num_generated": pc.list_value_length(logprobs).cast(pa.int64()),
        **fate_columns([each.entry for each in records]),
        "kafka": messages_array([each.raw for each in records]),
    }
    for name in names_in(schema):
        columns[REWARD_PREFIX + name] = pa.array([each.rewards.get(name) for each in records], pa.float64())
    return _table(trajectories, schema, columns)


def fate_columns(entries: Sequence[BookEntry]) -> dict[str, Any]:
    """The columns of records' fates."""
    drops = [entry.drop for entry in entries]
    return {
        "fate": pa.array([entry.fate.value for entry in entries], pa.string()),
        "step": pa.array([entry.step for entry in entries], pa.int64()),
        "advantage": pa.array([entry.advantage for entry in entries], pa.float32()),
        "drop_reason": pa.array([drop and drop.why.value for drop in drops], pa.string()),
        "drop_detail": pa.array([(drop.detail or None) if drop else None for drop in drops], pa.string()),
        "dropped_at_version": pa.array([drop and drop.learner_version for drop in drops], pa.int64()),
        "drop_of_group": pa.array([drop and drop.of_group for drop in drops], pa.bool_()),
    }


def rewards_table(rewards: Sequence[tuple[RawMessage, Reward]]) -> Any:
    """A row for each reward, scored or not."""
    return _rewards_of([reward for _, reward in rewards], messages_array([raw for raw, _ in rewards]))


def judged_table(rewards: Sequence[Reward]) -> Any:
    """The same for rewards that lie in no topic."""
    return _rewards_of(rewards, pa.nulls(len(rewards), KAFKA))


def known_rewards_table(records: Iterable[HistoryRecord]) -> Any:
    """The same from a history, which has only record, name and value."""
    return pa.Table.from_pylist(
        [
            {"trajectory": asdict(each.where), "name": name, "outcome": "scored", "value": value}
            for each in records
            for name, value in each.rewards.items()
        ],
        schema=_REWARDS,
    )


def _rewards_of(rewards: Sequence[Reward], kafka: Any) -> Any:
    return _table(rewards, _REWARDS, {"trajectory": attribute_array(rewards, "of", PLACE), "kafka": kafka})


def steps_table(steps: Iterable[Step]) -> Any:
    """A row for each step."""
    found = list(steps)
    reports = [step.report for step in found]
    columns = {
        "step": pa.array([step.version for step in found], pa.int64()),
        "num_samples": pa.array([len(step.offsets) for step in found], pa.int64()),
        "is_sequential": pa.array([step.is_sequential for step in found], pa.bool_()),
        "budget": pa.array([report.policy and report.policy.budget for report in reports], pa.int64()),
        "staleness": attribute_array(reports, "staleness_total", _STEPS.field("staleness").type),
        "rewards": attribute_array(reports, "reward_stats", _STEPS.field("rewards").type),
        "missing": pa.array([step.missing or None for step in found], pa.string()),
    }
    return _table(reports, _STEPS, columns)


def samples_table(steps: Iterable[Step]) -> Any:
    """A row for each sample that a step trained, in the order of its batch."""
    parts = [_samples_of(step) for step in steps]
    return pa.concat_tables(parts) if parts else _SAMPLES.empty_table()


def drops_table(drops: Iterable[Drop]) -> Any:
    """A row for each drop; one of a whole seq has no `trajectory`."""
    found = list(drops)
    return _table(found, _DROPS, {"trajectory": attribute_array(found, "what", PLACE)})


def workers_table(workers: Iterable[WorkerStatus]) -> Any:
    """A row for each worker: its newest status."""
    return _table(list(workers), _WORKERS, {})


def records_table(found: Sequence[tuple[RawMessage, bytes | None]]) -> Any:
    """A row for each message, with its kept bytes."""
    return pa.table([pa.array([value for _, value in found], pa.binary()), messages_array([raw for raw, _ in found])], schema=_RECORDS)


def newest_table(found: Sequence[tuple[str, bytes]]) -> Any:
    """A row for each key of a compacted topic, without the place of its newest record."""
    kafka = pa.array([{"key": key} for key, _ in found], KAFKA)
    return pa.table([pa.array([value for _, value in found], pa.binary()), kafka], schema=_RECORDS)


def _samples_of(step: Step) -> Any:
    count = len(step.offsets)
    place = pa.StructArray.from_arrays(
        [pa.array(step.partitions.astype(np.int32)), pa.array(np.asarray(step.offsets, np.int64))], fields=list(PLACE)
    )
    columns = {
        "step": pa.array(np.full(count, step.version, np.int64)),
        "position": pa.array(np.arange(count, dtype=np.int64)),
        "trajectory": place,
        "seq": pa.array(np.asarray(step.seqs, np.int64)),
        "index": pa.array(np.asarray(step.indices, np.int64)),
        "attempt": pa.array([step.tokens[group] for group in step.groups.tolist()], pa.string()),
        "advantage": pa.array(np.asarray(step.advantages, np.float32)),
    }
    return pa.table([columns[name] for name in _SAMPLES.names], schema=_SAMPLES)


def _table(records: Sequence[object | None], schema: Any, columns: Mapping[str, Any]) -> Any:
    """A table of `columns`, and of the records' attributes for the columns that are not given."""
    arrays = [columns[each.name] if each.name in columns else attribute_array(records, each.name, each.type) for each in schema]
    return pa.table(arrays, schema=schema)
