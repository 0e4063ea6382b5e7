"""Updates exported trajectories: with fates that were open, and rewards that came late. Imports pyarrow.

A value is never removed from a row: the first scored reward of a name counts, and a fate may survive in the row alone after retention has
removed it from the log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from echo_replay.export.columns import REWARD_PREFIX, fate_columns, names_in, schema_of
from echo_replay.fates import Fates
from echo_replay.reward_columns import RewardColumns
from echo_replay.selection import Fate
from echo_schemas.records import Purpose

# A record that the learner could not read may still get a state of its own.
_MAY_CHANGE = (Fate.OPEN, Fate.DEAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """The news of one partition. `rewards`: the new ones; `names`: the rewards that may have a column."""

    partition: int
    fates: Fates
    rewards: RewardColumns
    names: tuple[str, ...]

    def schema_of(self, schema: Any) -> Any:
        """The columns of the new file, whose predecessor had those of `schema` (None: there was none)."""
        new = {name for name in self.rewards.names if name in self.names}
        return schema_of((frozenset() if schema is None else names_in(schema)) | new)


def count_unsettled(table: Any) -> int:
    """Number of rows whose fate may change."""
    return int(_unsettled(table).sum())


def refresh(table: Any, news: News, schema: Any) -> tuple[Any, int]:
    """The updated rows of `table` in the columns of `schema`, and the number of rows that changed."""
    changed = np.zeros(table.num_rows, np.bool_)
    offsets = pc.struct_field(table["kafka"], "offset").to_numpy()
    # A column that an older release did not write is null.
    columns = {each.name: table[each.name] if each.name in table.schema.names else pa.nulls(table.num_rows, each.type) for each in schema}
    columns |= _new_fates(table, offsets, news, changed)
    for name in names_in(schema):
        column = REWARD_PREFIX + name
        columns[column] = _with_rewards(columns[column], name, offsets, news.rewards, changed)
    return pa.table([columns[name] for name in schema.names], schema=schema), int(changed.sum())


def _unsettled(table: Any) -> npt.NDArray[np.bool_]:
    may_change = pc.is_in(table["fate"], pa.array([fate.value for fate in _MAY_CHANGE]))
    return np.asarray(pc.or_(may_change, pc.fill_null(table["drop_of_group"], False)).to_numpy(), np.bool_)


def _new_fates(table: Any, offsets: npt.NDArray[np.int64], news: News, changed: npt.NDArray[np.bool_]) -> dict[str, Any]:
    places = np.flatnonzero(_unsettled(table))
    if not len(places):
        return {}
    chosen = table.take(pa.array(places)).select(["purpose", "seq", *fate_columns([])])
    rows = chosen.to_pylist()
    outcomes = [
        news.fates.of(news.partition, int(offset), None if row["purpose"] is None else Purpose(row["purpose"]), row["seq"])
        for offset, row in zip(offsets[places], rows, strict=True)
    ]
    said = pa.table(fate_columns(outcomes)).to_pylist()
    is_news = [
        outcome.fate is not Fate.OPEN and any(row[name] != value for name, value in words.items())
        for outcome, row, words in zip(outcomes, rows, said, strict=True)
    ]
    if not any(is_news):
        return {}
    changed[places[is_news]] = True
    found = {at: words for at, words, is_new in zip(places.tolist(), said, is_news, strict=True) if is_new}
    return {
        name: pa.array([found[at][name] if at in found else old for at, old in enumerate(table[name].to_pylist())], column.type)
        for name, column in fate_columns([]).items()
    }


def _with_rewards(
    known: Any, name: str, offsets: npt.NDArray[np.int64], rewards: RewardColumns, changed: npt.NDArray[np.bool_]
) -> Any:  # fmt: skip
    """A reward's column with new values in place of nulls."""
    if name not in rewards.names or not len(offsets):
        return known
    mine = rewards.codes == rewards.names.index(name)
    judged, values = rewards.offsets[mine], rewards.values[mine]
    at = np.minimum(np.searchsorted(judged, offsets), max(0, len(judged) - 1))
    fills = np.asarray(known.is_null().to_numpy(zero_copy_only=False) if isinstance(known, pa.Array) else known.is_null().to_numpy())
    fills = fills & (judged[at] == offsets) if len(judged) else np.zeros(len(offsets), np.bool_)
    if not fills.any():
        return known
    changed |= fills
    filled = np.where(fills, values[at], 0.0)
    flat = known if isinstance(known, pa.Array) else known.combine_chunks()
    return pc.if_else(pa.array(fills), pa.array(filled), flat)
