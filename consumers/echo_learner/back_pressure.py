"""The intake's back-pressure: while enough is read, partitions are paused and the log keeps the rest.

Above `max_whole` whole groups, the partitions of `trajectories` with more than their share of them are paused; with a batch of them and
more than `max_bytes` read, all of its partitions. When many rewards of unread trajectories are kept, the partitions of `rewards` with more
than their share of them are paused too; but one is read on while a whole group of it lacks a reward, which may lie there. Rewards that then
have no room are read again as soon as their trajectories are read.
"""

from __future__ import annotations

from collections.abc import Mapping

from echo_bus.reading.reader import LogReader, Place
from echo_core.assembly import GroupAssembler
from echo_core.policy import StalenessPolicy
from echo_schemas.records import Coordinates
from echo_schemas.topics import REWARDS, TRAJECTORIES

# `rewards` may be paused from this share of the assembler's limit on rewards of unread trajectories; above the limit they have no room. It
# stays paused down to a smaller share, because the client throws away what it has fetched of a partition that is paused.
_MANY_EARLY, _FEW_EARLY = 0.5, 0.25


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
        self._is_over = False
        # By partition of `rewards` that is read again: where that ends, and, until a record has come, where it begins.
        self._again: dict[int, int] = {}
        self._sent_back: dict[int, int] = {}

    @property
    def is_full(self) -> bool:
        """Whether enough is read, so that the rest can wait in the log; a batch of whole groups is read in any case."""
        return not self._is_over and self._holds(self._max_whole)

    @property
    def lacks_rewards(self) -> bool:
        """Whether a whole group waits for a reward."""
        return self._assembler.num_ready < self._assembler.num_whole

    def end(self) -> None:
        """Pause no partition of `trajectories` from now on."""
        self._is_over = True

    def to_pause(self) -> frozenset[Place]:
        """The partitions that are to be paused. A group and its rewards lie in one partition, so each of them is judged by itself: one that
        is behind must not take the room of the others."""
        return frozenset(self._full() | self._early())

    def _full(self) -> set[Place]:
        """The partitions of `trajectories` with more than their share of the groups that may be held."""
        places = {place for place in self._reader.places if place[0] == TRAJECTORIES.name}
        if self._is_over or not self._holds(self._max_whole + 1):
            return set()
        if self._assembler.open_bytes > self._max_bytes:
            return places
        whole_in = self._assembler.whole_in
        return {place for place in places if whole_in[place[1]] * len(places) > self._max_whole}

    def _early(self) -> set[Place]:
        """The partitions of `rewards` with more than their share of the rewards of unread trajectories."""
        shares = self._assembler.early_shares()
        paused = {place for place in self._paused if place[0] == REWARDS.name}
        are_many = sum(shares.values()) > _MANY_EARLY
        if not paused and not are_many:
            return set()
        places = {place for place in self._reader.places if place[0] == REWARDS.name}
        # The client forgets that it was sent back if it is paused before a record has come.
        kept = self._assembler.lacking_in | self._sent_back.keys()
        much = {place for place in places if place[1] not in kept and shares.get(place[1], 0.0) * len(places) > _FEW_EARLY}
        return {place for place in much if place in paused or (are_many and shares[place[1]] * len(places) > _MANY_EARLY)}

    def to_read_again(self) -> dict[int, int]:
        """Where to `go_back` to now, by partition of `rewards`: some had no room when they were read, and are needed."""
        positions = {partition: offset for (topic, partition), offset in self._reader.positions.items() if topic == REWARDS.name}
        self._again = {partition: end for partition, end in self._again.items() if positions[partition] < end}
        self._sent_back = {partition: begin for partition, begin in self._sent_back.items() if positions[partition] <= begin}
        wanted = self._assembler.take_forgotten()
        self._again = {partition: positions[partition] for partition in wanted} | self._again
        self._sent_back |= wanted
        return wanted

    def is_again(self, at: Coordinates) -> bool:
        """Whether the reward at `at` was read before by this process."""
        return at.offset < self._again.get(at.partition, 0)

    def go_back(self, wanted: Mapping[int, int]) -> None:
        """Read partitions of `rewards` again, from these offsets. Raises TransportError."""
        begins = self._reader.go_back({(REWARDS.name, partition): offset for partition, offset in wanted.items()}) if wanted else {}
        self._sent_back |= {partition: offset for (_, partition), offset in begins.items()}

    def is_ahead(self, place: Place) -> bool:
        """Whether `place` is a paused partition of `rewards`: many of unread trajectories were read of it, and no whole group lacks any."""
        return place in self._paused and place[0] == REWARDS.name and place[1] not in self._assembler.lacking_in

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
