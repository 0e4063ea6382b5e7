"""The contiguous watermark: nothing is committable before everything below it is done."""

from __future__ import annotations

import threading
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_bus.group.offsets import OffsetTracker


def test_nothing_is_committable_before_the_first_message() -> None:
    assert OffsetTracker().committable() is None


def test_done_messages_move_the_watermark_past_gaps() -> None:
    tracker = OffsetTracker()
    for offset in (3, 4, 9):
        tracker.advance(offset)
    assert tracker.committable() == 10


def test_the_oldest_held_offset_blocks_all_later_ones() -> None:
    tracker = OffsetTracker()
    tracker.hold(5)
    tracker.advance(6)
    tracker.hold(7)
    tracker.release(7)
    assert tracker.committable() == 5
    assert tracker.num_held == 1
    tracker.release(5)
    assert tracker.committable() == 8
    assert tracker.num_held == 0


def test_a_second_release_and_a_strange_one_change_nothing() -> None:
    releases: list[int] = []
    tracker = OffsetTracker(on_release=lambda: releases.append(1))
    tracker.hold(1)
    tracker.hold(2)
    tracker.release(2)
    tracker.release(2)
    tracker.release(77)
    assert tracker.committable() == 1
    assert tracker.num_held == 1
    assert len(releases) == 1


def test_offsets_never_go_back() -> None:
    tracker = OffsetTracker()
    tracker.advance(9)
    with pytest.raises(ValueError, match="offsets only grow"):
        tracker.hold(9)


@given(
    offered=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=1, max_size=60),
    order=st.randoms(use_true_random=False),
)
def test_the_watermark_is_the_first_offset_that_is_not_done(offered: list[tuple[int, bool]], order: Random) -> None:
    """Against the definition, for any gaps, any mix of held and done, any order of release."""
    tracker, open_offsets, offset = OffsetTracker(), [], 0
    for step, is_held in offered:
        offset += step
        if is_held:
            tracker.hold(offset)
            open_offsets.append(offset)
        else:
            tracker.advance(offset)
        assert tracker.committable() == min(open_offsets, default=offset + 1)
    for released in order.sample(open_offsets, len(open_offsets)):
        tracker.release(released)
        open_offsets.remove(released)
        assert tracker.committable() == min(open_offsets, default=offset + 1)
        assert tracker.num_held == len(open_offsets)


def test_releases_from_many_threads_are_all_counted() -> None:
    tracker, num_offsets, num_threads = OffsetTracker(), 4_000, 4
    for offset in range(num_offsets):
        tracker.hold(offset)
    start = threading.Barrier(num_threads)

    def release(first: int) -> None:
        start.wait()
        for offset in range(first, num_offsets, num_threads):
            tracker.release(offset)

    threads = [threading.Thread(target=release, args=(first,)) for first in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.committable() == num_offsets
