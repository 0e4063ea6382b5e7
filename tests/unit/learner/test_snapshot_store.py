"""Large snapshots beside the log: what goes there, what a store that refuses does to a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.blobs.chunk_list import read_chunk_list
from echo_bus.blobs.delta import patch
from echo_learner.commit.placement import SnapshotPlacement, expected_bytes
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.evaluation.setup import kept_manifests
from echo_schemas.errors import UserError
from echo_schemas.records import SessionClaim
from echo_schemas.topics import STEPS, WEIGHT_CHUNKS
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
    pipeline: Pipeline, tmp_path: Path, uninterrupted: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pipeline, 2)
    bucket = store(f"file://{tmp_path}/bucket")
    pipeline.train(NumpyTrainer(), steps=1, **bucket)

    def refusing(snapshot: SnapshotFiles, folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr("echo_learner.commit.store._write_local", refusing)
        with pytest.raises(UserError, match=r"snapshot of version 2 could not be written to .*bucket/demo/v2-"):
            pipeline.train(NumpyTrainer("second"), steps=2, takeover=True, **bucket)
    assert [report.version for report in pipeline.reports()] == [1]
    third = NumpyTrainer("third")
    pipeline.train(third, steps=2, takeover=True, **bucket)
    assert not third.batches, "version 2 was durable"
    assert [report.version for report in pipeline.reports()] == [1, 2]
    assert (tmp_path / "bucket" / "demo" / f"v2-{pipeline.manifests()[-1].sha256[:12]}" / "adapter_config.json").is_file()
    assert third.weights == uninterrupted(2)
    assert_books(pipeline)


def test_without_an_address_large_snapshots_lie_beside_the_checkpoints_the_newest_of_them(pipeline: Pipeline) -> None:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=4, **store(""))
    folder = (pipeline.folder / "snapshots" / "demo").absolute()
    assert [manifest.uri for manifest in pipeline.manifests()] == [
        f"file://{folder}/v{manifest.version}-{manifest.sha256[:12]}" for manifest in pipeline.manifests()
    ]
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["v2", "v3", "v4"]
    assert sorted(kept_manifests(pipeline.bus, "demo")) == [2, 3, 4]


def test_at_an_address_of_ones_own_everything_stays_unless_told_otherwise(pipeline: Pipeline) -> None:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=3, **store("memory://all"))
    assert sorted(kept_manifests(pipeline.bus, "demo")) == [0, 1, 2, 3]
    pipeline.train(NumpyTrainer(), steps=4, takeover=True, store={"uri": "memory://all", "above_mb": 0, "keep": 2})
    assert sorted(kept_manifests(pipeline.bus, "demo")) == [3, 4]


def test_a_store_that_cannot_be_written_is_refused_before_anything_is(pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "bucket").write_text("no folder", encoding="utf-8")
    with pytest.raises(UserError, match=r"Snapshots cannot be kept at file://.*bucket: .*Nothing was changed"):
        pipeline.train(NumpyTrainer(), steps=1, **store(f"file://{tmp_path}/bucket"))
    assert not pipeline.read(STEPS, SessionClaim)
    assert not pipeline.store.ids()


def test_a_snapshot_on_a_local_disk_has_its_name_only_when_it_would_survive_the_power(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    renamed: list[tuple[str, list[str]]] = []
    rename = Path.rename

    def noted(path: Path, target: Path) -> Path:
        renamed.append((Path(target).name, [name for name in synced if name.startswith(str(path))]))
        return rename(path, target)

    monkeypatch.setattr("os.fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink())))
    monkeypatch.setattr(Path, "rename", noted)
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1, **store(f"file://{tmp_path}/bucket"))
    (name,) = [path.name for path in (tmp_path / "bucket" / "demo").iterdir() if path.name.startswith("v0-")]
    before = next(paths for target, paths in renamed if target == name)
    assert {Path(path).name for path in before} >= {"adapter_model.safetensors", "adapter_config.json"}
    assert any(path.endswith(".tmp") for path in before), "the folder itself"
    assert str(tmp_path / "bucket" / "demo") in synced, "and the folder that holds its name"


def test_a_snapshot_that_was_not_written_whole_leaves_nothing_and_one_that_was_cut_is_replaced(tmp_path: Path) -> None:
    from echo_learner.commit.store import SnapshotStore

    class Cut(SnapshotFiles):
        __slots__ = ()

        def pieces_of(self, file: Any) -> Iterator[bytes]:
            yield b"some"
            raise OSError(5, "Input/output error")

    whole = NumpyTrainer().snapshot(7, tmp_path / "taken")
    cut = Cut(version=7, kind=whole.kind, config=whole.config, folder=whole.folder, files=whole.files, sha256=whole.sha256)
    snapshots = SnapshotStore(f"file://{tmp_path}", "demo")
    with pytest.raises(UserError, match="version 7 could not be written"):
        snapshots.write(cut)
    assert list((tmp_path / "demo").iterdir()) == []
    half = tmp_path / "demo" / f"v7-{whole.sha256[:12]}"
    half.mkdir()
    (half / "adapter_model.safetensors").write_bytes(b"so")
    assert snapshots.write(whole) == f"file://{half}"
    assert {path.name: path.read_bytes() for path in half.iterdir()} == {file.name: whole.path(file).read_bytes() for file in whole.files}
    assert [path.name for path in (tmp_path / "demo").iterdir()] == [half.name]


def keep_bytes(pipeline: Pipeline, num_bytes: int) -> None:
    """Let `weights.chunks` keep so many bytes a partition."""
    name = pipeline.namespace.topic(WEIGHT_CHUNKS)
    entry = ConfigEntry("retention.bytes", str(num_bytes), incremental_operation=AlterConfigOpType.SET)
    for future in (
        pipeline.cluster.admin().incremental_alter_configs([ConfigResource(ResourceType.TOPIC, name, incremental_configs=[entry])]).values()
    ):
        future.result()


def test_a_snapshot_that_retention_would_take_is_refused_before_its_checkpoint(pipeline: Pipeline, tmp_path: Path) -> None:
    fill(pipeline, 1)
    size = NumpyTrainer().snapshot(0, tmp_path / "taken").num_bytes
    keep_bytes(pipeline, 2 * size - 1)
    with pytest.raises(UserError, match=r"weights\.chunks keeps .* a partition, and a snapshot of .* Lower \[store\] above_mb"):
        pipeline.train(NumpyTrainer(), steps=1)
    assert not pipeline.store.ids(), "no start would ever get it published"
    keep_bytes(pipeline, 200 * size)
    pipeline.train(NumpyTrainer(), steps=1, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1]


def test_the_size_of_whole_models_is_known_at_the_start(pipeline: Pipeline, tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}", encoding="utf-8")
    for number, shape in enumerate([[1 << 20, 3], [512, 1 << 20]]):
        header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}, "__metadata__": {"format": "pt"}}).encode()
        (base / f"model-{number}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    policy = {"base": str(base), "update": "full", "dtype": "bfloat16"}
    settings = pipeline.settings(policy=policy)
    assert expected_bytes(settings) == 2 * 515 * (1 << 20)
    keep_bytes(pipeline, 1 << 30)
    SnapshotPlacement(pipeline.bus, settings).check(expected_bytes(settings))
    assert (pipeline.folder / "snapshots" / "demo").is_dir(), "above 1 GiB: the store, which was tried"
    with pytest.raises(UserError, match=r"keeps 1\.0 GiB a partition, and a snapshot of 1\.0 GiB needs 2\.0"):
        SnapshotPlacement(pipeline.bus, pipeline.settings(policy=policy, store={"above_mb": 5000})).check(expected_bytes(settings))


def test_a_manifest_of_the_store_comes_with_its_list_of_chunks_where_workers_may_pass_them_on(pipeline: Pipeline, tmp_path: Path) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1, **store(f"file://{tmp_path}/bucket"), weights={"source": "peers", "secret": "s" * 32})
    for manifest in pipeline.manifests():
        assert manifest.chunk_list is not None
        listed = pipeline.bus.blob_reader().read(manifest.chunk_list, manifest.run_id)
        (chunk,) = read_chunk_list(listed, manifest.num_bytes)
        assert chunk.sha256 == manifest.sha256, "one chunk is the whole"


def test_a_delta_leads_from_one_published_version_to_the_next(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.commit.publication._MOST_OF_THE_WHOLE", 100.0)
    fill(pipeline, 3)
    pipeline.train(NumpyTrainer(), steps=3, weights={"delta": True})
    start, first, second, third = pipeline.manifests()
    assert (start.delta, first.delta) == (None, None), "the first weights of this trainer have another size"
    for before, after in ((first, second), (second, third)):
        assert after.delta is not None
        assert after.parent_sha256 == before.sha256
        delta = pipeline.bus.blob_reader().read(after.delta, after.run_id)
        assert b"".join(patch([pipeline.blob(before)], delta)) == pipeline.blob(after)


def test_a_delta_is_not_written_where_it_saves_little_or_nobody_wants_it(pipeline: Pipeline) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2, weights={"delta": True})
    assert [manifest.delta for manifest in pipeline.manifests()] == [None, None, None]
