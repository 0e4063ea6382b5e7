"""Questions in SQL: of an export and of the log, answered alike; and what no question may do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("duckdb", reason="install the extra 'analysis'")

import echo_ops.cli.sql as sql_command
from echo_replay.export.bounded import folder_of_part, load_part
from echo_replay.export.exporter import export_run
from echo_replay.export.manifest import ExportManifest, open_export
from echo_replay.export.queries import Answer, ask
from echo_replay.history import History
from echo_replay.selection import Selection, Steps
from echo_schemas.errors import UserError
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun

_PLENTY_S = 60.0
_TABLES = ("trajectories", "samples", "groups", "steps", "rewards", "drops", "workers", "records")


@pytest.fixture(scope="module")
def export(sound: SoundRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportManifest]:
    folder = tmp_path_factory.mktemp("it's an export")
    export_run(sound.pipeline.bus, "demo", folder)
    return open_export(folder)


def rows(export: tuple[Path, ExportManifest], question: str, **options: Any) -> list[tuple[Any, ...]]:
    return ask(*export, question, **{"timeout_s": _PLENTY_S, "limit": 0, **options}).rows


def test_every_table_answers(export: tuple[Path, ExportManifest]) -> None:
    for table in _TABLES:
        assert rows(export, f"select count(*) from {table}")[0][0] >= 0
    assert {name for (name,) in rows(export, "show tables")} == set(_TABLES)


def test_the_views_agree_with_one_another(export: tuple[Path, ExportManifest]) -> None:
    num_samples = STEPS_TRAINED * GROUPS_PER_STEP * GROUP_SIZE
    assert rows(export, "select count(*), sum(num_samples) from steps") == [(STEPS_TRAINED, num_samples)]
    joined = """
        select count(*), count(*) filter (t.step = s.step and t.advantage = s.advantage and t.seq = s.seq and t.attempt = s.attempt)
        from samples s join trajectories t
        on t.kafka.partition = s.trajectory.partition and t.kafka.offset = s.trajectory.offset
    """
    assert rows(export, joined) == [(num_samples, num_samples)]
    judged = """
        select count(*), count(*) filter (t.reward_exact = r.value)
        from rewards r join trajectories t
        on t.kafka.partition = r.trajectory.partition and t.kafka.offset = r.trajectory.offset where r.name = 'exact'
    """
    ((num_judged, num_equal),) = rows(export, judged)
    assert num_judged == num_equal > 0
    assert rows(export, "select distinct reward_exact_mean, num_samples from groups where num_trained = group_size") == [(0.5, GROUP_SIZE)]
    assert rows(export, "select distinct fate from trajectories order by 1") == [
        (fate,) for fate in ("dead", "dropped", "evaluated", "open", "probed", "trained")
    ]


def test_the_log_answers_as_the_export_does(sound: SoundRun, export: tuple[Path, ExportManifest], tmp_path: Path) -> None:
    with History(sound.pipeline.bus, "demo") as history:
        whole = load_part(history, history.read(), 10_000, tmp_path / "whole")
        part = load_part(history, history.read(Selection(range=Steps(2, 3))), 10_000, tmp_path / "part")
    question = "select kafka.partition, kafka.offset, fate, step, reward_exact, tokens from trajectories order by all"
    assert rows((tmp_path / "whole", whole), question) == rows(export, question)
    assert rows((tmp_path / "part", part), "select distinct step from trajectories order by 1") == [(2,), (3,)]
    assert rows((tmp_path / "part", part), "select count(*) from steps") == [(STEPS_TRAINED,)]


def test_nothing_selected_still_has_tables(sound: SoundRun, tmp_path: Path) -> None:
    with History(sound.pipeline.bus, "demo") as history:
        manifest = load_part(history, history.read(Selection(worker="nobody")), 10, tmp_path)
    for table in _TABLES:
        rows((tmp_path, manifest), f"select * from {table}")
    assert rows((tmp_path, manifest), "select count(*) from trajectories") == [(0,)]


def test_too_large_a_range_is_refused(sound: SoundRun, tmp_path: Path) -> None:
    with History(sound.pipeline.bus, "demo") as history, pytest.raises(UserError, match="more than 5 trajectories") as refused:
        load_part(history, history.read(), 5, tmp_path)
    assert "--most" in refused.value.hint


@pytest.mark.parametrize(
    ("question", "says"),
    [
        ("delete from steps", "DELETE is no SELECT"),
        ("create table mine as select 1", "CREATE is no SELECT"),
        ("copy steps to 'mine.csv'", "COPY is no SELECT"),
        ("explain analyze copy steps to 'mine.csv'", "EXPLAIN is no SELECT"),
        ("attach 'mine.db'", "ATTACH is no SELECT"),
        ("set enable_external_access = true", "SET is no SELECT"),
        ("pragma database_list", "no SELECT"),
        ("install httpfs", "no SELECT"),
        ("select 1; select 2", "2 statements"),
        ("", "0 statements"),
        ("selec 1", "syntax error"),
        ("select * from read_text('/etc/passwd')", "names a file"),
        ("select * from '/etc/passwd.parquet'", "names a file"),
        ("select * from read_csv('https://example.org/x.csv')", "names a file"),
        ("select * from glob('/*')", "names a file"),
        ("select nothing from steps", "nothing"),
        ("select * from nobody", "nobody"),
    ],
)
def test_a_question_reads_what_the_manifest_names_and_no_more(export: tuple[Path, ExportManifest], question: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        rows(export, question)
    assert refused.value.hint
    assert "\n" not in refused.value.message


def test_an_answer_that_takes_too_long_is_ended(export: tuple[Path, ExportManifest]) -> None:
    with pytest.raises(UserError, match="not answered within") as refused:
        rows(export, "select count(*) from range(1000000000) a, range(1000000000) b where a.range + b.range = 7", timeout_s=0.2)
    assert "--timeout" in refused.value.hint


def test_a_limit_cuts_and_says_so(export: tuple[Path, ExportManifest]) -> None:
    answer = ask(*export, "select step from steps order by 1", timeout_s=_PLENTY_S, limit=2)
    assert (answer.rows, answer.is_cut) == ([(1,), (2,)], True)
    assert not ask(*export, "select 1", timeout_s=_PLENTY_S, limit=1).is_cut


def test_a_damaged_export_is_named(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, "demo", tmp_path)
    home, manifest = open_export(tmp_path)
    (home / manifest.files[0].path).write_bytes(b"no parquet")
    with pytest.raises(UserError, match="cannot be read") as refused:
        rows((home, manifest), "select 1")
    assert "--verify" in refused.value.hint


def test_a_full_disk_is_said_with_the_way_to_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    with pytest.raises(UserError, match="cannot be written to a temporary folder") as refused, folder_of_part():
        pass
    assert "TMPDIR" in refused.value.hint


def test_an_answer_moves_no_terminal_and_is_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer(columns=("text", "mean"), rows=[("\x1b[2J\x9b1m\u202e", math.nan)], is_cut=False)
    sql_command._show(answer, "json")
    printed = capsys.readouterr().out
    assert printed.isascii()
    assert json.loads(printed) == {"text": "\x1b[2J\x9b1m\u202e", "mean": None}
    assert "NaN" not in printed
    sql_command._show(answer, "csv")
    assert capsys.readouterr().out.splitlines()[1] == "\x1b[2J\x9b1m\u202e,nan"
    monkeypatch.setattr(sql_command, "out", Console(force_terminal=True))
    sql_command._show(answer, "csv")
    assert capsys.readouterr().out.splitlines()[1] == "␛[2J\\u009b1m\\u202e,nan"
