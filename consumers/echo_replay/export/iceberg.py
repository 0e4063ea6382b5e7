"""Publishes an export to a lakehouse: its tables as Apache Iceberg tables, shared by all runs. Imports pyiceberg.

    files of the manifest that the table lacks ─▶ appended  ┐ one commit for each batch, with the
    files of the table that the manifest lacks ─▶ deleted   ┘ offsets of the export in the snapshot's properties

Each row has its run and the name of its exported file, and the tables are partitioned by both. So the table itself shows which files it
holds: after a kill the next call goes on, no row is there twice, and a file that was written again replaces its rows. The owner of the
lakehouse may expire snapshots and compact data files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import CommitFailedException, NoSuchTableError
from pyiceberg.expressions import And, EqualTo, In
from pyiceberg.table import Table as IcebergTable
from pyiceberg.transforms import IdentityTransform
from sqlalchemy.exc import SQLAlchemyError

from echo_replay.export.columns import SCHEMAS, schema_of
from echo_replay.export.layout import Table
from echo_replay.export.manifest import ExportedFile, ExportManifest
from echo_replay.export.table_file import row_groups
from echo_schemas.errors import UserError

RUN, FILE = "run_id", "export_file"
PREFIX = "echoswarm."
"""Prefix of a snapshot's properties: `run`, `offsets` (by topic and partition, [start, end)), `tip`, `written-ms`."""
# Bytes of files in one commit: with a commit for each file, the table of a long run would be slow to open.
_BATCH_BYTES = 64 << 20


@dataclass(slots=True, kw_only=True)
class Published:
    """The result of one call, over all tables: appended rows and files, and earlier files that they replace."""

    num_rows: int = 0
    num_files: int = 0
    num_replaced: int = 0


def publish_export(home: Path, manifest: ExportManifest, catalog: str, namespace: str) -> Published:
    """Bring the tables of `namespace` to the state of a run's export. `catalog`: its name in pyiceberg's own configuration. Raises
    UserError for an unusable catalog, a table that is not of an export, and another writer at the same time."""
    done = Published()
    try:
        opened = load_catalog(catalog)
        opened.create_namespace_if_not_exists(namespace)
        # The table of records holds bytes for the viewer only.
        for table in (table for table in Table if table is not Table.RECORDS):
            _publish_table(home, manifest, table, _opened(opened, f"{namespace}.{table.value}", manifest, table), done)
    except CommitFailedException as exc:
        raise UserError(
            f"Another writer has changed a table of {catalog}.{namespace} meanwhile ({exc}).", hint="Export again: it goes on from there."
        ) from exc
    except (ValueError, OSError, SQLAlchemyError) as exc:
        raise UserError(
            f"The Iceberg catalog {catalog!r} cannot be used: {str(exc).splitlines()[0]}",
            hint=f"pyiceberg reads it from ~/.pyiceberg.yaml or PYICEBERG_CATALOG__{catalog.upper()}__URI; what was committed stays.",
        ) from exc
    return done


def _opened(catalog: Catalog, name: str, manifest: ExportManifest, table: Table) -> IcebergTable:
    """The table, created if it is missing, with a column for each reward of the run."""
    columns = schema_of(manifest.reward_names) if table is Table.TRAJECTORIES else SCHEMAS[table]
    schema = pa.schema([(RUN, pa.string()), (FILE, pa.string()), *columns])
    try:
        found = catalog.load_table(name)
    except NoSuchTableError:
        found = catalog.create_table(name, schema)
        with found.update_spec() as spec:
            spec.add_field(RUN, IdentityTransform(), RUN)
            spec.add_field(FILE, IdentityTransform(), FILE)
        return found
    if [field.name for field in found.spec().fields] != [RUN, FILE]:
        raise UserError(f"The Iceberg table {name} is not one of an export.", hint="Choose another namespace.")
    with found.update_schema() as update:
        update.union_by_name(schema)
    return found


def _publish_table(home: Path, manifest: ExportManifest, table: Table, iceberg: IcebergTable, done: Published) -> None:
    there = _files_in(iceberg, manifest.run_id)
    new = [file for file in manifest.files if file.slot.table is table and file.rows and file.path not in there]
    properties = {
        f"{PREFIX}run": manifest.run_id,
        f"{PREFIX}offsets": json.dumps(manifest.ranges),
        f"{PREFIX}tip": str(manifest.tip),
        f"{PREFIX}written-ms": str(manifest.written_ms),
    }
    cluster = f"{PREFIX}cluster.{manifest.run_id}"
    mine = manifest.identity.get("cluster", "")
    if iceberg.properties.get(cluster, mine) != mine:
        raise UserError(
            f"The Iceberg table {'.'.join(iceberg.name())} holds a run {manifest.run_id!r} of another Kafka cluster.",
            hint="Choose another namespace.",
        )
    for batch in _batches(new):
        rows = pa.concat_tables([_rows(home, manifest.run_id, file) for file in batch], promote_options="default")
        slots = {_slot(file.path) for file in batch}
        replaced = sorted(path for path in there if _slot(path) in slots)
        with iceberg.transaction() as transaction:
            transaction.set_properties({cluster: mine})
            if replaced:
                transaction.delete(_of_files(manifest.run_id, replaced), snapshot_properties=properties)
            transaction.append(rows, snapshot_properties=properties)
        done.num_rows += rows.num_rows
        done.num_files += len(batch)
        done.num_replaced += len(replaced)


def _of_files(run_id: str, paths: Sequence[str]) -> Any:
    """The rows of some exported files of a run."""
    # pyiceberg annotates these with the types that they store, not with those that they accept.
    is_equal, is_one_of = cast("Any", EqualTo), cast("Any", In)
    return And(is_equal(RUN, run_id), is_one_of(FILE, paths))


def _files_in(iceberg: IcebergTable, run_id: str) -> set[str]:
    """The exported files of a run in a table."""
    partitions = [each["partition"] for each in iceberg.inspect.partitions().to_pylist()] if iceberg.current_snapshot() else []
    return {each[FILE] for each in partitions if each[RUN] == run_id}


def _batches(files: Sequence[ExportedFile]) -> Iterator[list[ExportedFile]]:
    batch: list[ExportedFile] = []
    for file in files:
        batch.append(file)
        if sum(each.num_bytes for each in batch) >= _BATCH_BYTES:
            yield batch
            batch = []
    if batch:
        yield batch


def _rows(home: Path, run_id: str, file: ExportedFile) -> Any:
    content = pa.concat_tables(row_groups(home / file.path))
    for name, value in ((RUN, run_id), (FILE, file.path)):
        content = content.append_column(name, pa.repeat(pa.scalar(value), content.num_rows))
    return content


def _slot(path: str) -> str:
    """The part of the path that two states of one file share: all but the checksum."""
    return path.rpartition("-")[0]
