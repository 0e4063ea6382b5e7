"""A part of a run's past as files of an export, for an SQL question to the log itself. Imports pyarrow.

Steps, samples, drops and workers are those of the whole run. Rewards have only record, name and value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from echo_bus.clock import Deadline
from echo_replay.export.columns import (
    choose_names,
    drops_table,
    known_rewards_table,
    samples_table,
    steps_table,
    trajectories_table,
    workers_table,
)
from echo_replay.export.layout import Slot, Table
from echo_replay.export.manifest import ExportedFile, ExportManifest
from echo_replay.export.table_file import write_whole
from echo_replay.history import History, HistoryRecord
from echo_replay.run_log import read_drops
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerStatus
from echo_schemas.topics import WORKERS

_ROWS_AT_ONCE = 1_000


@contextmanager
def folder_of_part() -> Iterator[Path]:
    """An empty folder for `load_part`, removed at the end of the block. Raises UserError if the disk refuses what is written there."""
    try:
        with TemporaryDirectory(prefix="echoswarm-sql-") as folder:
            yield Path(folder)
    except OSError as exc:
        raise UserError(
            f"The records cannot be written to a temporary folder ({exc.strerror or exc}).", hint="Set TMPDIR to a disk with room."
        ) from exc


def load_part(
    history: History, records: Iterator[HistoryRecord], most: int, home: Path, deadline: Deadline | None = None
) -> ExportManifest:
    """Write the records `records` into `home`, an empty folder. Raises UserError if they are more than `most`, or not read by `deadline`;
    OSError, TransportError."""
    files: list[ExportedFile] = []
    names: tuple[str, ...] = ()
    for number, batch in enumerate(_batches(records, most, deadline)):
        names = choose_names(names, {name for each in batch for name in each.rewards})
        table = trajectories_table(batch, names)
        files.append(write_whole(home, Slot(Table.TRAJECTORIES, 0, number), table))
        files.append(write_whole(home, Slot(Table.REWARDS, 0, number), known_rewards_table(batch)))
    drops, _ = read_drops(history.bus, history.run_id)
    workers = history.bus.newest(WORKERS, WorkerStatus).values()
    tables = {
        Table.STEPS: steps_table(history.log.steps),
        Table.SAMPLES: samples_table(history.log.steps),
        Table.DROPS: drops_table(drops),
        Table.WORKERS: workers_table(worker for worker in workers if worker.run_id == history.run_id),
    }
    files += [write_whole(home, Slot(table, 0, 0), content) for table, content in tables.items() if content.num_rows]
    return ExportManifest(
        run_id=history.run_id,
        namespace=history.bus.namespace.name,
        identity={},
        tip=history.log.tip,
        reward_names=names,
        files=tuple(files),
    )


def _batches(records: Iterator[HistoryRecord], most: int, deadline: Deadline | None) -> Iterator[list[HistoryRecord]]:
    num_read = 0
    while batch := list(itertools.islice(records, _ROWS_AT_ONCE)):
        num_read += len(batch)
        if num_read > most:
            raise UserError(
                f"The question is about more than {most:,} trajectories.",
                hint="Name a smaller range, or export the run and ask the export; `echoswarm sql --most` allows more.",
            )
        if deadline is not None and deadline.expired():
            raise UserError(
                f"Reading took too long: {num_read:,} trajectories so far.", hint="Name a smaller range, or ask an export of the run."
            )
        yield batch
