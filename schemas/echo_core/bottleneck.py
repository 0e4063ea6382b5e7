"""What a run waits for: one answer, computed from the seconds that each place of the pipeline was busy, empty or blocked.

A pipeline moves at the pace of its slowest place. That place is busy nearly all the time, the places behind it are empty, the places before
it blocked. So the answer is the busiest place, and it is trusted only as far as it stands out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Place(StrEnum):
    """The places of the pipeline, in the order a trajectory passes them; the last two are the way back of the weights."""

    REQUEST = "request"
    GENERATION = "generation"
    PUBLISH = "publish"
    REWARD = "reward"
    ASSEMBLY = "assembly"
    QUEUE = "queue"
    BATCH = "batch"
    TRAIN = "train"
    PUBLISH_WEIGHTS = "publish_weights"
    INSTALL = "install"


class Use(StrEnum):
    """What a place did with its time."""

    BUSY = "busy"
    EMPTY = "empty"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceUse:
    """Seconds of one place, summed over the processes that share it."""

    busy_s: float = 0.0
    empty_s: float = 0.0
    blocked_s: float = 0.0

    @property
    def observed_s(self) -> float:
        """All three."""
        return self.busy_s + self.empty_s + self.blocked_s

    @property
    def busy_share(self) -> float:
        """Of the time observed; 0 if none was."""
        return self.busy_s / self.observed_s if self.observed_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The answer. `place` is None while too little was seen; `learner_waits` is the share of the learner's time without a batch."""

    place: Place | None
    busy_share: float
    learner_waits: float


# Places that work; a queue only holds.
_WORKING = tuple(place for place in Place if place is not Place.QUEUE)
_LEAST_OBSERVED_S = 1.0


def find_bottleneck(places: Mapping[Place, PlaceUse]) -> Bottleneck:
    """The working place with the largest busy share; among equals the earlier one."""
    seen = [place for place in _WORKING if place in places and places[place].observed_s >= _LEAST_OBSERVED_S]
    train = places.get(Place.TRAIN, PlaceUse())
    waits = train.empty_s / train.observed_s if train.observed_s > 0 else 0.0
    if not seen:
        return Bottleneck(place=None, busy_share=0.0, learner_waits=waits)
    slowest = max(seen, key=lambda place: places[place].busy_share)
    return Bottleneck(place=slowest, busy_share=places[slowest].busy_share, learner_waits=waits)
