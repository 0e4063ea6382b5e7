"""What stays of a run's checkpoints: nothing that came to nothing, all that somebody may go on from. Old ones stop no start."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.commit.ancestry import Relation, relations
from echo_learner.commit.checkpoint import _checksum
from echo_learner.commit.learner_state import LearnerState, checkpoint_id
from echo_ops.cli import checkpoints as commands
from echo_ops.cli import output
from echo_schemas.errors import UserError
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill


@dataclass(frozen=True)
class Step:
    parent: str | None
    name: str

    @property
    def version(self) -> int:
        return int(self.name[1:].partition("-")[0])


def related(tip: str, *lines: str) -> dict[str, str]:
    """`lines`: chains of ids, each the parent of the next; the first one of a chain is not there if it stands in brackets."""
    nodes: dict[str, Step] = {}
    for line in lines:
        parent = None
        for name in line.split():
            if not name.startswith("("):
                nodes.setdefault(name, Step(parent, name))
            parent = name.strip("()")
    return {name: relation.value for name, relation in relations(nodes, tip).items()}


def test_what_a_checkpoint_is_to_the_tip() -> None:
    assert related("v5-a", "v0-a v3-a v4-a v5-a v6-b", "v4-a v5-c v6-c") == {
        "v0-a": "older",
        "v3-a": "older",
        "v4-a": "older",
        "v5-a": "tip",
        "v6-b": "unpublished",
        "v5-c": "dead",
        "v6-c": "dead",
    }
    # A run that began twice at the same time.
    assert related("v1-a", "v0-a v1-a", "v0-b v1-b") == {"v0-a": "older", "v1-a": "tip", "v0-b": "dead", "v1-b": "dead"}
    # The next version of the same number, by a session in another mode.
    assert related("v2-a", "v1-a v2-a v2-b")["v2-b"] == "unpublished"


def test_where_parents_are_missing_nothing_is_called_dead_that_may_not_be() -> None:
    chain = ("(v6-a) v7-a v8-b",)
    assert related("v8-b", *chain, "(v6-a) v7-c")["v7-c"] == "dead", "both leave the same checkpoint, and one goes on"
    assert related("v8-b", *chain, "v0-a v1-a") == {"v7-a": "older", "v8-b": "tip", "v0-a": "older", "v1-a": "older"}
    assert related("v8-b", *chain, "(v8-x) v9-x")["v9-x"] == "unknown"
    assert related("v8-b", "v0-a v8-b", "(v8-x) v9-x")["v9-x"] == "unknown"
    assert set(related("v9-gone", "v0-a v8-b").values()) == {"unknown"}


def store_branch(pipeline: Pipeline, parent: LearnerState, version: int, session: str) -> str:
    """A checkpoint that a session made after `parent` and never published."""
    state = replace(parent, id=checkpoint_id(version, session), parent=parent.id, version=version, session=session)
    pipeline.store.save(state, (), None, lambda folder: folder.mkdir())
    return state.id


def first_steps(pipeline: Pipeline, steps: int) -> dict[int, LearnerState]:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=steps, checkpoint={"keep": 9})
    return {state.version: state for state in pipeline.store.states("demo").values()}


def test_what_another_session_left_beside_the_line_is_removed_once_the_line_goes_on(pipeline: Pipeline) -> None:
    states = first_steps(pipeline, 2)
    dead = {store_branch(pipeline, states[1], 2, "aaaaaaaa")}
    dead.add(store_branch(pipeline, pipeline.store.load(min(dead)), 3, "aaaaaaaa"))
    pipeline.train(NumpyTrainer(), steps=4, takeover=True, checkpoint={"keep": 9})
    left = set(pipeline.store.ids())
    assert not dead & left
    assert {state.id for state in states.values()} <= left, "the line itself stays"
    assert_books(pipeline)


def test_a_run_goes_on_beside_an_old_checkpoint_that_cannot_be_read(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    states = first_steps(pipeline, 2)
    (pipeline.folder / "checkpoints" / states[0].id / "state.json").write_text("{", encoding="utf-8")
    pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]
    assert f"Passed over: The checkpoint {states[0].id} cannot be read" in caplog.text


def test_one_that_may_be_the_newest_and_cannot_be_read_is_not_passed_over(pipeline: Pipeline) -> None:
    states = first_steps(pipeline, 2)
    name = store_branch(pipeline, states[2], 3, "bbbbbbbb")
    (pipeline.folder / "checkpoints" / name / "state.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=f"The checkpoint {name} cannot be read"):
        pipeline.train(NumpyTrainer(), steps=3, takeover=True)


def test_a_run_goes_on_from_one_of_a_newer_release_that_says_more(pipeline: Pipeline) -> None:
    states = first_steps(pipeline, 2)
    file = pipeline.folder / "checkpoints" / states[2].id / "state.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["checksum"]
    content["terms"][0]["added"] = content["added"] = "by a newer release"
    file.write_text(json.dumps({"checksum": _checksum(content), **content}), encoding="utf-8")
    assert pipeline.store.load(states[2].id) == states[2]
    pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]


def test_one_that_its_learner_removes_meanwhile_has_no_size(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that is to be taken over trains on, and removes what is looked at."""
    states = first_steps(pipeline, 2)
    listed, removed = os.scandir, states[0].id

    def scandir(path: str | Path | int) -> Any:
        # A number is an open folder, which is how one is deleted.
        if not isinstance(path, int) and Path(path).name == "trainer" and Path(path).parent.name == removed:
            pipeline.store.remove(removed)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    pipeline.store.check_writable("demo")
    assert removed not in pipeline.store.ids(), "it was not removed in between: nothing is shown"


