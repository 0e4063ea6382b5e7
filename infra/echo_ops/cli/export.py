"""`echoswarm export`: a run as Parquet files, as Iceberg tables too, and whether the files are whole."""

from __future__ import annotations

import contextlib
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, RunName
from echo_ops.cli.output import ExitCode, err, fail, out, remark
from echo_ops.cli.past import run_named
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries


def export(
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the files go; a run has a folder in it, run=NAME.")],
    config: Config = None,
    run: RunName = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come, until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option("--every", min=1.0, metavar="S", help="With --follow: seconds between two exports.")] = 30.0,
    verify: Annotated[bool, typer.Option("--verify", help="Export nothing: check every file that the manifest names.")] = False,
    iceberg: Annotated[str, typer.Option(metavar="CATALOG.NAMESPACE", help="Then bring these Iceberg tables to where the export is.")] = "",
) -> None:
    """Export new records, once or repeatedly until Ctrl-C, and print how many. Or check an export."""
    require_libraries("An export", "pyarrow", install=ANALYSIS)
    if verify:
        _verify(to, run)
        return
    if iceberg:
        require_libraries("--iceberg", "pyiceberg", "sqlalchemy", install="'echoswarm[lakehouse]'")
        if not all(iceberg.partition(".")):
            raise UserError(f"--iceberg {iceberg} names no namespace.", hint="Write CATALOG.NAMESPACE, say lake.rl.")
    from echo_replay.export.exporter import export_run
    from echo_replay.export.layout import folder_of

    settings = read_settings(config)
    run_id = run_named(run or settings.run.name)
    bus, home = reach_bus(settings), folder_of(to, run_id)
    while True:
        begun_s = bus.clock.monotonic_s()
        done = export_run(bus, run_id, to)
        seconds = bus.clock.monotonic_s() - begun_s
        remark("missing", done.missing)
        remark("note", done.notes)
        if done.num_files:
            updated = f", {done.num_updated:,} earlier ones updated" if done.num_updated else ""
            out.print(
                f"{done.num_new:,} new trajectories{updated}; {done.num_files:,} files written in {seconds:.1f} s to {home}",
                markup=False,
            )
        elif not follow:
            out.print(f"nothing new of {run_id} in {home}", markup=False)
        if iceberg:
            _publish(to, run_id, iceberg)
        if not follow:
            return
        with contextlib.suppress(KeyboardInterrupt):
            Event().wait(every)
            continue
        return


def _publish(to: Path, run_id: str, iceberg: str) -> None:
    from echo_replay.export.iceberg import publish_export
    from echo_replay.export.manifest import locked, open_export

    home, _ = open_export(to, run_id)
    with locked(home):
        # Another export may have replaced files before this one had the lock.
        home, manifest = open_export(to, run_id)
        catalog, _, namespace = iceberg.partition(".")
        done = publish_export(home, manifest, catalog, namespace)
    replaced = f", in place of {done.num_replaced:,} earlier ones" if done.num_replaced else ""
    said = f"{done.num_rows:,} rows of {done.num_files:,} files{replaced} appended to" if done.num_files else "nothing new for"
    out.print(f"{said} the Iceberg tables of {iceberg}", markup=False)


def _verify(to: Path, run: str) -> None:
    """Check every file of an export; exit 4 if one differs from the manifest."""
    from echo_replay.export.manifest import open_export
    from echo_replay.export.verifying import verify_export

    home, manifest = open_export(to, run and run_named(run))
    found = verify_export(home, manifest)
    for sentence in found.problems:
        err.print(sentence, markup=False)
    if found.problems:
        fail(
            f"The export of {manifest.run_id} is not whole: {len(found.problems)} of {found.num_files} files.",
            "Remove its folder and export again, while the log still holds the records.",
            ExitCode.BROKEN,
        )
    rows = ", ".join(f"{count:,} {table.value}" for table, count in sorted(found.rows.items()))
    out.print(
        f"{manifest.run_id} to version {manifest.tip}: {found.num_files:,} files, {found.num_bytes:,} bytes are whole: {rows}", markup=False
    )
    remark("missing", manifest.missing)
