"""A few hundred hostile messages for every topic; `python -m tests.fuzz` has as many as wanted."""

from __future__ import annotations

import logging

import pytest

from echo_schemas.topics import TOPICS
from tests.fuzz.cases import run_cases

NUM_CASES = 500


@pytest.mark.parametrize("topic", [topic.name for topic in TOPICS])
def test_nothing_that_a_stranger_writes_stops_a_reader(topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    tally = run_cases(topic, NUM_CASES)
    # The cases are worth something only while some get past the codec, and some do not.
    assert min(tally.num_read, tally.num_invalid) > NUM_CASES // 10
