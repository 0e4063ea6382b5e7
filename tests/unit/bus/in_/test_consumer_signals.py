"""The first signal drains, the second ends the process, and afterwards everything is as before."""

from __future__ import annotations

import signal

from echo_bus.consumer_signals import drain_on_signals


def test_the_first_signal_drains_and_the_second_exits() -> None:
    stops: list[str] = []
    exits: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with drain_on_signals(lambda: stops.append("stop"), exit_now=exits.append):
        signal.raise_signal(signal.SIGTERM)
        assert (stops, exits) == (["stop"], [])
        signal.raise_signal(signal.SIGINT)
        assert exits == [128 + signal.SIGINT]
    assert signal.getsignal(signal.SIGTERM) is before
