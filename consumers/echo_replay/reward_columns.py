"""The rewards of one partition's trajectories in numpy columns: the value of each name for each record.

A reward lies on its trajectory's partition, so rewards are joined partition by partition. Of several scored values of one name for one
record the first on the log counts, as in the learner. About 22 bytes a reward while a partition is read.

    offsets  names  values          of record 17: {"exact": 1.0, "length": 0.3}
    17       0      1.0
    17       1      0.3
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_replay.steps import Ints
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import run_of
from echo_schemas.projection import Projection
from echo_schemas.records import Reward
from echo_schemas.registry import SchemaIds
from echo_schemas.topics import REWARDS

if TYPE_CHECKING:
    from echo_bus.signatures import Verifier

_FIELDS = ("run_id", "of.partition", "of.offset", "name", "value")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RewardColumns:
    """Scored rewards, sorted by the offset of their record, then by name. `names[codes[i]]` is the name of reward i."""

    offsets: Ints
    codes: npt.NDArray[np.int16]
    values: npt.NDArray[np.float64]
    names: tuple[str, ...]

    def of(self, offset: int) -> Mapping[str, float]:
        """By name, the rewards of the record at `offset`."""
        found: dict[str, float] = {}
        # The array's method: numpy's function of the same name costs five times as much for one number.
        at = int(self.offsets.searchsorted(offset))
        while at < len(self.offsets) and self.offsets[at] == offset:
            found[self.names[self.codes[at]]] = float(self.values[at])
            at += 1
        return found


class RewardJoin:
    """Joins rewards of one run while they are read, for records of one partition within [first, end). `add` in the order of the log."""

    def __init__(
        self, run_id: str, ids: SchemaIds, partition: int, first: int, end: int, *, answered: str = "", verifier: Verifier | None = None
    ) -> None:
        """`answered`: a reward of this name counts without a value too, as NaN. `verifier`: rewards that it refuses do not count, as in the
        learner."""
        self._verifier = verifier
        self._answered = answered.encode()
        self._run = run_id.encode()
        self._prefix = f"{run_id}/".encode()
        self._read = Projection(Reward, _FIELDS, ids).read
        self._partition, self._first, self._end = partition, first, end
        self._offsets, self._codes, self._values = array("q"), array("h"), array("d")
        self._names: dict[bytes, int] = {}

    def add(self, batch: Iterable[RawMessage]) -> None:
        """Take the run's rewards for this partition; ignore messages of other runs and partitions, and rewards without a value."""
        for raw in batch:
            key = raw.key()
            if (key is None or not key.startswith(self._prefix)) and run_of(raw_headers(raw)) not in (None, self._run.decode()):
                continue
            try:
                run, partition, offset, name, value = self._read(raw.value())
                self._check_author(raw, name)
            except InvalidRecord:
                continue
            if run == self._run:
                self._take(partition, offset, name, value)

    def take(self, raw: RawMessage, reward: Reward) -> None:
        """The same for a decoded record of the run."""
        name = reward.name.encode()
        with suppress(InvalidRecord):
            self._check_author(raw, name)
            self._take(reward.of.partition, reward.of.offset, name, reward.value)

    def _check_author(self, raw: RawMessage, name: bytes) -> None:
        """Raises InvalidRecord unless the message is signed by an application that may give this reward."""
        if self._verifier is not None:
            self._verifier.signer_of(raw).require_author(REWARDS, name.decode(errors="replace"))

    def _take(self, partition: int, offset: int, name: bytes, value: float | None) -> None:
        if partition != self._partition or not self._first <= offset < self._end or (value is None and name != self._answered):
            return
        self._offsets.append(offset)
        self._codes.append(self._names.setdefault(name, len(self._names)))
        self._values.append(math.nan if value is None else value)

    def columns(self, *, every: bool = False) -> RewardColumns:
        """The rewards, sorted, each name once for each record; with `every` all values of a name."""
        offsets, codes = np.array(self._offsets, np.int64), np.array(self._codes, np.int16)
        # `lexsort` is stable: of equal keys the first on the log stays first.
        order = np.lexsort((codes, offsets))
        offsets, codes, values = offsets[order], codes[order], np.array(self._values, np.float64)[order]
        first = np.ones(len(offsets), np.bool_)
        first[1:] = every | (offsets[1:] != offsets[:-1]) | (codes[1:] != codes[:-1])
        names = tuple(name.decode(errors="replace") for name in self._names)
        return RewardColumns(offsets=offsets[first], codes=codes[first], values=values[first], names=names)
