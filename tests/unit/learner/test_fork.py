"""Forks: a run that begins at a version of another, with its optimizer or from the weights in the log alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import typer.main

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.learner_state import LearnerState, Origin
from echo_learner.start.fork import ForkOrder, fork_run
from echo_ops.cli.main import app
from echo_replay.audit import audit_run
from echo_replay.verdicts import Promise
from echo_schemas.codec import lock_file_codec
from echo_schemas.columns import OFFSET_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Drop, DropReason, Record, StepReport, WeightManifest
from echo_schemas.topics import DROPS, STEPS, WEIGHTS, Topic
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUPS_PER_STEP, Pipeline, assert_books, fill

pytestmark = pytest.mark.slow

R = TypeVar("R", bound=Record)
KEEP: dict[str, Any] = {"checkpoint": {"keep": 9}}


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners that have ended were of this process, which lives: nobody need listen long for their heartbeats."""
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.2)


def trained(pipeline: Pipeline, steps: int = 3, **sections: Any) -> NumpyTrainer:
    fill(pipeline, steps)
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=steps, **{**KEEP, **sections})
    return trainer


def fork(pipeline: Pipeline, version: int, name: str = "demo-2", *, settings: Any = None, **order: Any) -> LearnerState:
    wanted = ForkOrder(run_id=name, folder=pipeline.folder.parent / name, version=version, **order)
    return fork_run(pipeline.bus, pipeline.settings(**(settings or {})), wanted)


def train_fork(pipeline: Pipeline, steps: int, name: str = "demo-2", **sections: Any) -> NumpyTrainer:
    trainer = NumpyTrainer("fork")
    folder = {"folder": str(pipeline.folder.parent / name), "keep": 9}
    pipeline.train(trainer, steps=steps, takeover=True, run={"name": name}, checkpoint=folder, **sections)
    return trainer


def fill_fork(pipeline: Pipeline, first: int, last: int, *, version: int, name: str = "demo-2") -> None:
    """Groups for its steps after `first`, up to `last`."""
    for seq in range(first * GROUPS_PER_STEP, last * GROUPS_PER_STEP):
        pipeline.write_group(seq, version=version, run_id=name)


def of_run(pipeline: Pipeline, topic: Topic, kind: type[R], name: str = "demo-2") -> list[R]:
    return [record for _, record in pipeline.placed(topic, kind, every_run=True) if getattr(record, "run_id", "") == name]


def manifests_of(pipeline: Pipeline) -> list[WeightManifest]:
    return of_run(pipeline, WEIGHTS, WeightManifest)[::2]


def refusal(pipeline: Pipeline, version: int, name: str = "demo-2", **order: Any) -> str:
    with pytest.raises(UserError) as refused:
        fork(pipeline, version, name, **order)
    return str(refused.value)


def test_a_fork_goes_on_as_its_parent_did(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    """From version 2 with the optimizer: given the same groups, versions 3 and 4 are what the parent's were or would have been."""
    trained(pipeline)
    parent = pipeline.manifests()[2]
    before = set(pipeline.store.ids())
    state = fork(pipeline, 2, sha256=parent.sha256[:8])
    assert (state.version, state.origin) == (2, Origin(run_id="demo", version=2, sha256=parent.sha256))
    assert (state.assembly.floor, state.groups_trained) == (4, 4), "the data goes on where the parent's did"
    fill_fork(pipeline, 2, 4, version=0)
    assert train_fork(pipeline, 4).weights == uninterrupted(4)
    first, *later = manifests_of(pipeline)
    assert (first.version, first.parent, first.parent_run, first.parent_sha256) == (2, 2, "demo", parent.sha256)
    assert first.sha256 == parent.sha256
    assert [(manifest.version, manifest.parent, manifest.parent_run) for manifest in later] == [(3, 2, None), (4, 3, None)]
    reports = of_run(pipeline, STEPS, StepReport)
    assert [report.version for report in reports] == [3, 4]
    assert reports[0].parent == state.id
    assert set(pipeline.store.ids()) == before, "the parent is only read"
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]
    newest = CheckpointStore(pipeline.folder.parent / "demo-2" / "checkpoints", lock_file_codec()).newest("demo-2")
    assert newest is not None
    assert newest.origin == state.origin, "every checkpoint says where the run comes from"


