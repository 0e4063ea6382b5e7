"""What a learner goes on from, and what it refuses to go on from: each refusal says what to do."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.commit import session as sessions
from echo_memory import MemoryCluster
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, SessionClaim
from echo_schemas.topics import PROGRESS, STEPS
from tests.unit.learner.crash_point import Crash
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill

pytestmark = pytest.mark.slow


def is_commit(operation: str) -> bool:
    return operation == "commit_transaction"


def trained(pipeline: Pipeline, steps: int = 2) -> Path:
    """A run of so many steps; the folder of its newest checkpoint."""
    fill(pipeline, steps)
    pipeline.train(NumpyTrainer(), steps=steps)
    return pipeline.folder / "checkpoints" / pipeline.reports()[-1].checkpoint


def trained_but_unpublished(pipeline: Pipeline) -> Path:
    """Version 1 is durable, and its transaction was never committed; the folder of its checkpoint."""
    fill(pipeline, 2)
    pipeline.crash_at(3, is_commit)
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer(), steps=2)
    pipeline.restart()
    (folder,) = (pipeline.folder / "checkpoints").glob("v1-*")
    return folder


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **changes}), encoding="utf-8")


def without(path: Path, key: str) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    del content[key]
    path.write_text(json.dumps(content), encoding="utf-8")


def refusal(pipeline: Pipeline, **sections: Any) -> str:
    """What a learner says that refuses to go on, before it has changed anything."""
    claims = pipeline.read(STEPS, SessionClaim)
    trainer = NumpyTrainer()
    with pytest.raises(UserError) as refused:
        pipeline.train(trainer, steps=5, takeover=True, **sections)
    assert not trainer.batches
    assert pipeline.read(STEPS, SessionClaim) == claims, "it claimed the namespace before it knew that it could go on"
    return f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: cut(folder / "state.json"), "cannot be read"),
        (lambda folder: without(folder / "state.json", "assembly"), "is not whole: its state.json is not what was written"),
        (lambda folder: edit(folder / "state.json", version=7), "is not whole: its state.json is not what was written"),
        (lambda folder: edit(folder / "state.json", format=99), "has format 99; this version of EchoSwarm reads 2"),
        (lambda folder: cut(folder / "trainer" / "weights"), "is not whole: trainer/weights is not what was written"),
        (
            lambda folder: flip(folder / "snapshot" / "adapter_model.safetensors"),
            "snapshot/adapter_model.safetensors is not what was written",
        ),
        (lambda folder: (folder / "trainer" / "weights").unlink(), "is not whole: trainer/weights is gone"),
        (lambda folder: shutil.rmtree(folder / "trainer"), "is not whole: trainer/weights is gone"),
        (lambda folder: shutil.rmtree(folder), "which is not in"),
        (lambda folder: (folder / "state.json").unlink(), "which is not in"),
    ],
    ids=[
        "cut off",
        "a field missing",
        "a field changed",
        "another format",
        "trainer cut off",
        "a bit turned",
        "trainer gone",
        "trainer's folder gone",
        "gone",
        "without its state",
    ],
)
def test_a_broken_checkpoint_is_not_gone_on_from(pipeline: Pipeline, spoil: Callable[[Path], None], sentence: str) -> None:
    folder = trained(pipeline)
    spoil(folder)
    said = refusal(pipeline)
    assert sentence in said
    assert folder.name in said


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: cut(folder / "outbox.bin"), "outbox.bin is not what was written"),
        (lambda folder: (folder / "outbox.bin").unlink(), "outbox.bin is gone"),
        (lambda folder: (folder / "outbox.bin").write_bytes(b"\x04\x00\x00\x00oops\x02\x00\x00\x00no"), "outbox.bin is not what"),
        (lambda folder: (folder / "snapshot" / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is gone"),
        (lambda folder: (folder / "snapshot" / "adapter_model.safetensors").write_bytes(b"other"), "is not what was written"),
    ],
    ids=["outbox cut off", "outbox gone", "outbox of something else", "snapshot gone", "snapshot changed"],
)
def test_what_a_broken_checkpoint_owes_is_not_published(pipeline: Pipeline, spoil: Callable[[Path], None], sentence: str) -> None:
    folder = trained_but_unpublished(pipeline)
    spoil(folder)
    with pytest.raises(UserError, match=sentence) as refused:
        pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert folder.name in str(refused.value)
    assert not pipeline.reports()
    assert [manifest.version for manifest in pipeline.manifests()] == [0]


def test_settings_that_made_the_weights_may_not_change(pipeline: Pipeline) -> None:
    trained(pipeline)
    said = refusal(pipeline, learner={"lr": 0.5}, rollout={"temperature": 0.7})
    assert "was started with other values: rollout.temperature was 1.0 and is 0.7; learner.lr was 0.0015 and is 0.5." in said
    assert "`echoswarm fork demo-2 --version 2` begins another run from version 2" in said


def test_other_settings_may_change(pipeline: Pipeline) -> None:
    trained(pipeline)
    fill(pipeline, 3, start=2)
    changed: dict[str, Any] = {"learner": {"micro_batch_tokens": 7}, "checkpoint": {"keep": 9}, "metrics": {"port": 0}}
    pipeline.train(NumpyTrainer(), steps=3, takeover=True, **changed)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]


def test_a_folder_that_goes_on_where_the_log_never_was_is_refused(pipeline: Pipeline) -> None:
    fill(pipeline, 6)
    pipeline.train(NumpyTrainer(), steps=6, staleness={"budget": 9})
    assert all(pipeline.store.load(name).version > 0 for name in pipeline.store.ids()), "the first checkpoints are pruned"
    said = refusal(Pipeline(pipeline.folder, cluster=MemoryCluster()))
    assert "holds run 'demo' up to version 6, and the log knows nothing of it" in said
    assert "Point [kafka] to where it came from" in said
    assert "`echoswarm fork demo-2 --version 6`" in said


def test_a_run_of_another_name_starts_anew_beside_old_checkpoints(pipeline: Pipeline) -> None:
    trained(pipeline)
    for seq in range(2):
        pipeline.write_group(seq, run_id="other")
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=1, takeover=True, run={"name": "other"})
    assert len(trainer.batches) == 1
    assert {pipeline.store.load(name).run_id for name in pipeline.store.ids()} == {"demo", "other"}


def test_old_checkpoints_of_the_session_are_removed_and_no_others(pipeline: Pipeline) -> None:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=1, checkpoint={"keep": 2})
    first = set(pipeline.store.ids())
    pipeline.train(NumpyTrainer(), steps=4, takeover=True, checkpoint={"keep": 2})
    left = set(pipeline.store.ids())
    assert first <= left, "another session's checkpoints are read, never touched"
    assert sorted(name.partition("-")[0] for name in left - first) == ["v3", "v4"]


def test_the_metrics_of_a_resumed_learner_start_where_it_does(pipeline: Pipeline) -> None:
    trained(pipeline, 2)
    metrics = pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert metrics.registry.get_sample_value("echo_learner_version") == 2
    assert metrics.registry.get_sample_value("echo_learner_published") == 2
    progress = pipeline.read(PROGRESS, Progress)[-1]
    assert (progress.version, progress.published, progress.groups_trained, progress.next_seq) == (2, 2, 4, 4)


def test_the_last_version_of_a_run_is_published_even_if_it_was_trained_before_it_was_the_last(pipeline: Pipeline) -> None:
    """kappa = 2; stopped at version 3, then told that 3 is enough."""
    kappa: dict[str, Any] = {"staleness": {"publication_period": 2}}
    fill(pipeline, 3)
    running = pipeline.start(NumpyTrainer("first"), **kappa)
    pipeline.wait_for(PROGRESS, Progress, lambda progress: progress.version == 3, "version 3")
    running.stop()
    second = NumpyTrainer("second")
    pipeline.train(second, steps=3, takeover=True, **kappa)
    assert not second.batches
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 2, 3]
    assert pipeline.reports()[2].snapshot_sha256 == pipeline.manifests()[2].sha256
    assert pipeline.blob(pipeline.manifests()[2]).startswith(running.trainer.weights)
    assert_books(pipeline)


def test_another_machine_goes_on_from_the_same_store(pipeline: Pipeline, uninterrupted: Callable[..., bytes], tmp_path: Path) -> None:
    """The folder lies elsewhere there, and what is owed to the log is published from there."""
    trained_but_unpublished(pipeline)
    elsewhere = tmp_path / "mounted" / "here"
    shutil.copytree(pipeline.folder, elsewhere)
    shutil.rmtree(pipeline.folder)
    pipeline.folder = elsewhere
    second = NumpyTrainer("second")
    pipeline.train(second, steps=2, takeover=True)
    assert second.weights == uninterrupted(2)
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert_books(pipeline)


def test_a_process_that_dies_while_it_prunes_leaves_no_half_checkpoint(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pipeline, 6)
    original = shutil.rmtree

    def dies(path: Path, **options: Any) -> None:
        if Path(path).name.endswith(".gone"):
            next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
            raise Crash
        original(path, **options)

    monkeypatch.setattr("echo_learner.commit.checkpoint.shutil.rmtree", dies)
    with pytest.raises(Crash):
        pipeline.train(NumpyTrainer(), steps=6, staleness={"budget": 9})
    monkeypatch.undo()
    for name in pipeline.store.ids():
        pipeline.store.verify(name)
    pipeline.train(NumpyTrainer(), steps=6, takeover=True, staleness={"budget": 9})
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4, 5, 6]
    assert_books(pipeline)


def test_a_checkpoint_that_a_busy_learner_removes_while_it_is_looked_at_is_no_refusal(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    sections: dict[str, Any] = {"checkpoint": {"keep": 2}, "staleness": {"budget": 9}}
    fill(pipeline, 6)
    pipeline.train(NumpyTrainer(), steps=5, **sections)
    tip = sessions.read_tip(pipeline.bus, "demo")
    passed = pipeline.reports()[:2]
    assert not {report.checkpoint for report in passed} & set(pipeline.store.ids()), "they are kept: there is nothing to show"
    real, earlier = sessions.read_tip, iter([dataclasses.replace(tip, report=report) for report in passed])
    # As if the first learner made a step between the reading of the log and of the folder, twice.
    monkeypatch.setattr(sessions, "read_tip", lambda *arguments: next(earlier, None) or real(*arguments))
    pipeline.train(NumpyTrainer(), steps=6, takeover=True, **sections)
    assert [report.version for report in pipeline.reports()] == list(range(1, 7))
    assert_books(pipeline)
