"""Where the records of a rescore go: the topic `rewards`, or a folder of Parquet files. Each batch is there whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.errors import ProducerFenced
from echo_replay.fates import place_code
from echo_replay.rescoring.team import Item
from echo_schemas.errors import UserError
from echo_schemas.headers import Header, fresh_name, headers_for
from echo_schemas.records import Coordinates, Reward
from echo_schemas.topics import REWARDS

Written = tuple[Item, bytes]
"""A sample, and its record as it is written."""


class RewardSink(Protocol):
    """Takes records, batch after batch. `is_apart`: it is not the log, so it is asked, and not the log, what is scored already."""

    is_apart: bool

    def known(self, where: Coordinates) -> float | None:
        """What is held for the trajectory at `where` already, NaN for a record without a value; None: nothing."""

    def write(self, rewards: Sequence[Written]) -> None:
        """All of them count when this returns, none if it raises or the process is killed before. Raises TransportError, UserError."""


class TopicRewards:
    """The topic `rewards`, each record on its trajectory's partition, in one transaction a batch.

    Everything of a batch is there before the transaction begins: an open one holds back whoever reads committed records.
    """

    is_apart = False

    def __init__(self, writer: TransactionalWriter, bus: Bus, run_id: str, name: str) -> None:
        self._writer, self._bus, self._run_id, self._name = writer, bus, run_id, name
        self._physical = bus.namespace.topic(REWARDS)

    def known(self, where: Coordinates) -> float | None:
        del where
        return None

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
                hint="What it wrote stays, and the other one goes on behind it. Or did this one stand still for 15 s? Start it again.",
            ) from exc


@contextmanager
def topic_rewards(bus: Bus, run_id: str, name: str) -> Iterator[TopicRewards]:
    """The only one that writes under this name: an earlier one is ended, and what it left open is rolled back, before this is entered.

    Raises NotAuthorized, DeadlineExceeded, TransportError.
    """
    writer = bus.transactions(f"rescore.{run_id}.{name}", profiles.BRIEF_TRANSACTIONS)
    try:
        writer.start()
        yield TopicRewards(writer, bus, run_id, name)
    finally:
        writer.close()


class FolderRewards:
    """An export that has the table `rewards` alone: one file a batch, which counts when the manifest names it. Imports pyarrow."""

    is_apart = True

    def __init__(self, home: Path, bus: Bus, run_id: str, reward: tuple[str, str]) -> None:
        """`home` is locked by the caller; `reward`: name and version. Raises UserError for a folder that holds something else."""
        from echo_replay.export.identity import check_identity, identity_of
        from echo_replay.export.layout import Table
        from echo_replay.export.manifest import ExportManifest, read_manifest, remove_leftovers

        self._home, self._clock, self._codec = home, bus.clock, bus.codec
        identity = identity_of(bus)
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

    def known(self, where: Coordinates) -> float | None:
        code = place_code(where.partition, where.offset)
        at = int(self._codes.searchsorted(code))
        return float(self._values[at]) if at < len(self._codes) and self._codes[at] == code else None

    def write(self, rewards: Sequence[Written]) -> None:
        from echo_replay.export.columns import judged_table
        from echo_replay.export.layout import Slot, Table
        from echo_replay.export.manifest import write_manifest
        from echo_replay.export.table_file import write_whole

        decoded = [reward for _, record in rewards if isinstance(reward := self._codec.decode(record), Reward)]
        number = max((file.slot.start for file in self._manifest.files), default=-1) + 1
        try:
            file = write_whole(self._home, Slot(Table.REWARDS, 0, number), judged_table(decoded))
            self._manifest = replace(self._manifest, written_ms=self._clock.time_ms(), files=(*self._manifest.files, file))
            write_manifest(self._home, self._manifest)
        except OSError as exc:
            full = exc.errno in (errno.ENOSPC, errno.EDQUOT)
            raise UserError(
                f"The scores cannot be written to {self._home} ({exc.strerror or exc}).",
                hint=f"{'Make room' if full else 'Choose a folder that you may write to'}; what was committed stays.",
            ) from exc


@contextmanager
def folder_rewards(folder: Path, bus: Bus, run_id: str, reward: tuple[str, str]) -> Iterator[FolderRewards]:
    """The only one that writes to the folder. Raises UserError for a folder of something else, or that another command writes to."""
    from echo_replay.export.layout import folder_of
    from echo_replay.export.manifest import forget_if_empty, locked

    home = folder_of(folder, run_id)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f"{home} cannot be made ({exc.strerror or exc}).", hint="Choose a folder that you may write to.") from exc
    with locked(home):
        try:
            yield FolderRewards(home, bus, run_id, reward)
        finally:
            forget_if_empty(home)


def _values_in(path: Path) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Where what lies that is judged, as one number each, and its value. Raises UserError for a file that is not there any more."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path, columns=["trajectory", "value"]).flatten()
    except (OSError, ArrowException) as exc:
        raise UserError(f"{path} cannot be read ({exc}).", hint="Choose another folder; `echoswarm export --verify` says more.") from exc
    partitions, offsets, values = (table.column(name).to_numpy() for name in ("trajectory.partition", "trajectory.offset", "value"))
    return place_code(partitions.astype(np.int64), offsets), values
