"""How far weights are off is measured against how far training went; what cannot be compared is infinitely far or refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra 'learner'")

import safetensors.torch
import torch

from echo_learner.commit.snapshot import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SnapshotFiles
from echo_ops.cli.retrain import line_of
from echo_replay.retrain import Match, RetrainedVersion
from echo_replay.weight_distance import weight_distance
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind, WeightManifest
from tests.unit.learner.pipeline import Pipeline


def snapshot(*values: float, name: str = "a") -> SnapshotFiles:
    data = safetensors.torch.save({name: torch.tensor(values)})
    return SnapshotFiles(version=1, kind=WeightKind.LORA, config="{}", contents=((ADAPTER_WEIGHTS, data), (ADAPTER_CONFIG, b"{}")))


def published(folder: Path, files: SnapshotFiles) -> WeightManifest:
    """Its bytes in a store."""
    folder.mkdir(exist_ok=True)
    for name, content in files.contents:
        (folder / name).write_bytes(content)
    return WeightManifest(
        run_id="demo",
        version=1,
        kind=files.kind,
        files=files.files,
        num_bytes=files.num_bytes,
        sha256=files.sha256,
        uri=folder.as_uri(),
        session="s",
        checkpoint="v1-s",
        next_seq=0,
        created_ms=1,
    )


@pytest.mark.parametrize(
    ("retrained", "start", "distance"),
    [
        (snapshot(3.0, 4.0), snapshot(0.0, 0.0), 0.0),
        (snapshot(3.0, 5.0), snapshot(0.0, 0.0), 1 / 5),
        (snapshot(3.0, 5.0), snapshot(3.0, 4.0), math.inf),
        (snapshot(3.0, 4.0), snapshot(3.0, 4.0), 0.0),
        (snapshot(3.0, 4.0, 5.0), snapshot(0.0, 0.0), math.inf),
        (snapshot(3.0, 4.0, name="b"), snapshot(0.0, 0.0), math.inf),
    ],
    ids=["equal", "a fifth of the way", "no way at all", "nothing moved", "another shape", "another tensor"],
)
def test_the_share_of_the_way(tmp_path: Path, retrained: SnapshotFiles, start: SnapshotFiles, distance: float) -> None:
    bus = Pipeline(tmp_path / "run").bus
    assert weight_distance(bus, published(tmp_path / "store", snapshot(3.0, 4.0)), retrained, start) == pytest.approx(distance)


def test_what_holds_no_tensors(tmp_path: Path) -> None:
    manifest = published(tmp_path / "store", snapshot(3.0, 4.0))
    (tmp_path / "store" / ADAPTER_WEIGHTS).write_bytes(b"x" * manifest.files[0].num_bytes)
    with pytest.raises(UserError, match="does not hold tensors"):
        weight_distance(Pipeline(tmp_path / "run").bus, manifest, snapshot(3.0, 4.0), snapshot(0.0, 0.0))


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
