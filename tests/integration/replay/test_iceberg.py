"""`export --iceberg`, with a catalog in a local file: each row once whatever is killed, and later knowledge in the place of earlier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("pyiceberg", reason="install the extra 'lakehouse'")

from pyiceberg.catalog import load_catalog
from pyiceberg.utils.config import Config

import echo_ops.cli.export as command
from echo_replay.export import iceberg
from echo_replay.export.exporter import export_run
from echo_replay.export.iceberg import FILE, PREFIX, RUN, publish_export
from echo_replay.export.layout import Table
from echo_replay.export.manifest import open_export
from echo_replay.export.table_file import row_groups
from echo_schemas.errors import UserError
from tests.integration.replay.copying import copy_into
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import SoundRun

pytestmark = [pytest.mark.slow]

_FIRST = frozenset({"runs", "trajectories"})
_SAID = frozenset({"rewards", "steps", "drops", "weights"})
_ALL_TABLES = [table for table in Table if table not in (Table.WORKERS, Table.RECORDS)]


@pytest.fixture(autouse=True)
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/lake.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/lake")
    # Otherwise read once, when it is imported.
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())


def in_lake(table: Table) -> list[dict[str, Any]]:
    rows = load_catalog("lake").load_table(f"rl.{table.value}").scan().to_arrow().to_pylist()
    return sorted(rows, key=repr_of)


def exported(folder: Path, table: Table) -> list[dict[str, Any]]:
    home, manifest = open_export(folder)
    names = [f"reward_{name}" for name in manifest.reward_names] if table is Table.TRAJECTORIES else []
    files = [file for file in manifest.files if file.slot.table is table]
    return sorted(
        (
            {**dict.fromkeys(names), **row, RUN: manifest.run_id, FILE: file.path}
            for file in files
            for group in row_groups(home / file.path)
            for row in group.to_pylist()
        ),
        key=repr_of,
    )


def repr_of(row: dict[str, Any]) -> str:
    # Of a record that nobody can read the export has no list where pyiceberg has an empty one. JSON: NaN is not equal to itself.
    return json.dumps({name: None if value == [] else value for name, value in row.items()}, sort_keys=True, default=str)


def assert_same(folder: Path) -> None:
    for table in _ALL_TABLES:
        assert [repr_of(row) for row in in_lake(table)] == [repr_of(row) for row in exported(folder, table)]


class Killed(BaseException):
    """What no handler of ours may take for an error."""


def test_the_tables_follow_the_export_whatever_is_killed(sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One commit for each file.
    monkeypatch.setattr(iceberg, "_BATCH_BYTES", 1)
    pipeline, folder = Pipeline(tmp_path / "run"), tmp_path / "export"
    copy_into(pipeline, sound, first=0.0, end=1.0, topics=_FIRST)
    copy_into(pipeline, sound, first=0.0, end=0.6, topics=_SAID)
    export_run(pipeline.bus, "demo", folder)
    with monkeypatch.context() as patch:
        calls, inner = iter(range(1_000)), iceberg._rows

        def rows(*arguments: Any) -> Any:
            if next(calls) == 2:
                raise Killed
            return inner(*arguments)

        patch.setattr(iceberg, "_rows", rows)
        with pytest.raises(Killed):
            publish_export(*open_export(folder), "lake", "rl")
    publish_export(*open_export(folder), "lake", "rl")
    assert_same(folder)
    again = publish_export(*open_export(folder), "lake", "rl")
    assert (again.num_rows, again.num_files, again.num_replaced) == (0, 0, 0)

    copy_into(pipeline, sound, first=0.6, end=1.0, topics=_SAID)
    export_run(pipeline.bus, "demo", folder)
    late = publish_export(*open_export(folder), "lake", "rl")
    assert late.num_replaced > 0, "no fate came late"
    assert_same(folder)
    _, manifest = open_export(folder)
    snapshot = load_catalog("lake").load_table("rl.trajectories").current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    said = snapshot.summary.additional_properties
    assert said[f"{PREFIX}run"] == "demo"
    assert json.loads(said[f"{PREFIX}offsets"])["trajectories"]["0"] == list(manifest.ranges["trajectories"][0])


def test_the_command_says_what_came_and_what_it_refuses(
    sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline, folder = sound.pipeline, tmp_path / "export"
    monkeypatch.setattr(command, "read_settings", lambda _config: pipeline.settings())
    monkeypatch.setattr(command, "reach_bus", lambda _settings: pipeline.bus)

    def export(iceberg: str, to: Path = folder) -> str:
        command.export(to, run="demo", iceberg=iceberg)
        return capsys.readouterr().out.replace("\n", " ")

    with pytest.raises(UserError, match="names no namespace"):
        export("lake")
    with pytest.raises(UserError, match="catalog 'pond' cannot be used") as refused:
        export("pond.rl")
    assert "PYICEBERG_CATALOG__POND__URI" in refused.value.hint
    assert "appended to the Iceberg tables of lake.rl" in export("lake.rl")
    assert "nothing new for the Iceberg tables of lake.rl" in export("lake.rl")
    other = sound.forge(tmp_path / "other")
    monkeypatch.setattr(command, "reach_bus", lambda _settings: other.bus)
    with pytest.raises(UserError, match="of another Kafka cluster"):
        export("lake.rl", tmp_path / "elsewhere")
    load_catalog("lake").create_namespace("mine")
    load_catalog("lake").create_table("mine.trajectories", load_catalog("lake").load_table("rl.steps").schema())
    with pytest.raises(UserError, match="is not one of an export"):
        export("lake.mine", tmp_path / "elsewhere")
