"""Large snapshots beside the log: what goes there, what a store that refuses does to a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_schemas.errors import UserError
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill


def store(uri: str, above_mb: int = 0) -> dict[str, Any]:
    return {"store": {"uri": uri, "above_mb": above_mb}}


def test_a_snapshot_above_the_size_lies_in_the_store_under_its_checksum(pipeline: Pipeline, tmp_path: Path) -> None:
    fill(pipeline, 1)
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=1, **store(f"file://{tmp_path}/bucket"))
    for manifest in pipeline.manifests():
        assert manifest.blob is None
        assert manifest.uri is not None
        assert manifest.uri.endswith(f"/bucket/demo/v{manifest.version}-{manifest.sha256[:12]}")
        files, root = fsspec.core.url_to_fs(manifest.uri)
        for file in manifest.files:
            assert files.info(f"{root}/{file.name}")["size"] == file.num_bytes
    assert files.cat_file(f"{root}/adapter_model.safetensors") == trainer.weights


def test_a_smaller_one_travels_through_the_log(pipeline: Pipeline, tmp_path: Path) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1, **store(f"file://{tmp_path}/bucket", above_mb=1))
    assert all(manifest.uri is None and manifest.blob is not None for manifest in pipeline.manifests())
    assert not (tmp_path / "bucket").exists()


def test_any_file_system_that_fsspec_knows_will_do(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1, **store("memory://snapshots"))
    uri = pipeline.manifests()[-1].uri
    assert uri is not None
    assert uri.startswith("memory://")
    files, root = fsspec.core.url_to_fs(uri)
    assert len(files.ls(root)) == 2


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [("nosuch://bucket/path", "'nosuch://bucket/path' cannot be used"), ("gs:///x", "cannot be used")],
    ids=["unknown", "driver not installed"],
)
def test_an_address_that_nothing_serves_is_refused_before_training(pipeline: Pipeline, uri: str, sentence: str) -> None:
    fill(pipeline, 1)
    trainer = NumpyTrainer()
    with pytest.raises(UserError, match=sentence):
        pipeline.train(trainer, steps=1, **store(uri))
    assert not trainer.batches


def test_a_store_that_refuses_ends_the_run_and_the_next_start_publishes_what_it_owed(
    pipeline: Pipeline, tmp_path: Path, uninterrupted: Callable[..., bytes]
) -> None:
    fill(pipeline, 2)
    bucket = store(f"file://{tmp_path}/bucket")
    pipeline.train(NumpyTrainer(), steps=1, **bucket)
    (tmp_path / "bucket" / "demo").rename(tmp_path / "bucket" / "moved")
    (tmp_path / "bucket" / "demo").write_text("in the way", encoding="utf-8")
    with pytest.raises(UserError, match=r"snapshot of version 2 could not be written to .*bucket/demo/v2-"):
        pipeline.train(NumpyTrainer("second"), steps=2, takeover=True, **bucket)
    assert [report.version for report in pipeline.reports()] == [1]
    (tmp_path / "bucket" / "demo").unlink()
    third = NumpyTrainer("third")
    pipeline.train(third, steps=2, takeover=True, **bucket)
    assert not third.batches, "version 2 was durable"
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert (tmp_path / "bucket" / "demo" / f"v2-{pipeline.manifests()[-1].sha256[:12]}" / "adapter_config.json").is_file()
    assert third.weights == uninterrupted(2)
    assert_books(pipeline)
