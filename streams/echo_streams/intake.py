"""What to do with a trajectory, decided on its headers: nothing of its body is decoded for one that will not be scored."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from echo_core.group_share import is_chosen
from echo_core.staleness import staleness
from echo_schemas.headers import GROUP, RUN, VERSION, Header, number_of
from echo_schemas.records import Purpose, Trajectory, group_id_of

_ID = "ce_id"
# What a stale sample's rewards repeat. A longer one is for the body's checks.
_MOST_NAME_LENGTH = 512


class Passed(StrEnum):
    """Why a sound trajectory is passed over without a reward. Used as a metric label."""

    OTHER_RUN = "other_run"
    PROBE = "probe"
    SAMPLED_OUT = "sampled_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which sample a trajectory is, as its headers say, or its body (`of`)."""

    group_id: str
    seq: int
    purpose: Purpose
    attempt: str
    index: int

    @classmethod
    def of(cls, trajectory: Trajectory) -> Identity:
        """As its body says."""
        return cls(
            group_id=trajectory.group_id,
            seq=trajectory.seq,
            purpose=trajectory.purpose,
            attempt=trajectory.attempt,
            index=trajectory.index,
        )


@dataclass(frozen=True, slots=True)
class Stale:
    """Older than the budget: gets the outcome `stale` for every reward."""

    identity: Identity
    version: int


def identity_of(name: str, run_id: str) -> Identity | None:
    """`<run>/[<purpose>-]<seq>/<attempt>/<index>` in its parts; None for anything else, where the body decides."""
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
    """Looks at headers. `drop_stale` False scores every age, because the learner withholds or downweights instead.

    `share` of the groups are scored, always the same ones (`is_chosen`). What was written before `live_from_ms` (Unix) is scored at any
    age: an application that was told to begin there wants the past.
    """

    def __init__(self, run_id: str, *, budget: int, drop_stale: bool, share: float = 1.0, live_from_ms: int = 0) -> None:
        self._run_id = run_id
        self._budget = budget
        self._drop_stale = drop_stale
        self._share = share
        self._live_from_ms = live_from_ms

    def look(self, headers: Iterable[Header], learner_version: int | None, time_ms: int | None = None) -> Passed | Stale | None:
        """None: decode it and score it. Only training groups can be stale: an evaluation names the version it wants. `time_ms`: when the
        record was written; None: now.
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
        """The same for what its headers did not tell, but for its age: why it gets no reward; None: it may get one."""
        if trajectory.purpose is Purpose.PROBE:
            return Passed.PROBE
        return None if is_chosen(trajectory.group_id, self._share) else Passed.SAMPLED_OUT

    def is_stale(self, version: int, learner_version: int | None, time_ms: int | None = None) -> bool:
        """Whether a training sample whose oldest version is `version` is above the budget now, and would be dropped for it."""
        if time_ms is not None and time_ms < self._live_from_ms:
            return False
        return self._drop_stale and learner_version is not None and staleness(learner_version, version) > self._budget


_READ = frozenset({RUN, GROUP, VERSION, _ID})
