"""Weights written one tensor at a time are, byte for byte, what the library writes from memory."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="install the extra 'learner'")

import safetensors.torch
import torch
from torch import Tensor

from echo_learner.commit.snapshot import ADAPTER_CONFIG, ADAPTER_WEIGHTS, file_names, read_snapshot
from echo_learner.training.weight_file import Slot, in_file_order, open_tensors, write_snapshot
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

TENSORS = {
    "layers.10.weight": torch.randn(3, 5),
    "layers.2.weight": torch.randn(4, 2, 2).bfloat16(),
    "a": torch.randn(2).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    'quoted"ä': torch.randn(7, dtype=torch.float64),
    "transposed": torch.randn(6, 3).t(),
    "more than one piece": torch.randn((1 << 18) + 1),
}


def slots() -> list[Slot]:
    return in_file_order(Slot(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items())


def in_order() -> Iterator[Tensor]:
    return iter([TENSORS[slot.name] for slot in slots()])


def test_the_bytes_are_the_library_s(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "new", 3, WeightKind.LORA, "{}", slots(), in_order())
    expected = safetensors.torch.save({name: tensor.contiguous() for name, tensor in TENSORS.items()}, metadata={"format": "pt"})
    assert (tmp_path / "new" / ADAPTER_WEIGHTS).read_bytes() == expected
    assert b"".join(snapshot.pieces()) == expected + b"{}"
    assert snapshot.sha256 == hashlib.sha256(expected + b"{}").hexdigest()
    assert snapshot == read_snapshot(tmp_path / "new", 3, WeightKind.LORA, file_names(WeightKind.LORA))


def test_what_is_read_one_by_one(tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "new", 3, WeightKind.LORA, "{}", slots(), in_order())
    shapes = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    with open_tensors(snapshot.path(snapshot.files[0]), shapes) as stored:
        assert all(torch.equal(stored(name), tensor) for name, tensor in TENSORS.items())
    with (
        pytest.raises(UserError, match="another policy: a has the shape"),
        open_tensors(snapshot.path(snapshot.files[0]), {**shapes, "a": (3,)}),
    ):
        pass
    with pytest.raises(UserError, match="cannot be read"), open_tensors(tmp_path / "new" / ADAPTER_CONFIG, shapes):
        pass


def test_a_disk_that_refuses_leaves_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is taken, since the other ranks take part in each."""
    given = []

    def giving() -> Iterator[Tensor]:
        for slot in slots():
            given.append(slot.name)
            yield TENSORS[slot.name]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("echo_learner.training.weight_file.StreamDigest.update", full)
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(tmp_path / "new", 3, WeightKind.LORA, "{}", slots(), giving())
    assert given == [slot.name for slot in slots()]
