"""Staleness split by where it came from, with clocks that need not agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_learner.step_metrics import VersionHistory
from echo_schemas.records import LogprobSource, Trajectory, TrajectorySource, VersionSpan
from tests.unit.core.records import trajectory


def history(*times_ms: int) -> VersionHistory:
    """Version n came to be at the n-th time."""
    made = VersionHistory(0, times_ms[0])
    for version, time_ms in enumerate(times_ms[1:], 1):
        made.reached(version, time_ms)
    return made


def answer(version: int, started_ms: int, finished_ms: int) -> Trajectory:
    return trajectory(version=version, started_ms=started_ms, finished_ms=finished_ms)


def test_a_sample_fell_behind_where_versions_passed() -> None:
    """Asked under version 1, started when 2 was there, finished when 3 was, trained at 5."""
    stages = history(0, 100, 200, 300, 400, 500).stages([answer(1, 250, 350)], 5)
    assert (stages.dispatch, stages.in_flight, stages.in_queue, stages.total) == ([1], [1], [2], [4])


def test_a_moment_at_which_a_version_came_to_be_belongs_to_it() -> None:
    stages = history(0, 100, 200).stages([answer(0, 100, 200)], 2)
    assert (stages.dispatch, stages.in_flight, stages.in_queue) == ([1], [1], [0])


@given(
    started=st.integers(-1_000, 2_000),
    lasted=st.integers(-500, 2_000),
    oldest=st.integers(0, 4),
    gaps=st.lists(st.integers(-50, 300), min_size=4, max_size=4),
)
def test_parts_are_never_negative_and_add_up_whatever_the_clocks_say(started: int, lasted: int, oldest: int, gaps: list[int]) -> None:
    times = [0]
    for gap in gaps:
        times.append(times[-1] + gap)
    stages = history(*times).stages([answer(oldest, started, started + lasted)], 4)
    parts = (stages.dispatch[0], stages.in_flight[0], stages.in_queue[0])
    assert min(parts) >= 0
    assert sum(parts) == stages.total[0] == 4 - oldest


def test_a_resumed_learner_counts_older_versions_as_the_one_it_began_with() -> None:
    resumed = VersionHistory(7, 10_000)
    resumed.reached(8, 11_000)
    stages = resumed.stages([answer(5, 500, 10_500)], 8)
    assert (stages.dispatch, stages.in_flight, stages.in_queue, stages.total) == ([2], [0], [1], [3])


def test_an_empty_batch_has_no_numbers() -> None:
    assert not history(0).stages([], 0).total


def test_versions_are_taken_from_the_whole_sample() -> None:
    mixed = trajectory(
        version_spans=(VersionSpan(start=1, end=2, version=1), VersionSpan(start=2, end=3, version=3)),
        min_version=1,
        max_version=3,
        started_ms=150,
        finished_ms=350,
    )
    stages = history(0, 100, 200, 300).stages([mixed], 3)
    assert stages.total == pytest.approx([2])


def test_an_offline_sample_fell_behind_nowhere() -> None:
    offline = trajectory(
        version=1, started_ms=250, finished_ms=350, source=TrajectorySource.OFFLINE, logprob_source=LogprobSource.RECOMPUTED
    )
    stages = history(0, 100, 200, 300, 400, 500).stages([offline, answer(1, 250, 350)], 5)
    assert (stages.dispatch, stages.in_flight, stages.in_queue, stages.total) == ([0, 1], [0, 1], [0, 2], [0, 4])
