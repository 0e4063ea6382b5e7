"""A run as Parquet files: each record once whatever is killed, fates and late rewards right, and bad folders refused."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("pyarrow", reason="exports are Parquet: install the extra 'analysis'")

import pyarrow as pa
from confluent_kafka import TopicPartition

from echo_replay.books import samples_of
from echo_replay.export import columns, exporter
from echo_replay.export.exporter import export_run
from echo_replay.export.layout import Table, bucket_of
from echo_replay.export.manifest import NAME, ExportManifest, locked, open_export, read_manifest
from echo_replay.export.table_file import StagedFile, row_groups
from echo_replay.export.verifying import verify_export
from echo_replay.history import History
from echo_schemas.errors import UserError
from echo_schemas.topics import RUNS, TRAJECTORIES
from tests.unit.learner.pipeline import WAIT_S, Pipeline
from tests.unit.replay.forged import Kept, SoundRun

DEMO = "demo"
HOME = f"run={DEMO}"


def rows_of(folder: Path, table: Table = Table.TRAJECTORIES) -> list[dict[str, Any]]:
    home, manifest = open_export(folder)
    files = [file for file in manifest.files if file.slot.table is table]
    return [row for file in files for group in row_groups(home / file.path) for row in group.to_pylist()]


def told_of(folder: Path) -> dict[tuple[int, int], tuple[object, ...]]:
    """What an export says of each record, by its coordinates."""
    found: dict[tuple[int, int], tuple[object, ...]] = {}
    for row in rows_of(folder):
        rewards = {name: value for name, value in row.items() if name.startswith("reward_") and value is not None}
        place = row["kafka"]["partition"], row["kafka"]["offset"]
        assert place not in found, f"{place} was exported twice"
        found[place] = (row["fate"], row["step"], row["advantage"], row["drop_reason"], rewards, row["tokens"], row["seq"])
    return found


def told_by_history(pipeline: Pipeline) -> dict[tuple[int, int], tuple[object, ...]]:
    with History(pipeline.bus, DEMO) as history:
        return {
            (each.where.partition, each.where.offset): (
                each.fate.value,
                each.step,
                each.entry.advantage,
                each.drop and each.drop.why.value,
                {f"reward_{name}": value for name, value in each.rewards.items()},
                None if each.trajectory is None else each.trajectory.tokens.tolist(),
                None if each.trajectory is None else each.trajectory.seq,
            )
            for each in history.read()
        }


def names_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.parquet"))


def assert_whole(folder: Path) -> ExportManifest:
    home, manifest = open_export(folder)
    found = verify_export(home, manifest)
    assert found.problems == []
    assert names_in(home) == sorted(file.path for file in manifest.files), "a file lies there that the manifest does not name"
    return manifest


def test_the_export_says_what_the_history_says(sound: SoundRun, tmp_path: Path) -> None:
    done = export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert told_of(tmp_path) == told_by_history(sound.pipeline)
    manifest = assert_whole(tmp_path)
    assert done.num_new == manifest.rows(Table.TRAJECTORIES)
    with History(sound.pipeline.bus, DEMO) as history:
        assert manifest.rows(Table.STEPS) == len(history.log.steps) == manifest.tip
        assert manifest.rows(Table.SAMPLES) == len(samples_of(history.log.steps).offsets)
    assert manifest.rows(Table.DROPS) == len(sound.pipeline.drops())
    assert {"cluster", "trajectories", "rewards", "steps"} <= set(manifest.identity)
    assert manifest.ranges["trajectories"][0][0] == 0
    assert any(path.startswith("trajectories/versions=0-99/p00000-") for path in (file.path for file in manifest.files))


def test_types_and_kafka_columns(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    home, manifest = open_export(tmp_path)
    path = next(file.path for file in manifest.files if "trajectories/versions=0-99" in file.path)
    schema = next(iter(row_groups(home / path))).schema
    types = {name: str(schema.field(name).type) for name in ("tokens", "logprobs", "reward_exact", "fate", "step", "advantage")}
    assert types == {
        "tokens": "list<element: int32>",
        "logprobs": "list<element: float>",
        "reward_exact": "double",
        "fate": "string",
        "step": "int64",
        "advantage": "float",
    }
    row = next(row for row in rows_of(tmp_path) if row["fate"] == "trained")
    assert row["kafka"]["topic"] == sound.pipeline.namespace.topic(TRAJECTORIES)
    assert row["kafka"]["key"] == row["group_id"]
    assert {"name": "echo-run", "value": DEMO} in row["kafka"]["headers"]


def test_nothing_new_changes_nothing(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    again = export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert (again.num_new, again.num_updated, again.num_files) == (0, 0, 0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"} == before


def grow(copy: Pipeline, sound: SoundRun, written: dict[tuple[str, int], int], share: float) -> None:
    """Write the log on: of trajectories and `runs` more than of what is said of them, unless it is whole."""
    by_place: dict[tuple[str, int], list[Kept]] = {}
    for kept in sound.messages:
        by_place.setdefault((kept.physical, kept.partition), []).append(kept)
    producer = copy.cluster.producer({})
    for place, messages in by_place.items():
        comes_first = place[0] in (copy.namespace.topic(TRAJECTORIES), copy.namespace.topic(RUNS))
        end = (
            len(messages)
            if place[0] == copy.namespace.topic(RUNS)
            else int(len(messages) * (share if comes_first else max(0.0, 2 * share - 1)))
        )
        for kept in messages[written.get(place, 0) : end]:
            producer.produce(kept.physical, kept.value, kept.key, kept.partition, headers=kept.headers)
        written[place] = end
    producer.flush(WAIT_S)


@pytest.mark.parametrize("stride", [7, 10_000])
def test_exports_of_a_log_that_grows_are_the_export_of_the_whole(sound: SoundRun, tmp_path: Path, stride: int) -> None:
    copy = Pipeline(tmp_path / "copy")
    written: dict[tuple[str, int], int] = {}
    num_updated = 0
    for share in (0.4, 0.6, 0.8, 0.9, 1.0):
        grow(copy, sound, written, share)
        num_updated += export_run(copy.bus, DEMO, tmp_path / "export", stride=stride).num_updated
        assert told_of(tmp_path / "export") == told_by_history(copy)
        assert_whole(tmp_path / "export")
    assert num_updated > 0, "no fate and no reward came late"
    export_run(copy.bus, DEMO, tmp_path / "at_once")
    assert told_of(tmp_path / "export") == told_of(tmp_path / "at_once")
    for table in (Table.REWARDS, Table.STEPS, Table.SAMPLES, Table.DROPS):
        assert rows_of(tmp_path / "export", table) == rows_of(tmp_path / "at_once", table)


class Killed(BaseException):
    """What no handler of ours may take for an error."""


def kill_at(monkeypatch: pytest.MonkeyPatch, place: object, name: str, number: int) -> None:
    """Raise at the `number`-th call."""
    inner: Callable[..., Any] = getattr(place, name)
    calls = iter(range(1_000_000))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return inner(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


def export_often(pipeline: Pipeline, folder: Path) -> None:
    for _ in range(3):
        export_run(pipeline.bus, DEMO, folder, stride=7)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(("place", "name"), [(exporter, "write_manifest"), (StagedFile, "finish"), (exporter, "remove_leftovers")])
def test_whoever_is_killed_goes_on(
    sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, number: int
) -> None:
    monkeypatch.setattr("echo_replay.export.exporter._COMMIT_S", 0.0)
    # A process that is killed tidies nothing up.
    with monkeypatch.context() as patch:
        patch.setattr(StagedFile, "abandon", lambda _: None)
        kill_at(patch, place, name, number)
        with pytest.raises(Killed):
            export_often(sound.pipeline, tmp_path)
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert told_of(tmp_path) == told_by_history(sound.pipeline)
    assert_whole(tmp_path)


def test_a_full_disk_is_said_and_leaves_nothing_half_written(
    sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StagedFile, "write", full)
        with pytest.raises(UserError, match="No space left") as refused:
            export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert "Make room" in refused.value.hint
    assert names_in(tmp_path) == []
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert_whole(tmp_path)


def test_records_that_retention_removed_stay_in_the_export(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path / "copy")
    export_run(copy.bus, DEMO, tmp_path / "export")
    before = told_of(tmp_path / "export")
    gone = TopicPartition(copy.namespace.topic(TRAJECTORIES), 0, 5)
    for future in copy.cluster.admin().delete_records([gone]).values():
        future.result(WAIT_S)
    assert export_run(copy.bus, DEMO, tmp_path / "export").missing == []
    assert told_of(tmp_path / "export") == before
    late = export_run(copy.bus, DEMO, tmp_path / "late")
    assert late.missing == ["Retention has removed offsets 0 to 4 of partition 0 of trajectories."]
    assert late.manifest.ranges["trajectories"][0][0] == 5


def test_an_export_of_an_earlier_release_has_nulls_in_columns_that_came_since(
    sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    copy = Pipeline(tmp_path / "copy")
    written: dict[tuple[str, int], int] = {}
    grow(copy, sound, written, 0.6)
    with monkeypatch.context() as patch:
        earlier = pa.schema([each for each in columns._TRAJECTORIES if each.name != "logprob_distribution"])
        patch.setattr(columns, "_TRAJECTORIES", earlier)
        export_run(copy.bus, DEMO, tmp_path / "export")
    grow(copy, sound, written, 1.0)
    assert export_run(copy.bus, DEMO, tmp_path / "export").num_updated > 0
    assert told_of(tmp_path / "export") == told_by_history(copy)
    assert {row["logprob_distribution"] for row in rows_of(tmp_path / "export")} > {None}


def test_a_folder_of_another_cluster_is_refused(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    copy = sound.forge(tmp_path / "copy")
    with pytest.raises(UserError, match="another Kafka cluster") as refused:
        export_run(copy.bus, DEMO, tmp_path)
    assert refused.value.hint
    assert_whole(tmp_path)


def changed_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / HOME / NAME
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda content: content.update(run_id="other"), "of the run 'other'"),
        (lambda content: content.update(namespace="elsewhere"), "namespace 'elsewhere'"),
        (lambda content: content["identity"].update(trajectories="another/2"), "topic trajectories was made anew"),
        (lambda content: content.update(format=0), "format 0"),
        (lambda content: content.pop("ranges"), "no manifest of an export"),
        (lambda content: content["files"][0].update(path="../../etc/passwd"), "no manifest of an export"),
        (lambda content: content["ranges"]["trajectories"].update({"0": [0, 10**9]}), "was cut off"),
    ],
)
def test_a_folder_that_is_not_this_runs_is_refused(
    sound: SoundRun, tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    changed_manifest(tmp_path, change)
    files = names_in(tmp_path)
    with pytest.raises(UserError, match=says) as refused:
        export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert refused.value.hint
    assert names_in(tmp_path) == files


def test_half_a_manifest_is_refused(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    path = tmp_path / HOME / NAME
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match="cannot be read"):
        export_run(sound.pipeline.bus, DEMO, tmp_path)


def test_a_run_that_is_not_there_leaves_no_folder(sound: SoundRun, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="knows no run 'nobodys'"):
        export_run(sound.pipeline.bus, "nobodys", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_exports_do_not_write_to_one_folder(sound: SoundRun, tmp_path: Path) -> None:
    (tmp_path / HOME).mkdir()
    with locked(tmp_path / HOME), pytest.raises(UserError, match="Another export"):
        export_run(sound.pipeline.bus, DEMO, tmp_path)


def test_verify_names_what_is_not_whole(sound: SoundRun, tmp_path: Path) -> None:
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    home, manifest = open_export(tmp_path)
    first, second, third = (home / file.path for file in manifest.files[:3])
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    size = second.stat().st_size
    third.write_bytes(b"x" * third.stat().st_size)
    problems = [problem.split(".parquet ")[1] for problem in verify_export(home, manifest).problems]
    assert [" ".join(problem.split()[:2]) for problem in problems] == ["is missing.", f"has {size:,}", "has another"]


def test_other_files_in_the_folder_are_left_alone(sound: SoundRun, tmp_path: Path) -> None:
    (tmp_path / HOME).mkdir()
    mine = tmp_path / HOME / "mine.parquet"
    mine.write_bytes(b"mine")
    leftover = tmp_path / HOME / "trajectories" / "versions=0-99" / f"p00000-{0:019d}-{'0' * 12}.parquet"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")
    export_run(sound.pipeline.bus, DEMO, tmp_path)
    assert mine.exists()
    assert not leftover.exists()
    assert read_manifest(tmp_path / HOME) is not None


@pytest.mark.parametrize(("version", "bucket"), [(0, "0-99"), (99, "0-99"), (123, "100-199"), (None, "none")])
def test_buckets(version: int | None, bucket: str) -> None:
    assert bucket_of(version, 100) == bucket
