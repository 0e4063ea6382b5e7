"""What the assembler takes in and gives out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_schemas.records import Coordinates, DropReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One reward of one sample: a value that was given, or the default that stands in (`defaulted`, offset None)."""

    value: float
    defaulted: bool = False
    offset: int | None = None
    code_version: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One sample of a ready group. `scores` holds what is known of each reward name, shadow rewards included."""

    where: Coordinates
    trajectory: Trajectory
    scores: Mapping[str, Score]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    """A whole attempt whose required rewards are there. Members by index."""

    seq: int
    attempt: str
    members: tuple[Member, ...]

    @property
    def min_version(self) -> int:
        """Oldest version that generated any token of the group."""
        return min(member.trajectory.min_version for member in self.members)


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
    """Bounds in number and time. Times run only while the group's partitions are caught up."""

    max_open_groups: int
    max_open_bytes: int = 16 << 30
    """What open groups may hold. Only attempts that are never whole, or records that nobody should write, come to it."""
    max_early_rewards: int = 100_000
    """Rewards kept before their trajectory was read."""
    group_timeout_s: float = 600.0
    """From a group's first record to a whole attempt."""
    reward_timeout_s: float = 300.0
    """From a whole attempt to its required rewards, for terms without a deadline of their own."""
    longest_tick_s: float = 2.0
    """What passes between two ticks at most: a process that was stopped for an hour has not looked at the log for an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssemblyState:
    """What a checkpoint keeps: enough to read again from `trajectory_lows` and `reward_lows` and to end up in the same place.

    `settled`: records of seqs that are still open which already have a terminal state; they are at or above the lows and must stay silent.
    `open`: the seqs under assembly, each with its lowest record in every partition that has any: what a log that loses records takes away.
    """

    floor: int
    closed: frozenset[int]
    trajectory_lows: Mapping[int, int]
    trajectory_read_to: Mapping[int, int]
    reward_lows: Mapping[int, int]
    settled: frozenset[Coordinates]
    open: Mapping[int, tuple[Coordinates, ...]] = field(default_factory=dict)


@dataclass(slots=True)
class AssemblyCounters:
    """What was passed over and why; for metrics."""

    other_run: int = 0
    other_purpose: int = 0
    reread: int = 0
    late_rewards: int = 0
    repeated_rewards: int = 0
    unjudgeable_rewards: int = 0
    early_rewards_evicted: int = 0
