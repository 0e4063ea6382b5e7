"""A selection of trajectories: one range of a run's past, and filters. Pure.

    Selection(range=Versions(100, 140), worker="w-3", fates={Fate.DROPPED})

Both ends of a range are included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from echo_schemas.records import Purpose


class Fate(StrEnum):
    """The fate of a trajectory record."""

    TRAINED = "trained"
    DROPPED = "dropped"
    DEAD = "dead"
    """The learner could not read it, or no request asked for it: the dead letters hold a copy."""
    EVALUATED = "evaluated"
    PROBED = "probed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Everything:
    """All records of the run that the log holds."""


@dataclass(frozen=True, slots=True)
class Offsets:
    """Offsets by partition of `trajectories`: partition → (first, last)."""

    ranges: Mapping[int, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Times:
    """Records written from `since_ms` to `until_ms`, by the records' own timestamps (Unix, ms); None: open at that side."""

    since_ms: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Versions:
    """Trajectories with a token that was generated under one of these versions."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Steps:
    """Trajectories that the steps which made these versions trained."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Groups:
    """All trajectories of some groups, of every attempt."""

    group_ids: frozenset[str]


Where = Everything | Offsets | Times | Versions | Steps | Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A range and filters; an empty filter lets everything through. `sample`: the index in the group."""

    range: Where = Everything()
    worker: str = ""
    task: str = ""
    purposes: frozenset[Purpose] = frozenset()
    fates: frozenset[Fate] = frozenset()
    sample: int | None = None

    @property
    def wants_unreadable(self) -> bool:
        """Whether it may contain an unreadable record, of which only place and fate are known."""
        return not (self.worker or self.task or self.purposes or self.sample is not None) and not isinstance(self.range, Versions)
