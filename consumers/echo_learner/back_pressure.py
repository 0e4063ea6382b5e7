"""The intake's back-pressure: while enough is read, partitions are paused and the log keeps the rest.

Above `max_whole` whole groups, the partitions of `trajectories` with more than their share of them are paused; with a batch of them and
more than `max_bytes` read, all of its partitions. When many rewards of unread trajectories are kept, the partitions of `rewards` with more
than their share of them are paused too; but one is read on while a whole group of it lacks a reward, which may lie there. Rewards that then
have no room are read again as soon as their trajectories are read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from echo_bus.reading.reader import LogReader, Place
from echo_core.assembly import GroupAssembler
from echo_core.policy import StalenessPolicy
from echo_schemas.records import Coordinates
from echo_schemas.topics import REWARDS, TRAJECTORIES

# `rewards` may be paused from this share of the assembler's limit on rewards of unread trajectories; above the limit they have no room.
_MANY_EARLY = 0.5


class BackPressure:
    """The caller guards the assembler; `pause` and `go_back` need no lock, and are called on the reader's thread."""

    def __init__(self, reader: LogReader, assembler: GroupAssembler, policy: StalenessPolicy, max_bytes: int) -> None:
        self._reader = reader
        self._assembler = assembler
        self._groups_per_step = policy.groups_per_step
        # Twice what the budget can absorb: more would only grow old here.
        self._max_whole = 2 * (policy.budget + 2) * policy.groups_per_step
        self._max_bytes = max_bytes
        self._paused: frozenset[Place] = frozenset()
        # By partition of `rewards` that is read again, where that ends.
        self._again: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether enough is read, so that the rest can wait in the log; a batch of whole groups is read in any case."""
        return self._holds(self._max_whole)

    @property
    def lacks_rewards(self) -> bool:
        """Whether a whole group waits for a reward."""
        return bool(self._assembler.lacking_in)

    def end(self) -> None:
        """Pause nothing from now on."""
        self._max_whole = self._max_bytes = sys.maxsize

    def to_pause(self) -> frozenset[Place]:
        """The partitions that are to be paused."""
        if not self._holds(self._max_whole + 1):
            return frozenset()
        rewards, ahead = ({place for place in self._reader.places if place[0] == topic.name} for topic in (REWARDS, TRAJECTORIES))
        # A group and its rewards lie in one partition, so a partition that is behind must not take the room of the others.
        if self._assembler.open_bytes <= self._max_bytes:
            whole_in = self._assembler.whole_in
            ahead = {place for place in ahead if whole_in[place[1]] * len(ahead) > self._max_whole}
        shares = self._assembler.early_shares()
        if sum(shares.values()) > _MANY_EARLY:
            lacking = self._assembler.lacking_in | self._again.keys()
            much = {partition for partition, share in shares.items() if share * len(rewards) > _MANY_EARLY}
            ahead |= {place for place in rewards if place[1] in much - lacking}
        return frozenset(ahead)

    def to_read_again(self) -> dict[int, int]:
        """Where to `go_back` to now, by partition of `rewards`: some had no room when they were read, and are needed."""
        positions = self._reader.positions
        self._again = {partition: end for partition, end in self._again.items() if positions[REWARDS.name, partition] < end}
        wanted = self._assembler.take_forgotten()
        for partition in wanted:
            self._again.setdefault(partition, positions[REWARDS.name, partition])
        return wanted

    def is_again(self, at: Coordinates) -> bool:
        """Whether the reward at `at` was read before by this process."""
        return at.offset < self._again.get(at.partition, 0)

    def go_back(self, wanted: Mapping[int, int]) -> None:
        """Read partitions of `rewards` again, from these offsets. Raises TransportError."""
        for partition, offset in wanted.items():
            self._reader.go_back((REWARDS.name, partition), offset)

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
