"""The reward of one trajectory, and the drop of a trajectory or seq that will never be trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records.base import Coordinates, Record, require_name, require_not_negative


class RewardOutcome(StrEnum):
    """The outcome of a reward function. Only `scored` has a value."""

    SCORED = "scored"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    STALE = "stale"


class DropReason(StrEnum):
    """Why a trajectory or a whole seq will never be trained."""

    STALE = "stale"
    NOT_THIS_PAST = "not_this_past"
    DUPLICATE = "duplicate"
    OTHER_ATTEMPT = "other_attempt"
    MALFORMED = "malformed"
    INCOMPLETE = "incomplete"
    UNREWARDED = "unrewarded"
    EXPIRED = "expired"
    OVERSIZED = "oversized"
    EVICTED = "evicted"
    CANCELLED = "cancelled"
    FAILED = "failed"
    WRONG_VERSION = "wrong_version"
    MODE_SWITCH = "mode_switch"
    LOST = "lost"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward(Record):
    """One value for one trajectory *record*: `of` names its partition and offset. `application`: the name that the scorer gives itself."""

    SCHEMA: ClassVar[str] = "reward"
    REPEATED: ClassVar[tuple[tuple[str, str], ...]] = (("run_id", "attempt"), ("name", "application"))

    run_id: str
    group_id: str
    seq: int
    attempt: str
    index: int
    of: Coordinates
    name: str
    code_version: str
    application: str = ""
    outcome: RewardOutcome
    value: float | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0
    time_ms: int

    def validate(self) -> None:
        if self.of.partition < 0 or self.of.offset < 0 or self.seq < 0 or self.index < 0:
            raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, "A reward's coordinates, seq and index must not be negative.")
        require_name("attempt", self.attempt)
        require_name("name", self.name)
        if (self.outcome == RewardOutcome.SCORED) != (self.value is not None):
            raise InvalidRecord(
                InvalidReason.INCONSISTENT, f"Outcome {self.outcome} with value {self.value}: a value belongs to `scored`, and only there."
            )
        if self.value is not None and not math.isfinite(self.value):
            raise InvalidRecord(InvalidReason.NOT_FINITE, f"Reward {self.name!r} is {self.value}.")
        if self.components and not all(map(math.isfinite, self.components.values())):
            raise InvalidRecord(InvalidReason.NOT_FINITE, f"A component of reward {self.name!r} is a NaN or an infinity.")


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRewards(Record):
    """Trajectories at `where` for which the learner lacks at least one of `rewards`: reward applications read them again. An empty record
    cancels an earlier one."""

    SCHEMA: ClassVar[str] = "missing_rewards"

    run_id: str
    session: str
    rewards: tuple[str, ...]
    where: tuple[Coordinates, ...]
    time_ms: int

    def validate(self) -> None:
        if any(where.partition < 0 or where.offset < 0 for where in self.where):
            raise InvalidRecord(InvalidReason.NEGATIVE_NUMBER, "Coordinates must not be negative.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop(Record):
    """A terminal state other than `trained`: of one trajectory record (`what` given) or of a whole seq (`what` None). `worker_id`: the
    worker that sampled it, if that is the reason."""

    SCHEMA: ClassVar[str] = "drop"

    run_id: str
    group_id: str
    seq: int
    what: Coordinates | None = None
    attempt: str | None = None
    why: DropReason
    version: int | None = None
    learner_version: int
    num_tokens: int = 0
    detail: str | None = None
    worker_id: str | None = None
    time_ms: int

    def validate(self) -> None:
        require_not_negative(seq=self.seq, version=self.version, learner_version=self.learner_version, num_tokens=self.num_tokens)
        if self.what is not None:
            require_not_negative(partition=self.what.partition, offset=self.what.offset)
