"""The end of a run: kept in a folder, every record as the log has it, and no archive that is not whole; then removed from its disk."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import fastavro
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("pyarrow", reason="exports are Parquet: install the extra 'analysis'")

from echo_ops.runs import archive as archiving
from echo_ops.runs import deletion
from echo_ops.runs.archive import NAME, archive_run
from echo_schemas.errors import UserError
from echo_schemas.headers import RUN
from echo_schemas.records import Run
from echo_schemas.topics import RUNS, TRAJECTORIES
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import SoundRun


def run_of(pipeline: Pipeline) -> Run:
    return pipeline.bus.newest(RUNS, Run)["demo"]


def test_everything_of_the_run_and_of_no_other_is_kept(sound: SoundRun, tmp_path: Path) -> None:
    pipeline = sound.pipeline
    done = archive_run(pipeline.bus, run_of(pipeline), tmp_path, store="")
    written: Counter[str] = Counter(
        kept.physical.removeprefix(f"{pipeline.namespace.name}.") for kept in sound.messages if dict(kept.headers).get(RUN) == b"demo"
    )
    chunks = {name for name in written if name.startswith("weights.chunks")}
    assert {name: topic.records for name, topic in done.topics.items() if topic.records} == {
        name: count for name, count in written.items() if name not in chunks
    }
    with (tmp_path / "log" / "trajectories.avro").open("rb") as file:
        values = [kept["value"] for kept in fastavro.reader(file)]  # type: ignore[index,call-overload]
    of_topic = {kept.value for kept in sound.messages if kept.physical == pipeline.namespace.topic(TRAJECTORIES)}
    assert set(values) <= of_topic
    newest = pipeline.manifests()[-1]
    assert (done.weights, done.weights_sha256) == (newest.version, newest.sha256)
    assert sorted(path.name for path in (tmp_path / "weights" / f"v{newest.version}").iterdir()) == sorted(
        file.name for file in newest.files
    )
    content = json.loads((tmp_path / NAME).read_text())
    assert content["run_id"] == "demo"
    assert content["rows"]["trajectories"] == done.rows["trajectories"] > 0
    with pytest.raises(UserError, match="holds an archive already"):
        archive_run(pipeline.bus, run_of(pipeline), tmp_path, store="")


def test_what_cannot_be_read_back_is_no_archive_and_is_begun_again(
    sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = sound.pipeline
    keep = archiving._keep_weights

    def damage(*arguments: object) -> None:
        keep(*arguments)  # type: ignore[arg-type]
        path = tmp_path / "log" / "steps.avro"
        path.write_bytes((tmp_path / "log" / "drops.avro").read_bytes())

    with monkeypatch.context() as patched:
        patched.setattr(archiving, "_keep_weights", damage)
        with pytest.raises(UserError, match=r"log/steps\.avro does not hold what was written"):
            archive_run(pipeline.bus, run_of(pipeline), tmp_path, store="")
    assert not (tmp_path / NAME).exists()
    archive_run(pipeline.bus, run_of(pipeline), tmp_path, store="")
    assert (tmp_path / NAME).exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(sound: SoundRun, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot"):
        archive_run(sound.pipeline.bus, run_of(sound.pipeline), tmp_path / "file", store="")


def test_the_checkpoints_of_the_run_are_removed_with_all_beside_them_and_those_of_others_stay(sound: SoundRun, tmp_path: Path) -> None:
    bus, folder = sound.pipeline.bus, tmp_path / "run"
    shutil.copytree(sound.pipeline.folder, folder)
    (folder / "report.html").touch()
    (folder / "own.txt").touch()
    names = sound.pipeline.store.ids()
    assert names
    assert deletion._paths_of(bus, "demo", folder) == [folder / "checkpoints", folder / "report.html"]
    assert deletion._paths_of(bus, "other", folder) == []
    shutil.copytree(folder / "checkpoints" / names[0], folder / "checkpoints" / "v9-broken")
    (folder / "checkpoints" / "v9-broken" / "state.json").write_text("nonsense")
    assert deletion._paths_of(bus, "demo", folder) == [folder / "checkpoints" / name for name in names]
    deletion._remove_files(tuple(deletion._paths_of(bus, "demo", folder)))
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoints", "own.txt", "report.html"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["v9-broken"]
