"""A moment's lag is no standstill, however long the process has run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("faust", reason="Faust is missing: install the extra 'streams'")

from faust.types import TP

from echo_streams.driver import Consumer

LONG_AGO_S = 10_000.0


def test_faust_s_own_check_says_nothing_of_a_partition_that_is_behind() -> None:
    """Faust's looks at the times of a stream's events, of which our application has none."""
    said: list[str] = []
    thread = SimpleNamespace(verify_event_path=lambda now, tp: said.append(f"{tp} is not read"))
    consumer = Consumer.__new__(Consumer)
    consumer._thread = thread  # type: ignore[assignment]  # as the driver's own has it
    consumer.verify_event_path(LONG_AGO_S, TP("trajectories", 0))
    assert not said
