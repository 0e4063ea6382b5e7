"""Checks that every trained sample is signed by the worker that it names, and each of its rewards by an application that may give it.
For runs whose [trust] requires signatures.

The check of trajectories runs while they are read for the books. Of `rewards`, the values with a trusted signature are kept in columns, and
each value that a report names as trained must be among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_replay.books import Samples
from echo_replay.raw_log import RawLog
from echo_replay.reward_columns import RewardColumns, RewardJoin
from echo_replay.run_log import RunLog
from echo_replay.steps import Step
from echo_replay.verdicts import Finding, Promise
from echo_schemas.columns import FLAG_DTYPE, VALUE_DTYPE
from echo_schemas.errors import InvalidRecord
from echo_schemas.projection import Projection
from echo_schemas.records import Trajectory
from echo_schemas.registry import SchemaIds
from echo_schemas.topics import REWARDS, TRAJECTORIES

if TYPE_CHECKING:
    from echo_bus.signatures import Verifier

_ANY_OFFSET = 1 << 62
# The value of a record's reward.
_GIVEN = np.dtype([("offset", np.int64), ("value", np.float64)])


class SignatureCheck:
    """Checks the messages of `trajectories` while they are read, and remembers the places of those without a trusted signature."""

    def __init__(self, verifier: Verifier, ids: SchemaIds) -> None:
        self._verifier = verifier
        self._read = Projection(Trajectory, ("worker_id",), ids).read
        self._unsigned: dict[tuple[int, int], str] = {}

    def watch(self, batches: Iterable[list[RawMessage]]) -> Iterator[list[RawMessage]]:
        """Check each message; yields the same batches."""
        for batch in batches:
            for raw in batch:
                # No record: a restored run has such messages between its records.
                if raw.value() is None:
                    continue
                try:
                    (worker_id,) = self._read(raw.value())
                    self._verifier.signer_of(raw).require_author(TRAJECTORIES, worker_id.decode(errors="replace"))
                except InvalidRecord as exc:
                    self._unsigned[raw.partition() or 0, raw.offset() or 0] = exc.message
            yield batch

    def finding(self, samples: Samples) -> Finding:
        """The finding so far: of the samples, not yet of their rewards."""
        finding = Finding(Promise.SIGNED, num_looked_at=len(samples.offsets))
        places = zip(samples.partitions.tolist(), samples.offsets.tolist(), samples.versions.tolist(), strict=True)
        for partition, offset, version in places:
            if why := self._unsigned.get((partition, offset)):
                finding.broken(f"A trained record has no good signature: {why}", partition=partition, offset=offset, version=version)
        if self._unsigned:
            finding.note(
                f"{len(self._unsigned)} records of the topic are not signed by the worker that they name; untrained ones do no harm"
            )
        return finding


def check_rewards(bus: Bus, log: RunLog, samples: Samples, finding: Finding) -> Finding:
    """`finding`, with the check of the rewards added. Raises DeadlineExceeded, TransportError."""
    with RawLog(bus, bus.namespace.topic(REWARDS)) as rewards:
        joins = {number: RewardJoin(log.run_id, bus.codec.ids, number, 0, _ANY_OFFSET, verifier=bus.verifier) for number in rewards.lows}
        for batch in rewards.messages():
            for raw in batch:
                joins[raw.partition() or 0].add((raw,))
        lows = rewards.lows
    signed = {number: join.columns(every=True) for number, join in joins.items()}
    for name in sorted({column.name for step in log.steps for column in step.rewards}):
        values = np.concatenate([_trained_values(step, name) for step in log.steps])
        wanted = ~np.isnan(values) & (samples.offsets >= 0)
        for number in np.unique(samples.partitions[wanted]).tolist():
            mine = np.flatnonzero(wanted & (samples.partitions == number))
            trained = _given(samples.offsets[mine], values[mine])
            found = np.isin(trained, _given_under(name, signed[number])) if number in signed else np.zeros(len(mine), np.bool_)
            if not found.all() and lows.get(number):
                finding.gap(f"{int((~found).sum())} trained values of the reward {name!r} may be among those that retention has removed")
                continue
            for at in mine[~found].tolist():
                where = {"partition": number, "offset": int(samples.offsets[at]), "version": int(samples.versions[at])}
                finding.broken(f"No trusted key has signed the trained value {values[at]:g} of the reward {name!r}.", **where)
    return finding


def _trained_values(step: Step, name: str) -> npt.NDArray[np.float64]:
    """The values of one reward in a step, one a sample; NaN where its default was used, or the step has no such reward."""
    for column in step.rewards:
        if column.name == name:
            return np.where(np.frombuffer(column.defaulted, FLAG_DTYPE), np.nan, np.frombuffer(column.values, VALUE_DTYPE))
    return np.full(len(step.offsets), np.nan)


def _given_under(name: str, columns: RewardColumns) -> npt.NDArray[np.void]:
    if name not in columns.names:
        return np.zeros(0, _GIVEN)
    mine = columns.codes == columns.names.index(name)
    return _given(columns.offsets[mine], columns.values[mine])


def _given(offsets: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> npt.NDArray[np.void]:
    given = np.zeros(len(offsets), _GIVEN)
    given["offset"], given["value"] = offsets, values
    return given
