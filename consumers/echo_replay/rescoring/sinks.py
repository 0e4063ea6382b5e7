"""Targets of a rescore: the topic `rewards`, or a folder of Parquet files. A batch is written whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.errors import ProducerFenced
from echo_replay.books import place_code
from echo_replay.history import Undecoded
from echo_replay.rescoring.team import Item
from echo_schemas.errors import UserError
from echo_schemas.headers import Header, fresh_name, headers_for
from echo_schemas.records import Reward
from echo_schemas.topics import REWARDS

Written = tuple[Item, bytes]
"""A sample and its record's bytes."""


class RewardSink(Protocol):
    """Takes records, batch after batch."""

    def known(self, told: Undecoded) -> float | None:
        """The trajectory's value in the target; NaN: a record without a value; None: no record."""

    def write(self, rewards: Sequence[Written]) -> None:
        """Write all; none count if this raises or the process is killed before it returns. Raises TransportError, UserError."""


class TopicRewards:
    """The topic `rewards`, each record on its trajectory's partition, in one transaction a batch. A batch is complete before its
    transaction begins, because an open transaction holds back all readers of committed records."""

    def __init__(self, writer: TransactionalWriter, bus: Bus, run_id: str, name: str) -> None:
        self._writer, self._bus, self._run_id, self._name = writer, bus, run_id, name
        self._physical = bus.namespace.topic(REWARDS)

    def known(self, told: Undecoded) -> float | None:
        return told.rewards.get(self._name)

    def write(self, rewards: Sequence[Written]) -> None:
        time_ms, source, signer = self._bus.clock.time_ms(), self._bus.client_id, self._bus.signer
        signatures: list[Header] = []
        if signer is not None:
            signatures = signer.sign(self._physical, [(item.identity.group_id, record) for item, record in rewards])
        try:
            with self._writer.transaction() as transaction:
                for number, (item, record) in enumerate(rewards):
                    group_id = item.identity.group_id
                    headers = headers_for(
                        Reward.SCHEMA, fresh_name(), run_id=self._run_id, group_id=group_id, source=source, time_ms=time_ms
                    )  # fmt: skip
                    headers += signatures[number : number + 1]
                    transaction.publish_bytes(
                        self._physical, record, key=group_id.encode(), partition=item.where.partition, headers=headers
                    )  # fmt: skip
        except ProducerFenced as exc:
            raise UserError(
                f"Another rescore under the name {self._name!r} has begun, so this one has ended.",
                hint="Its records stay, and the other one goes on after them. Or did this one stand still for 15 s? Start it again.",
            ) from exc


@contextmanager
def topic_rewards(bus: Bus, run_id: str, name: str) -> Iterator[TopicRewards]:
    """The only writer of this name: an earlier writer is fenced and its open transaction rolled back before this is entered. Raises
    NotAuthorized, DeadlineExceeded, TransportError."""
    with closing(bus.transactions(f"rescore.{run_id}.{name}", profiles.BRIEF_TRANSACTIONS)) as writer:
        writer.start()
        yield TopicRewards(writer, bus, run_id, name)


class FolderRewards:
    """An export with the table `rewards` alone: one file a batch, valid once the manifest names it. Imports pyarrow."""

    def __init__(self, home: Path, bus: Bus, run_id: str, reward: tuple[str, str]) -> None:
        """The caller has locked `home`. `reward`: name and version. Raises UserError if the folder holds something else."""
        from echo_learner.commit.session import identities
        from echo_replay.export.layout import Table
        from echo_replay.export.manifest import ExportManifest, check_identity, read_manifest, remove_leftovers

        self._home, self._clock, self._codec = home, bus.clock, bus.codec
        identity = identities(bus)
        name, version = reward
        known = read_manifest(home)
        if known is not None:
            check_identity(known, home, run_id=run_id, namespace=bus.namespace.name, identity=identity)
            if known.rescored != (name, version):
                what = f"scores of {known.rescored[0]!r}, version {known.rescored[1]!r}" if known.rescored else "an export of the run"
                raise UserError(f"{home} holds {what}, not of {name!r}, version {version!r}.", hint="Choose another folder.")
        self._manifest = known or ExportManifest(run_id=run_id, namespace=bus.namespace.name, identity=identity, rescored=(name, version))
        remove_leftovers(home, self._manifest)
        found = [_values_in(home / file.path) for file in self._manifest.files if file.slot.table is Table.REWARDS]
        codes = np.concatenate([codes for codes, _ in found] or [np.zeros(0, np.int64)])
        order = np.argsort(codes)
        self._codes = codes[order]
        self._values = np.concatenate([values for _, values in found] or [np.zeros(0)])[order]

    def known(self, told: Undecoded) -> float | None:
        code = place_code(told.where.partition, told.where.offset)
        at = int(self._codes.searchsorted(code))
        return float(self._values[at]) if at < len(self._codes) and self._codes[at] == code else None

    def write(self, rewards: Sequence[Written]) -> None:
        from echo_replay.export.columns import judged_table
        from echo_replay.export.layout import Slot, Table
        from echo_replay.export.manifest import unwritable, write_manifest
        from echo_replay.export.table_file import write_whole

        decoded = [reward for _, record in rewards if isinstance(reward := self._codec.decode(record), Reward)]
        number = max((file.slot.start for file in self._manifest.files), default=-1) + 1
        try:
            file = write_whole(self._home, Slot(Table.REWARDS, 0, number), judged_table(decoded))
            self._manifest = replace(self._manifest, written_ms=self._clock.time_ms(), files=(*self._manifest.files, file))
            write_manifest(self._home, self._manifest)
        except OSError as exc:
            raise unwritable("scores", self._home, exc) from exc


@contextmanager
def folder_rewards(folder: Path, bus: Bus, run_id: str, reward: tuple[str, str]) -> Iterator[FolderRewards]:
    """The only writer of the folder. Raises UserError if the folder holds something else, or another command writes to it."""
    from echo_replay.export.layout import folder_of
    from echo_replay.export.manifest import forget_if_empty, locked, unwritable

    home = folder_of(folder, run_id)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise unwritable("scores", home, exc) from exc
    with locked(home):
        try:
            yield FolderRewards(home, bus, run_id, reward)
        finally:
            forget_if_empty(home)


def _values_in(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The `place_code` of each judged trajectory, and its value. Raises UserError for a file that cannot be read."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path, columns=["trajectory", "value"]).flatten()
    except (OSError, ArrowException) as exc:
        raise UserError(f"{path} cannot be read ({exc}).", hint="Choose another folder; `echoswarm export --verify` says more.") from exc
    partitions, offsets, values = (table.column(name).to_numpy() for name in ("trajectory.partition", "trajectory.offset", "value"))
    return place_code(partitions.astype(np.int64), offsets), values
