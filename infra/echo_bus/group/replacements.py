"""Whether another process has the name of this static member.

The group makes a new member for each request to join under a static name (KIP-345). If a request takes longer than its timeout, the client
asks again and so replaces itself.
"""

from __future__ import annotations

from collections import deque

from echo_bus.clock import Clock

# Two processes under one name replace one another at every heartbeat, so this many replacements in a minute mean a second process. Fewer
# mean a slow broker, whose client asks again: an overloaded broker caused two within 40 s.
_MOST, _WITHIN_S = 5, 60.0


class Replacements:
    """The newest times at which this member was replaced."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=_MOST)

    def add(self) -> bool:
        """The member was replaced. Whether so often lately that another process has its name."""
        self._times_s.append(self._clock.monotonic_s())
        return len(self._times_s) == _MOST and self._times_s[-1] - self._times_s[0] < _WITHIN_S