def test_what_the_parent_has_closed_ahead_of_the_others_is_closed_in_the_fork(pipeline: Pipeline) -> None:
    """Seq 1 has no group, so the floor stays at 1 while 2 to 4 are trained. The fork trains 1, and drops the others."""
    for seq in (0, 2, 3, 4):
        pipeline.write_group(seq)
    pipeline.train(NumpyTrainer(), steps=2, **KEEP)
    state = fork(pipeline, 2)
    assert (state.assembly.floor, state.assembly.closed) == (1, frozenset({2, 3, 4}))
    for seq in (1, 2, 5):
        pipeline.write_group(seq, version=2, run_id="demo-2")
    train_fork(pipeline, 3)
    (report,) = of_run(pipeline, STEPS, StepReport)
    assert report.batch is not None
    assert sorted(set(np.frombuffer(report.batch.seqs, OFFSET_DTYPE).tolist())) == [1, 5]
    drops = [drop for drop in of_run(pipeline, DROPS, Drop) if drop.what is None]
    assert [(drop.seq, drop.why, drop.learner_version) for drop in drops] == [(seq, DropReason.DUPLICATE, 2) for seq in (2, 3, 4)]
    audited = audit_run(replace(pipeline.bus, run_id="demo-2"), "demo-2")
    broken = {finding.promise: finding.examples for finding in audited.findings if finding.examples}
    assert not broken.keys() - {Promise.TAGS}, "the test's samples do not say which weights they come from"


def test_a_fork_may_have_another_configuration(pipeline: Pipeline) -> None:
    trained(pipeline)
    with pytest.raises(UserError, match=r"learner\.lr was 0\.0015 and is 0\.5.*`echoswarm fork demo-2 --version 3`"):
        pipeline.train(NumpyTrainer(), steps=4, takeover=True, learner={"lr": 0.5})
    other: dict[str, Any] = {"learner": {"lr": 0.5}}
    fork(pipeline, 3, settings=other)
    fill_fork(pipeline, 3, 4, version=3)
    train_fork(pipeline, 4, **other)
    assert [manifest.version for manifest in manifests_of(pipeline)] == [3, 4]


def test_weights_in_the_log_are_enough(pipeline: Pipeline) -> None:
    """The checkpoints are gone for good."""
    trained(pipeline)
    parent = pipeline.manifests()[1]
    shutil.rmtree(pipeline.folder)
    said = refusal(pipeline, 1)
    assert "Version 1 of run 'demo' is not kept with its optimizer" in said
    assert "Kept with the optimizer in" in said
    assert ": none. In the log: 0-3. --weights-only begins" in said
    state = fork(pipeline, 1, weights_only=True)
    assert state.assembly.floor == parent.next_seq == 2
    fill_fork(pipeline, 1, 2, version=1)
    train_fork(pipeline, 2)
    manifests = manifests_of(pipeline)
    assert [manifest.version for manifest in manifests] == [1, 2]
    assert manifests[0].sha256 == parent.sha256
    assert manifests[0].parent_run == "demo"


def test_a_fresh_optimizer_may_be_asked_for(pipeline: Pipeline) -> None:
    trained(pipeline)
    state = fork(pipeline, 2, weights_only=True)
    folder = pipeline.folder.parent / "demo-2" / "checkpoints" / state.id
    assert (folder / "snapshot").is_dir()
    assert not (folder / "trainer").exists()


def test_a_fork_of_a_fork_names_its_own_parent(pipeline: Pipeline) -> None:
    trained(pipeline)
    fork(pipeline, 2)
    fill_fork(pipeline, 2, 3, version=2)
    train_fork(pipeline, 3)
    settings = pipeline.settings(run={"name": "demo-2"}, checkpoint={"folder": str(pipeline.folder.parent / "demo-2")})
    state = fork_run(pipeline.bus, settings, ForkOrder(run_id="third", folder=pipeline.folder.parent / "third", version=3))
    assert state.origin is not None
    assert (state.origin.run_id, state.origin.version) == ("demo-2", 3)


