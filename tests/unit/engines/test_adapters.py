"""The shelf of adapters: each loaded once, unloaded when a newer one is in force and nobody uses it."""

from __future__ import annotations

from echo_rollout.engines.adapters import Adapter, AdapterShelf
from echo_rollout.engines.engine import SnapshotRef


def adapter(version: int) -> Adapter[str]:
    return Adapter(SnapshotRef(version=version, sha256="a" * 64), 100 + version, f"request {version}")


def test_an_empty_shelf_has_nothing_to_take() -> None:
    shelf: AdapterShelf[str] = AdapterShelf()
    assert shelf.take() is None
    assert shelf.in_use == frozenset()


def test_an_unused_adapter_leaves_with_the_next_version() -> None:
    shelf: AdapterShelf[str] = AdapterShelf()
    assert shelf.put(adapter(0)) == []
    assert shelf.put(adapter(1)) == [100]
    assert shelf.in_use == {1}


def test_an_adapter_stays_until_its_last_generation_gives_it_back() -> None:
    shelf: AdapterShelf[str] = AdapterShelf()
    shelf.put(adapter(0))
    first, second = shelf.take(), shelf.take()
    assert first == second == adapter(0)
    assert shelf.put(adapter(1)) == []
    assert shelf.in_use == {0, 1}
    assert shelf.give_back(100) == []
    assert shelf.give_back(100) == [100]
    assert shelf.in_use == {1}


def test_the_adapter_in_force_stays_when_nothing_uses_it() -> None:
    shelf: AdapterShelf[str] = AdapterShelf()
    shelf.put(adapter(0))
    shelf.take()
    assert shelf.give_back(100) == []
    assert shelf.take() == adapter(0)


def test_versions_that_overlap_are_kept_apart() -> None:
    shelf: AdapterShelf[str] = AdapterShelf()
    for version in range(3):
        shelf.put(adapter(version))
        shelf.take()
    assert shelf.in_use == {0, 1, 2}
    assert shelf.give_back(101) == [101]
    assert shelf.give_back(100) == [100]
    assert shelf.in_use == {2}
    assert shelf.current == adapter(2)
