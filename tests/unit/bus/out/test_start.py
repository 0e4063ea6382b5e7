"""The garbage collector while a process is built."""

from __future__ import annotations

import gc

import pytest

from echo_runtime.garbage import without_collection


def test_the_collector_rests_and_leaves_alone_what_was_made() -> None:
    gc.unfreeze()
    try:
        with without_collection():
            assert not gc.isenabled()
            made: list[object] = []
            made.append(made)
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(found is made for found in gc.get_objects())
    finally:
        gc.unfreeze()


def test_it_is_at_work_again_after_a_failure() -> None:
    with pytest.raises(ValueError, match="no"), without_collection():
        raise ValueError("no")
    assert gc.isenabled()
    gc.unfreeze()


def test_who_switched_it_off_keeps_it_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
