"""The bottleneck of a run, computed from the seconds that each place of the pipeline was busy, empty or blocked.

A pipeline is as fast as its slowest place. That place is busy nearly all the time; the places after it are empty, the places before it
blocked. So the answer is the busiest place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from echo_core.capacity.costs import grown


class Place(StrEnum):
    """The places of the pipeline, in the order in which a trajectory passes them; the last two bring back the weights."""

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
    """The use of a place's time."""

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
        """Busy share of the observed time; 0 if none was observed."""
        return self.busy_s / self.observed_s if self.observed_s > 0 else 0.0

    def __add__(self, other: PlaceUse) -> PlaceUse:
        """Of two processes together."""
        return PlaceUse(busy_s=self.busy_s + other.busy_s, empty_s=self.empty_s + other.empty_s, blocked_s=self.blocked_s + other.blocked_s)

    def since(self, earlier: PlaceUse) -> PlaceUse:
        """The use since `earlier`; a counter that was reset counts from 0."""
        return PlaceUse(
            busy_s=grown(self.busy_s, earlier.busy_s),
            empty_s=grown(self.empty_s, earlier.empty_s),
            blocked_s=grown(self.blocked_s, earlier.blocked_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """The answer. `place` is None while too little was observed. `learner_waits`: share of the learner's time without a batch."""

    place: Place | None
    busy_share: float
    learner_waits: float


# Places that work; a queue only stores.
_WORKING = tuple(place for place in Place if place is not Place.QUEUE)
_LEAST_OBSERVED_S = 1.0


def find_bottleneck(places: Mapping[Place, PlaceUse]) -> Bottleneck:
    """The working place with the largest busy share; among equals the earlier one. None while the learner was observed too briefly."""
    seen = [place for place in _WORKING if place in places and places[place].observed_s >= _LEAST_OBSERVED_S]
    train = places.get(Place.TRAIN, PlaceUse())
    waits = train.empty_s / train.observed_s if train.observed_s > 0 else 0.0
    if Place.TRAIN not in seen:
        return Bottleneck(place=None, busy_share=0.0, learner_waits=waits)
    slowest = max(seen, key=lambda place: places[place].busy_share)
    return Bottleneck(place=slowest, busy_share=places[slowest].busy_share, learner_waits=waits)


def between(earlier: Mapping[Place, PlaceUse], later: Mapping[Place, PlaceUse]) -> dict[Place, PlaceUse]:
    """The use of each place between two readings of its counters."""
    return {place: use.since(earlier.get(place, PlaceUse())) for place, use in later.items()}


_NAMES = {
    Place.REQUEST: "requesting prompts",
    Place.GENERATION: "generation",
    Place.PUBLISH: "publishing trajectories",
    Place.REWARD: "scoring",
    Place.ASSEMBLY: "assembling groups",
    Place.BATCH: "forming batches",
    Place.TRAIN: "training",
    Place.PUBLISH_WEIGHTS: "publishing weights",
    Place.INSTALL: "installing weights",
}
# Every pipeline of unequal stages waits for less than this share.
_WORTH_SAYING = 0.02


def describe(bottleneck: Bottleneck) -> str:
    """The answer as one sentence."""
    if bottleneck.place is None:
        return "Too little was seen to say what the run waits for."
    slowest = f"the bottleneck is {_NAMES[bottleneck.place]}, busy {bottleneck.busy_share:.0%}"
    if bottleneck.learner_waits < _WORTH_SAYING:
        return f"The learner never waits; {slowest}."
    return f"The learner waits for rollouts {bottleneck.learner_waits:.0%} of its time; {slowest}."
