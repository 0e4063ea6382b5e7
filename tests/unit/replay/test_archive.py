"""The end of a run: kept in a folder, every record as the log has it, and no archive that is not whole; then removed from its disk."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import fastavro
import pytest
from confluent_kafka.admin import NewTopic

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("pyarrow", reason="exports are Parquet: install the extra 'analysis'")

from echo_bus.message import raw_headers
from echo_ops.runs import archive as archiving
from echo_ops.runs import deletion
from echo_ops.runs import restore as restoring
from echo_ops.runs.archive import NAME, archive_run
from echo_ops.runs.restore import restore_run
from echo_replay.audit import audit_run
from echo_replay.raw_log import RawLog
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.errors import UserError
from echo_schemas.headers import RUN
from echo_schemas.naming import Namespace
from echo_schemas.records import Run
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REQUESTS, RUNS, TRAJECTORIES
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
    assert 0 < done.topics["weights.chunks"].records < written.pop("weights.chunks")
    assert {name: topic.records for name, topic in done.topics.items() if topic.records and name != "weights.chunks"} == written
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


def kept_by(pipeline: Pipeline) -> set[tuple[object, ...]]:
    """Every committed record of the run, with its place and its time."""
    found: set[tuple[object, ...]] = set()
    for spec in load_topic_specs():
        with RawLog(pipeline.bus, f"{pipeline.namespace.name}.{spec.name}") as log:
            for batch in log.messages():
                for raw in batch:
                    headers = raw_headers(raw)
                    if dict(headers).get(RUN) == b"demo":
                        place = (raw.topic(), raw.partition(), raw.offset(), raw.timestamp()[1])
                        found.add((*place, raw.key(), raw.value(), tuple(headers)))
    return found


def without_records(folder: Path) -> Pipeline:
    """New topics, in which not even a feeder's requests lie."""
    pipeline = Pipeline(folder / "new")
    admin, name = pipeline.cluster.admin(), pipeline.namespace.topic(REQUESTS)
    partitions = len(admin.list_topics(name).topics[name].partitions)
    admin.delete_topics([name])[name].result()
    admin.create_topics([NewTopic(name, partitions, 1)])[name].result()
    return pipeline


@pytest.fixture
def archived(sound: SoundRun, tmp_path: Path) -> Path:
    archive_run(sound.pipeline.bus, run_of(sound.pipeline), tmp_path / "kept", store="", all_weights=True)
    return tmp_path / "kept"


def test_a_restored_run_is_the_run_that_it_was(sound: SoundRun, archived: Path, tmp_path: Path) -> None:
    other = without_records(tmp_path)
    restore_run(other.bus, archived)
    assert kept_by(other) == kept_by(sound.pipeline)
    before, after = sound.audit(), audit_run(other.bus, "demo")
    assert after.counts["trained"] == before.counts["trained"] > 0
    assert {finding.promise: finding.verdict for finding in after.findings} == {each.promise: each.verdict for each in before.findings}
    with pytest.raises(UserError, match="has held records already"):
        restore_run(other.bus, archived)


def test_of_a_run_whose_newest_weights_alone_were_kept_the_audit_says_which_are_gone(sound: SoundRun, tmp_path: Path) -> None:
    archive_run(sound.pipeline.bus, run_of(sound.pipeline), tmp_path / "kept", store="")
    other = without_records(tmp_path)
    restore_run(other.bus, tmp_path / "kept")
    findings = {finding.promise: finding for finding in audit_run(other.bus, "demo").findings}
    assert findings[Promise.CURRENT].verdict is Verdict.UNPROVED
    assert "retention has removed the blobs of old versions" in findings[Promise.CURRENT].gaps
    assert {finding.verdict for promise, finding in findings.items() if promise is not Promise.CURRENT} == {Verdict.PROVED}


def test_what_cannot_be_restored_is_one_sentence(archived: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bus = without_records(tmp_path).bus
    with pytest.raises(UserError, match="holds no archive"):
        restore_run(bus, tmp_path)
    with pytest.raises(UserError, match=r"of the namespace .* and this is 'x'") as caught:
        restore_run(replace(bus, namespace=Namespace("x")), archived)
    assert "set [kafka] namespace" in (caught.value.hint or "")
    content = json.loads((archived / NAME).read_text())
    fewer = {**content, "topics": {name: {**topic, "bounds": topic["bounds"] * 2} for name, topic in content["topics"].items()}}
    (archived / NAME).write_text(json.dumps(fewer))
    with pytest.raises(UserError, match=r"has \d+ partitions and had \d+"):
        restore_run(bus, archived)
    (archived / NAME).write_text(json.dumps(content))
    # Somebody writes beside it.
    write = restoring._remove_before

    def meddle(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        with closing(bus.publisher()) as publisher:
            publisher.publish_bytes(bus.namespace.topic(TRAJECTORIES), b"x", headers=[(RUN, b"demo")], partition=0).wait(10.0)

    monkeypatch.setattr(restoring, "_remove_before", meddle)
    with pytest.raises(UserError, match="does not hold what was written"):
        restore_run(bus, archived)
    for topics in ('{"steps": {"sha256": "of an earlier release"}}', "[]"):
        (archived / NAME).write_text(json.dumps({**content, "topics": json.loads(topics)}))
        with pytest.raises(UserError, match="cannot be read"):
            restore_run(bus, archived)
    (archived / NAME).write_text(json.dumps(content))
    shutil.copyfile(archived / "log" / "steps.avro", archived / "log" / "drops.avro")
    with pytest.raises(UserError, match="not whole"):
        restore_run(bus, archived)
