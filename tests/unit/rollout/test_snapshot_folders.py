"""Folders of snapshots: of living workers and of dead ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echo_rollout.run import _snapshot_bytes
from echo_rollout.snapshot_folders import snapshot_folder
from echo_settings import Settings

LONG_AGO_S = 1_000_000_000


def abandoned(parent: Path, name: str) -> Path:
    folder = parent / f"echoswarm-weights-{name}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    os.utime(folder, (LONG_AGO_S, LONG_AGO_S))
    return folder


def test_a_folder_goes_with_its_worker(tmp_path: Path) -> None:
    with snapshot_folder(1, shared_memory=tmp_path) as folder:
        (folder / "file").write_bytes(b"x")
        assert folder.parent == tmp_path
    assert not folder.exists()


def test_what_a_killed_worker_left_is_removed_by_the_next(tmp_path: Path) -> None:
    left, other = abandoned(tmp_path, "killed"), tmp_path / "somebody-elses"
    other.mkdir()
    os.utime(other, (LONG_AGO_S, LONG_AGO_S))
    with snapshot_folder(1, shared_memory=tmp_path):
        assert not left.exists()
        assert other.exists()


def test_the_folder_of_a_living_worker_stays_however_old(tmp_path: Path) -> None:
    with snapshot_folder(1, shared_memory=tmp_path) as first:
        os.utime(first, (LONG_AGO_S, LONG_AGO_S))
        with snapshot_folder(1, shared_memory=tmp_path) as second:
            assert first.exists()
            assert second != first


def test_a_folder_that_was_made_a_moment_ago_stays(tmp_path: Path) -> None:
    young = tmp_path / "echoswarm-weights-young"
    young.mkdir()
    with snapshot_folder(1, shared_memory=tmp_path):
        assert young.exists()


def test_without_room_in_shared_memory_it_is_among_temporary_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with snapshot_folder(1 << 60, shared_memory=tmp_path) as folder:
        assert folder.parent != tmp_path
    assert "needs room for two snapshots of about 1073741824.0. Free space there, or set TMPDIR." in caplog.text


def test_the_room_for_whole_models_follows_from_the_base(tmp_path: Path) -> None:
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(8 << 30)
    assert _snapshot_bytes(Settings.model_validate({"policy": {"update": "full"}}), tmp_path) == 16 << 30
    assert _snapshot_bytes(Settings(), tmp_path) == 256 << 20