def test_one_that_the_disk_does_not_give_is_named(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    states = first_steps(pipeline, 1)

    def fails(*args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(hashlib, "file_digest", fails)
    with pytest.raises(UserError, match=f"The checkpoint {states[1].id} in .* cannot be read: .*Input/output error"):
        pipeline.store.verify(states[1].id)


@pytest.fixture
def said(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command prints about the pipeline's run."""
    lines: list[str] = []
    monkeypatch.setattr(commands, "read_settings", lambda _config: pipeline.settings())
    monkeypatch.setattr(commands, "reach_bus", lambda _settings: pipeline.bus)
    monkeypatch.setattr(output.out, "print", lines.append)
    return lines


def test_the_command_lists_what_there_is_and_removes_what_nobody_needs(pipeline: Pipeline, said: list[str]) -> None:
    states = first_steps(pipeline, 4)
    dead = store_branch(pipeline, states[1], 2, "aaaaaaaa")
    unpublished = store_branch(pipeline, states[4], 5, "bbbbbbbb")
    broken = states[0].id
    (pipeline.folder / "checkpoints" / broken / "state.json").write_text("{", encoding="utf-8")
    commands.list_checkpoints(None)
    by_name = {line.split()[0]: line for line in said[:-1]}
    assert "the newest step in the log" in by_name[states[4].id]
    assert "trained, not in the log yet" in by_name[unpublished]
    assert "came to nothing" in by_name[dead]
    assert "cannot be read" in by_name[broken]
    assert said[-1].startswith("7 checkpoints, ")
    before = set(pipeline.store.ids())
    commands.prune(None, keep=2, unreadable=True, dry_run=True)
    assert set(pipeline.store.ids()) == before
    commands.prune(None, keep=2, unreadable=False, dry_run=False)
    assert before - set(pipeline.store.ids()) == {dead, states[1].id, states[2].id}
    commands.prune(None, keep=2, unreadable=True, dry_run=False)
    assert set(pipeline.store.ids()) == {states[3].id, states[4].id, unpublished}
    (pipeline.folder / "checkpoints" / unpublished).rename(pipeline.folder / "elsewhere")
    pipeline.train(NumpyTrainer(), steps=4, takeover=True)


def test_nothing_is_removed_while_the_log_does_not_say_what_is_newest(pipeline: Pipeline, said: list[str]) -> None:
    states = first_steps(pipeline, 2)
    (pipeline.folder / "checkpoints" / states[2].id).rename(pipeline.folder / "elsewhere")
    with pytest.raises(UserError, match=rf"The log names the checkpoint {states[2].id}, which cannot be read here, .* Nothing was removed"):
        commands.prune(None, keep=1, unreadable=True, dry_run=False)
    assert states[1].id in pipeline.store.ids()
    assert not said


def test_each_relation_has_its_words() -> None:
    assert set(commands._MEANINGS) == set(Relation)