def test_a_fork_that_died_before_it_was_public_is_published_by_its_next_start(pipeline: Pipeline) -> None:
    trained(pipeline)
    fork(pipeline, 2)
    train_fork(pipeline, 2)
    train_fork(pipeline, 2)
    assert [manifest.version for manifest in manifests_of(pipeline)] == [2]


def test_what_cannot_be_forked_says_what_can(pipeline: Pipeline) -> None:
    trained(pipeline)
    said = refusal(pipeline, 9)
    assert "Version 9 of run 'demo' is not kept with its optimizer" in said
    assert "0-3. In the log: 0-3." in said
    assert "with the checksum beef" in refusal(pipeline, 2, sha256="beef")
    assert "needs a name of its own" in refusal(pipeline, 2, "demo")
    fork(pipeline, 2)
    assert "holds checkpoints of a run 'demo-2' already" in refusal(pipeline, 2)
    train_fork(pipeline, 2)
    shutil.rmtree(pipeline.folder.parent / "demo-2")
    assert "The log knows a run 'demo-2' already" in refusal(pipeline, 2)


def test_a_damaged_checkpoint_is_not_forked(pipeline: Pipeline) -> None:
    trained(pipeline)
    (folder,) = (pipeline.folder / "checkpoints").glob("v2-*")
    (folder / "trainer" / "weights").write_bytes(b"other")
    assert "is not whole: trainer/weights is not what was written" in refusal(pipeline, 2)
    assert not (pipeline.folder.parent / "demo-2").exists()


def test_versions_between_two_publications_cannot_be_forked(pipeline: Pipeline) -> None:
    trained(pipeline, 4, staleness={"publication_period": 2})
    assert "0, 2, 4. In the log: 0, 2, 4." in refusal(pipeline, 3)


def test_snapshots_of_a_store_can_be_forked(pipeline: Pipeline, tmp_path: Path) -> None:
    store = {"uri": (tmp_path / "store").as_uri(), "above_mb": 0}
    trained(pipeline, store=store)
    shutil.rmtree(pipeline.folder)
    fork(pipeline, 2, weights_only=True)
    (files,) = (tmp_path / "store" / "demo").glob("v1-*")
    (files / "adapter_model.safetensors").write_bytes(b"other")
    assert "differ from those that its manifest names" in refusal(pipeline, 1, "third", weights_only=True)
    (files / "adapter_model.safetensors").unlink()
    assert "cannot be read" in refusal(pipeline, 1, "third", weights_only=True)
    shutil.rmtree(files)
    assert "In the log: 0, 2-3." in refusal(pipeline, 1, "third", weights_only=True)


def test_the_parent_goes_on_beside_its_fork(pipeline: Pipeline) -> None:
    trained(pipeline)
    fork(pipeline, 2)
    fill_fork(pipeline, 2, 3, version=2)
    train_fork(pipeline, 3)
    fill(pipeline, 4, start=3)
    pipeline.train(NumpyTrainer(), steps=4, takeover=True, **KEEP)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4]
    assert_books(pipeline)


def test_the_command_says_how_to_start_what_it_made(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(pipeline)
    config = tmp_path / "run.toml"
    config.write_text(f'[kafka]\nnamespace = "{pipeline.namespace.name}"\n', encoding="utf-8")
    for name, value in {"ROLLOUT__GROUP_SIZE": "2", "LEARNER__GROUPS_PER_STEP": "2", "CHECKPOINT__FOLDER": str(pipeline.folder)}.items():
        monkeypatch.setenv(f"ECHO_{name}", value)
    command = typer.main.get_command(app)
    monkeypatch.setattr("echo_ops.cli.fork.reach_bus", lambda settings: pipeline.bus)
    command(["fork", "demo-2", "--version", "2", "--config", str(config)], standalone_mode=False)
    said = capsys.readouterr().out
    assert f"Run demo-2 begins at version 2 of demo ({pipeline.manifests()[2].sha256[:12]}), with its optimizer" in said
    folder = pipeline.folder.parent / "demo-2"
    assert f"ECHO_RUN__NAME=demo-2 ECHO_CHECKPOINT__FOLDER={folder} echoswarm up --config {config}" in said
    with pytest.raises(SystemExit):
        command(["fork", "no/name", "--version", "2", "--config", str(config)], standalone_mode=False)
    assert "cannot be the name of a run" in capsys.readouterr().err
