"""Consumer groups: which member owns which partition. A partition never has two owners.

A member learns of a change at its next poll. Cooperative members give up only the partitions that move; eager members first give up all of
them. A new owner gets a partition only when the old owner has given it up or was expelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Place = tuple[str, int]


@dataclass(eq=False, slots=True)
class Member:
    topics: list[str]
    cooperative: bool
    owned: set[Place] = field(default_factory=set)
    generation: int = -1
    expelled: bool = False


class Group:
    """Members, their target assignment, and the committed offsets, which outlive the members."""

    def __init__(self, partitions_of: Callable[[list[str]], Sequence[Place]]) -> None:
        """`partitions_of`: topics → all their partitions, as they are now."""
        self._partitions_of = partitions_of
        self.members: list[Member] = []
        self.generation = 0
        self.committed: dict[Place, tuple[int, str]] = {}
        self._target: dict[int, set[Place]] = {}

    def join(self, member: Member) -> None:
        self.members.append(member)
        self.rebalance()

    def leave(self, member: Member) -> None:
        """Remove the member and free its partitions."""
        if member in self.members:
            self.members.remove(member)
            member.owned.clear()
            self.rebalance()

    def expel(self, member: Member) -> None:
        """The session timed out: other members get its partitions at once, and it learns of this at its next poll."""
        member.expelled = True
        if member in self.members:
            self.members.remove(member)
        self.rebalance()

    def rebalance(self) -> None:
        """Compute the target assignment: as even as possible, with as few moves as possible."""
        self.generation += 1
        wanted = {id(member): set[Place]() for member in self.members}
        free = []
        for place in self._partitions_of(sorted({topic for member in self.members for topic in member.topics})):
            owner = next((member for member in self.members if place in member.owned), None)
            if owner is not None:
                wanted[id(owner)].add(place)
            else:
                free.append(place)
        for place in free:
            able = [member for member in self.members if place[0] in member.topics]
            if able:
                wanted[id(min(able, key=lambda member: len(wanted[id(member)])))].add(place)
        self._even_out(wanted)
        self._target = wanted

    def to_revoke(self, member: Member) -> set[Place]:
        """The partitions that `member` must give up now."""
        if member.expelled:
            return set(member.owned)
        if member.cooperative:
            return member.owned - self._target[id(member)]
        return set(member.owned) if member.generation != self.generation else set()

    def to_assign(self, member: Member) -> set[Place]:
        """The partitions that `member` may take now: its target, without those that others still hold."""
        held = {place for other in self.members if other is not member for place in other.owned}
        if not member.cooperative and any(other.owned and other.generation != self.generation for other in self.members):
            # Eager: no member takes partitions before all members have given theirs up.
            return set()
        return self._target[id(member)] - member.owned - held

    def _even_out(self, wanted: dict[int, set[Place]]) -> None:
        while len(self.members) > 1:
            most = max(self.members, key=lambda member: len(wanted[id(member)]))
            least = min(self.members, key=lambda member: len(wanted[id(member)]))
            movable = sorted(place for place in wanted[id(most)] if place[0] in least.topics)
            if len(wanted[id(most)]) - len(wanted[id(least)]) < 2 or not movable:
                return
            wanted[id(most)].remove(movable[-1])
            wanted[id(least)].add(movable[-1])
