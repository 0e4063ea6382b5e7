"""Labels that strangers choose."""

from __future__ import annotations

from echo_bus.metrics import BoundedLabel


def test_only_so_many_values_are_told_apart() -> None:
    label = BoundedLabel(most=3)
    assert [label.of(name) for name in ("a", "b", "a", "c", "d", "e", "b")] == ["a", "b", "a", "c", "(others)", "(others)", "b"]


def test_long_values_are_cut() -> None:
    assert len(BoundedLabel().of("x" * 100_000)) == 100
