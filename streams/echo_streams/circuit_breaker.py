"""Spares a function whose calls only hang or kill their process: one trial call in a while, and no others."""

from __future__ import annotations

from echo_bus.clock import Clock

# After so many calls in a row that hung or died, the function is called only every `_TRY_EVERY_S`.
_TRIPS = 8
_TRY_EVERY_S = 10.0


class NotCalled(Exception):
    """The function was not called: its last calls hung or killed their process."""


class CircuitBreaker:
    """Of one function. One event loop uses it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._num_ended = 0
        self._try_at_s = 0.0

    def require(self) -> None:
        """Raise NotCalled unless the function may be called now."""
        if self._num_ended < _TRIPS:
            return
        now_s = self._clock.monotonic_s()
        if now_s < self._try_at_s:
            raise NotCalled(
                f"Not called: its last {_TRIPS} calls hung or killed their process. It is tried again every {_TRY_EVERY_S:g} s."
            )
        self._try_at_s = now_s + _TRY_EVERY_S

    def ended(self) -> None:
        """Note a call that hung or died."""
        self._num_ended += 1
        self._try_at_s = self._clock.monotonic_s() + _TRY_EVERY_S

    def answered(self) -> None:
        """Note a call that ended by itself."""
        self._num_ended = 0
