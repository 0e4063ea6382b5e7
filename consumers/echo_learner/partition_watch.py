"""Notices that somebody adds partitions to `trajectories` while the learner reads: a reader keeps the partitions that it began with."""

from __future__ import annotations

from echo_bus.client.kafka_errors import grown
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock
from echo_bus.errors import TransportError
from echo_schemas.topics import TRAJECTORIES

_LOOK_EVERY_S = 20.0
# A cluster that does not answer at once is asked again at the next look.
_ASK_S = 1.0


class PartitionWatch:
    """Used from the learner's thread."""

    def __init__(self, publisher: Publisher, num_read: int, clock: Clock) -> None:
        """`publisher`: asks the cluster. `num_read`: the partitions of `trajectories` that the learner reads."""
        self._publisher = publisher
        self._num_read = num_read
        self._clock = clock
        self._look_at_s = clock.monotonic_s() + _LOOK_EVERY_S

    def check(self) -> None:
        """Every `_LOOK_EVERY_S`: raise UserError if the topic has more partitions than are read."""
        now_s = self._clock.monotonic_s()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_EVERY_S
        try:
            found = self._publisher.num_partitions(TRAJECTORIES, _ASK_S)
        except TransportError:
            return
        if found > self._num_read:
            raise grown(TRAJECTORIES.name, self._num_read)
