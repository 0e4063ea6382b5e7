"""A checkpoint store that is full or read-only, on a file system of its own: nothing is half-published, and there is a way on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_schemas.errors import UserError
from echo_schemas.records import SessionClaim
from echo_schemas.topics import STEPS
from tests.forks.process import ForkingProcess
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill

STATE_BYTES = 200 * 1024
STEPS_WANTED = 6


class LargeTrainer(NumpyTrainer):
    """Its state takes as much room as a disk of a megabyte has four times."""

    def save(self, folder: Path) -> None:
        super().save(folder)
        (folder / "optimizer").write_bytes(bytes(STATE_BYTES))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=False)
    if not mounted or mounted.returncode:
        pytest.skip("a file system of its own takes the right to mount one")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def assert_nothing_half_published(pipeline: Pipeline) -> None:
    """Every version in the log is kept whole, and the log names no other."""
    versions = [report.version for report in pipeline.reports()]
    assert versions == list(range(1, len(versions) + 1))
    for report in pipeline.reports():
        pipeline.store.verify(report.checkpoint)
    assert [manifest.version for manifest in pipeline.manifests()] == [0, *versions]
    assert not [path for path in (pipeline.folder / "checkpoints").iterdir() if path.name.startswith(".")]


def test_a_disk_that_fills_up_ends_the_learner_before_it_publishes(small_disk: Path, tmp_path: Path) -> None:
    pipeline = Pipeline(small_disk / "run", options={"checkpoint": {"keep": 9}, "staleness": {"budget": 9}})
    fill(pipeline, STEPS_WANTED)
    with pytest.raises(
        UserError, match=r"The checkpoint v\d-\w+ could not be written to .*No space left on device.*Nothing of it was published"
    ):
        pipeline.train(LargeTrainer(), steps=STEPS_WANTED)
    assert 0 < len(pipeline.reports()) < STEPS_WANTED
    assert_nothing_half_published(pipeline)
    claims = pipeline.read(STEPS, SessionClaim)
    with pytest.raises(UserError, match=r"MiB left, and a checkpoint of this run takes 0\.2\. Nothing was changed"):
        pipeline.train(LargeTrainer(), steps=STEPS_WANTED, takeover=True)
    assert pipeline.read(STEPS, SessionClaim) == claims, "who cannot write does not end who can"
    moved = tmp_path / "roomy"
    shutil.copytree(pipeline.folder, moved)
    pipeline.folder = moved
    last = LargeTrainer()
    pipeline.train(last, steps=STEPS_WANTED, takeover=True)
    assert [report.version for report in pipeline.reports()] == list(range(1, STEPS_WANTED + 1))
    assert_nothing_half_published(pipeline)
    assert_books(pipeline)


def test_a_disk_that_is_read_only_is_noticed_before_anything_changes(small_disk: Path) -> None:
    pipeline = Pipeline(small_disk / "run")
    fill(pipeline, 3)
    pipeline.train(NumpyTrainer(), steps=2)
    claims = pipeline.read(STEPS, SessionClaim)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"Checkpoints cannot be written to .*Read-only file system\. Nothing was changed"):
        pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert pipeline.read(STEPS, SessionClaim) == claims
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3]


@pytest.mark.slow
def test_what_torch_makes_of_a_full_disk_is_an_error_of_the_disk(torch_process: ForkingProcess, base: Path, small_disk: Path) -> None:
    """torch's writer raises RuntimeError, which would pass for a bug."""
    (small_disk / "ballast").write_bytes(bytes(900 * 1024))
    with pytest.raises(AssertionError, match=r"(?s)OSError.*could not be written whole \(is the disk full\?\)"):
        torch_process.run("train", base=str(base), script=[["step", 1], ["save", str(small_disk / "saved")]], settings={"kind": "full"})
