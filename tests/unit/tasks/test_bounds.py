"""Bounds of time and memory: what passes them is ended, also where everything is caught, and what comes after is free again."""

from __future__ import annotations

import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo_tasks.bounds import OutOfBounds, bounded

PLENTY = 1 << 30
# What the signal raises may be raised in a callback of the garbage collector (hypothesis has one) and be lost there; it comes again.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def test_work_within_its_bounds_is_done_and_leaves_nothing_behind() -> None:
    former, limits = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)
    with bounded(10.0, PLENTY):
        assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)) == (former, limits)


def test_work_without_an_end_is_ended_also_where_everything_is_caught() -> None:
    caught = 0

    def never_ends() -> None:
        nonlocal caught
        while caught < 3:
            try:
                while True:
                    pass
            except BaseException:  # as some libraries do
                caught += 1
        while True:
            pass

    with pytest.raises(OutOfBounds, match=r"No end within 0.05 s of processor time"), bounded(0.05, PLENTY):
        never_ends()
    assert caught == 3
    with bounded(10.0, PLENTY):
        assert sum(range(100_000)) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux alone")
def test_work_that_takes_too_much_memory_is_ended() -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(OutOfBounds, match=r"More than 16777216 bytes of memory"), bounded(10.0, 1 << 24):
        bytearray(1 << 26)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    bytearray(1 << 26)


def test_what_the_work_raises_is_its_own() -> None:
    with pytest.raises(KeyError), bounded(10.0, PLENTY):
        raise KeyError
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_thread_has_no_bounds_and_is_refused() -> None:
    def work() -> None:
        with bounded(10.0, PLENTY):
            pass

    with ThreadPoolExecutor(1) as pool, pytest.raises(ValueError, match="main thread"):
        pool.submit(work).result(60)
