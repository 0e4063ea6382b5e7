"""The intake's back-pressure: while enough is read, partitions are paused and the log keeps the rest.

Above `max_whole` whole groups, the partitions of `trajectories` with more than their share of them are paused; with a batch of them and
more than `max_bytes` read, all of its partitions. Whole groups wait for rewards or for the learner, so `rewards` is read on while one of
them lacks any; otherwise it is paused too when many rewards of unread trajectories are kept.
"""

from __future__ import annotations

import sys

from echo_bus.reading.reader import LogReader, Place
from echo_core.assembly import GroupAssembler
from echo_core.policy import StalenessPolicy
from echo_schemas.topics import REWARDS, TRAJECTORIES

# `rewards` may be paused from this share of the assembler's limit on rewards of unread trajectories; above the limit they are forgotten.
_MANY_EARLY = 0.5


class BackPressure:
    """The caller guards the assembler; `pause` alone needs no lock, and is called on the reader's thread."""

    def __init__(self, reader: LogReader, assembler: GroupAssembler, policy: StalenessPolicy, max_bytes: int) -> None:
        self._reader = reader
        self._assembler = assembler
        self._groups_per_step = policy.groups_per_step
        # Twice what the budget can absorb: more would only grow old here.
        self._max_whole = 2 * (policy.budget + 2) * policy.groups_per_step
        self._max_bytes = max_bytes
        self._paused: frozenset[Place] = frozenset()

    @property
    def is_full(self) -> bool:
        """Whether enough is read, so that the rest can wait in the log; a batch of whole groups is read in any case."""
        return self._holds(self._max_whole)

    @property
    def lacks_rewards(self) -> bool:
        """Whether a whole group waits for a reward."""
        return self._assembler.num_ready < self._assembler.num_whole

    def end(self) -> None:
        """Pause nothing from now on."""
        self._max_whole = self._max_bytes = sys.maxsize

    def to_pause(self) -> frozenset[Place]:
        """The partitions that are to be paused."""
        if not self._holds(self._max_whole + 1):
            return frozenset()
        rewards, ahead = ({place for place in self._reader.places if place[0] == topic.name} for topic in (REWARDS, TRAJECTORIES))
        if self._assembler.open_bytes <= self._max_bytes:
            # A partition whose rewards are far behind must not take the room of the others: a group lies in one partition.
            whole_in = self._assembler.whole_in
            ahead = {place for place in ahead if whole_in[place[1]] * len(ahead) > self._max_whole}
        too_many_early = self._assembler.early_share > _MANY_EARLY and not self.lacks_rewards
        return frozenset(ahead | rewards if too_many_early else ahead)

    def pause(self, places: frozenset[Place]) -> None:
        """Pause exactly `places`."""
        if places == self._paused:
            return
        self._reader.pause(places - self._paused)
        self._reader.resume(self._paused - places)
        self._paused = places

    def _holds(self, max_whole: int) -> bool:
        num_whole = self._assembler.num_whole
        has_batch = num_whole >= self._groups_per_step
        return num_whole >= max_whole or (has_batch and self._assembler.open_bytes > self._max_bytes)
