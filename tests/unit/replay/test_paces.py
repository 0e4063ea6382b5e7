"""The small parts of reading the past: paces, rewards in columns, text made harmless, times as they are typed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from echo_bus.clock import ManualClock
from echo_memory.message import MemoryMessage
from echo_ops.harmless import harmless
from echo_ops.ranges import parse_time
from echo_replay.reward_columns import RewardJoin
from echo_replay.sinks import at_original_pace, at_rate
from echo_schemas.codec import lock_file_codec
from tests.unit.core.records import at, reward


def told(*times_ms: int) -> Any:
    return [SimpleNamespace(time_ms=time_ms) for time_ms in times_ms]


def seconds_of(paced: Any, clock: ManualClock) -> list[float]:
    begun_s = clock.monotonic_s()
    return [round(clock.monotonic_s() - begun_s, 6) for _ in paced]


def test_at_a_rate_a_pause_is_not_made_up_for() -> None:
    clock = ManualClock()
    assert seconds_of(at_rate(told(0, 0, 0), 4.0, clock, clock.advance), clock) == [0.0, 0.25, 0.5]


def test_the_original_pace_keeps_the_gaps_and_never_waits_for_the_past() -> None:
    clock = ManualClock()
    assert seconds_of(at_original_pace(told(5_000, 5_250, 5_200, 7_000), clock, clock.advance), clock) == [0.0, 0.25, 0.25, 2.0]


def test_the_first_scored_reward_of_a_name_counts() -> None:
    codec = lock_file_codec()
    records = [
        reward(at(7), value=None),
        reward(at(7), value=0.5),
        reward(at(7), value=0.9),
        reward(at(7), value=0.1, name="length"),
        reward(at(5), value=0.25),
        reward(at(7, partition=1), value=1.0),
        reward(at(99), value=1.0),
        reward(at(6), value=1.0, run_id="other", group_id="other/0"),
    ]
    join = RewardJoin("demo", codec.ids, 0, 0, 50)
    join.add([MemoryMessage("rewards", 0, at, record.group_id.encode(), codec.encode(record)) for at, record in enumerate(records)])
    columns = join.columns()
    assert columns.of(7) == {"exact": 0.5, "length": 0.1}
    assert columns.of(5) == {"exact": 0.25}
    assert columns.of(6) == columns.of(99) == {}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ö 漢", "plain ö 漢"),
        ("\x1b[31m", "␛[31m"),
        ("a\nb\tc\x7f", "a⏎b␉c␡"),
        ("\u202ex\u200b\ufeff", "\\u202ex\\u200b\\ufeff"),
        ("\x9b2J", "\\u009b2J"),
    ],
)
def test_text_is_made_harmless(text: str, shown: str) -> None:
    assert harmless(text) == shown


def test_times() -> None:
    assert parse_time("2h", "--since", 10_000_000) == 2_800_000
    assert parse_time("30000d", "--until", 10_000_000) == parse_time("1960-01-01", "--until", 0) == 0
    assert parse_time("1970-01-01T00:00:01", "--since", 0) == parse_time("1970-01-01T01:00:01+01:00", "--since", 0) == 1_000
