"""How far weights are off is measured against how far training went; what cannot be compared is infinitely far or refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra 'learner'")

import safetensors.torch
import torch

from echo_learner.commit.snapshot import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SnapshotFiles, file_names, read_snapshot
from echo_ops.cli.retrain_output import line_of
from echo_replay.retrain import Match, RetrainedVersion
from echo_replay.weight_distance import weight_distance
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind, WeightManifest
from tests.unit.learner.pipeline import Pipeline


def snapshot(folder: Path, *values: float, name: str = "a") -> SnapshotFiles:
    folder.mkdir()
    safetensors.torch.save_file({name: torch.tensor(values)}, folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_text("{}")
    return read_snapshot(folder, 1, WeightKind.LORA, file_names(WeightKind.LORA))


def published(files: SnapshotFiles) -> WeightManifest:
    """Its files as those of a store."""
    return WeightManifest(
        run_id="demo",
        version=1,
        kind=files.kind,
        files=files.files,
        num_bytes=files.num_bytes,
        sha256=files.sha256,
        uri=files.folder.as_uri(),
        session="s",
        checkpoint="v1-s",
        next_seq=0,
        created_ms=1,
    )


@pytest.mark.parametrize(
    ("retrained", "start", "distance"),
    [
        ({"a": (3.0, 4.0)}, (0.0, 0.0), 0.0),
        ({"a": (3.0, 5.0)}, (0.0, 0.0), 1 / 5),
        ({"a": (3.0, 5.0)}, (3.0, 4.0), math.inf),
        ({"a": (3.0, 4.0)}, (3.0, 4.0), 0.0),
        ({"a": (3.0, 4.0, 5.0)}, (0.0, 0.0), math.inf),
        ({"b": (3.0, 4.0)}, (0.0, 0.0), math.inf),
    ],
    ids=["equal", "a fifth of the way", "no way at all", "nothing moved", "another shape", "another tensor"],
)
def test_the_share_of_the_way(tmp_path: Path, retrained: dict[str, tuple[float, ...]], start: tuple[float, ...], distance: float) -> None:
    bus = Pipeline(tmp_path / "run").bus
    ((name, values),) = retrained.items()
    theirs, ours = published(snapshot(tmp_path / "store", 3.0, 4.0)), snapshot(tmp_path / "ours", *values, name=name)
    assert weight_distance(bus, theirs, ours, snapshot(tmp_path / "start", *start)) == pytest.approx(distance)


def test_what_holds_no_tensors(tmp_path: Path) -> None:
    manifest = published(snapshot(tmp_path / "store", 3.0, 4.0))
    (tmp_path / "store" / ADAPTER_WEIGHTS).write_bytes(b"x" * manifest.files[0].num_bytes)
    with pytest.raises(UserError, match="does not hold tensors"):
        weight_distance(
            Pipeline(tmp_path / "run").bus, manifest, snapshot(tmp_path / "ours", 3.0, 4.0), snapshot(tmp_path / "start", 0.0, 0.0)
        )


@pytest.mark.parametrize(
    ("match", "ranks", "says"),
    [
        (Match.IDENTICAL, 1, "version 7: [green]identical[/], sha256 aaaaaaaaaaaa"),
        (Match.WITHIN, 2, "off by 0.0012 of the way from the start (trained on 1 ranks, now on 2)"),
        (Match.DIFFERS, 1, "by 0.0012 of the way from the start: aaaaaaaaaaaa, published bbbbbbbbbbbb"),
    ],
)
def test_one_line_a_version(match: Match, ranks: int, says: str) -> None:
    found = RetrainedVersion(version=7, match=match, sha256="a" * 64, published_sha256="b" * 64, distance=0.00123, world_size=1)
    assert says in line_of(found, ranks)
