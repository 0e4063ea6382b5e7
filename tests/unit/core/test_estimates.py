"""Estimates of a run that goes on: medians, T_bcast, rates that are remembered. (`Speed`: tests/unit/rollout/test_roster.py.)"""

from __future__ import annotations

import math

from echo_core.capacity.estimates import BroadcastWatch, KnownRates, RecentMedian, heartbeat_patience_s


def test_a_median_is_of_the_newest_five() -> None:
    median = RecentMedian()
    assert median.value is None
    for seconds in (100.0, 100.0, 100.0, 1.0, 2.0, 3.0, 4.0):
        median.add(seconds)
    assert median.value == 3.0, "of 100, 1, 2, 3, 4"


def test_a_broadcast_lasts_until_enough_have_it() -> None:
    watch = BroadcastWatch(gamma=1.1)
    assert watch.installed("early", 1, 5.0) is None, "nothing is watched yet"
    watch.ready(2, num_active=3, now_s=10.0)
    assert [watch.installed(name, 2, now_s) for name, now_s in (("a", 12.0), ("a", 12.5), ("b", 13.0))] == [None, None, None]
    assert watch.installed("old", 1, 14.0) is None
    assert watch.installed("c", 3, 17.0) == 7.0
    assert watch.installed("d", 2, 18.0) is None, "it is measured once"
    watch.ready(3, num_active=0, now_s=20.0)
    assert watch.installed("d", 3, 21.0) == 1.0


def test_a_rate_is_remembered_while_its_worker_is_heard() -> None:
    rates = KnownRates()
    assert rates.update({"a": 2.0, "b": math.nan, "c": -1.0}) == {"a": 2.0, "b": 0.0, "c": 0.0}
    assert rates.update({"a": 0.0, "b": 3.0}) == {"a": 2.0, "b": 3.0}, "one that starts anew is taken to be what it was"
    assert rates.update({"b": 0.0}) == {"b": 3.0}
    assert rates.update({"a": math.inf, "b": 0.0})["a"] == 0.0, "who was not heard is forgotten"


def test_silence_of_five_heartbeats_and_five_seconds_at_least_is_death() -> None:
    assert (heartbeat_patience_s(0.3), heartbeat_patience_s(30.0)) == (5.0, 150.0)
