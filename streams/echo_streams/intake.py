"""Decides from a trajectory's headers whether it is scored, so that the bodies of others are not decoded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from echo_core.group_share import is_chosen
from echo_core.staleness import staleness
from echo_schemas.headers import GROUP, RUN, VERSION, Header, number_of
from echo_schemas.records import Purpose, Trajectory, group_id_of

_ID = "ce_id"
# The rewards of a stale sample repeat its name. A longer name is left to the checks of the body.
_MOST_NAME_LENGTH = 512


class Passed(StrEnum):
    """Why a valid trajectory gets no reward. Used as a metric label."""

    OTHER_RUN = "other_run"
    PROBE = "probe"
    SAMPLED_OUT = "sampled_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which sample a trajectory is, by its headers, or by its body (`of`)."""

    group_id: str
    seq: int
    purpose: Purpose
    attempt: str
    index: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Identity:
        """By its body."""
        return cls(
            group_id=trajectory.group_id,
            seq=trajectory.seq,
            purpose=trajectory.purpose,
            attempt=trajectory.attempt,
            index=trajectory.index,
        )


@dataclass(frozen=True, slots=True)
class Stale:
    """A sample above the budget: every reward gets the outcome `stale`."""

    identity: Identity
    version: int


def identity_of(name: str, run_id: str) -> Identity | None:
    """The parts of `<run>/[<purpose>-]<seq>/<attempt>/<index>`; None for any other name: then the body is decoded."""
    if len(name) > _MOST_NAME_LENGTH:
        return None
    try:
        group_id, attempt, index = name.rsplit("/", 2)
        run, _, member = group_id.partition("/")
        purpose, _, digits = member.rpartition("-")
        seq, place = number_of(digits), number_of(index)
        if run != run_id or not attempt or seq is None or place is None:
            return None
        found = Identity(group_id=group_id, seq=seq, purpose=Purpose(purpose or Purpose.TRAIN), attempt=attempt, index=place)
    except ValueError:
        return None
    return found if group_id == group_id_of(run_id, found.seq, found.purpose) else None


class Intake:
    """Checks headers. `drop_stale` False scores samples of any age, because the learner withholds or downweights them instead.

    `share` of the groups are scored, always the same ones (`is_chosen`). Records written before `live_from_ms` (Unix) are scored at any
    age, for an application that begins in the past.
    """

    def __init__(self, run_id: str, *, budget: int, drop_stale: bool, share: float = 1.0, live_from_ms: int = 0) -> None:
        self._run_id = run_id
        self._budget = budget
        self._drop_stale = drop_stale
        self._share = share
        self._live_from_ms = live_from_ms

    def look(self, headers: Iterable[Header], learner_version: int | None, time_ms: int | None = None) -> Passed | Stale | None:
        """None: decode it and score it. Only training groups can be stale: an evaluation wants its own version. `time_ms`: when the record
        was written; None: now.
        """
        named = {key: value.decode(errors="replace") for key, value in headers if key in _READ and value is not None}
        run = named.get(RUN)
        if run is not None and run != self._run_id:
            return Passed.OTHER_RUN
        identity = identity_of(named.get(_ID, ""), self._run_id)
        if identity is None or identity.group_id != named.get(GROUP):
            return None
        if identity.purpose is Purpose.PROBE:
            return Passed.PROBE
        if not is_chosen(identity.group_id, self._share):
            return Passed.SAMPLED_OUT
        version = number_of(named.get(VERSION))
        if identity.purpose is Purpose.TRAIN and version is not None and self.is_stale(version, learner_version, time_ms):
            return Stale(identity, version)
        return None

    def passed(self, trajectory: Trajectory) -> Passed | None:
        """As `look`, by the body and without the age: why the trajectory gets no reward; None: it may get one."""
        if trajectory.purpose is Purpose.PROBE:
            return Passed.PROBE
        return None if is_chosen(trajectory.group_id, self._share) else Passed.SAMPLED_OUT

    def is_stale(self, version: int, learner_version: int | None, time_ms: int | None = None) -> bool:
        """Whether a training sample whose oldest version is `version` is above the budget now, so that the learner would drop it."""
        if time_ms is not None and time_ms < self._live_from_ms:
            return False
        return self._drop_stale and learner_version is not None and staleness(learner_version, version) > self._budget


_READ = frozenset({RUN, GROUP, VERSION, _ID})
