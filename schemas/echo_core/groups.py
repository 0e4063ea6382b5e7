"""Input and output types of the assembler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from echo_schemas.records import Coordinates, DropReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward of one sample: a scored value, or the default (`defaulted`, offset None)."""

    value: float
    defaulted: bool = False
    offset: int | None = None
    code_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sample of a ready group. `scores`: by reward name, shadow rewards included."""

    where: Coordinates
    trajectory: Trajectory
    scores: Mapping[str, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A whole attempt with its required rewards. Members by index."""

    seq: int
    attempt: str
    members: tuple[Member, ...]

    @property
    def min_version(self) -> int:
        """Oldest version that generated any token of the group."""
        return min(member.trajectory.min_version for member in self.members)


class SeqState(StrEnum):
    """The state of a seq in the log. `whole`: one attempt has all its members; rewards may be missing."""

    MISSING = "missing"
    WHOLE = "whole"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class DropDecision:
    """A terminal state other than trained, of one record (`where`) or of a whole seq (`where` None). The learner writes it as a Drop."""

    seq: int
    why: DropReason
    where: Coordinates | None = None
    attempt: str | None = None
    version: int | None = None
    num_tokens: int = 0
    detail: str | None = None
    worker_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyLimits:
    """Bounds in number and time. Times run only while what the group waits for is read to its end."""

    max_open_groups: int
    """Groups without a whole attempt; over the limit the oldest is dropped. Whole groups are bounded by the caller, who stops reading."""
    max_open_bytes: int = 16 << 30
    """Limit of the memory of open groups. Reached only by attempts that are never whole, or by forged records."""
    max_early_rewards: int = 100_000
    """Rewards kept until their trajectory is read."""
    group_timeout_s: float = 600.0
    """From a group's first record to a whole attempt."""
    reward_timeout_s: float = 300.0
    """From a whole attempt to its required rewards, for terms without a deadline of their own."""
    longest_tick_s: float = 2.0
    """At most so much time counts between two ticks: a process that was stopped for an hour did not read the log in that hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyState:
    """The state in a checkpoint: enough to read again from `trajectory_lows` and `reward_lows` and to reach the same state. `settled`:
    records of open seqs that already have a terminal state; they lie at or above the lows and must not be counted again. `open`: the seqs
    under assembly, each with its lowest record in every partition that has any: shows which seqs a lost log has taken."""

    floor: int
    closed: frozenset[int]
    trajectory_lows: Mapping[int, int]
    trajectory_read_to: Mapping[int, int]
    reward_lows: Mapping[int, int]
    settled: frozenset[Coordinates]
    open: Mapping[int, tuple[Coordinates, ...]] = field(default_factory=dict)
