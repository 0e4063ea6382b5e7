"""Writes notices of rewards from another application than the file names, and of rewards that keep failing; names a failing one to the
learner once a whole step's samples have failed.

Threads: the intake's reader thread calls `counts` and `note`, the learner's thread `hopeless`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echo_bus.clock import Clock
from echo_runtime.notices import Notices
from echo_schemas.records import Reward, RewardOutcome, RewardTerm

# A writer can choose a name of any length.
_MOST_NAME = 64
_FAILURES = (RewardOutcome.FAILED, RewardOutcome.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingReward:
    """A reward that has failed `count` times in a row, for `seconds`; `error` is its last one."""

    name: str
    count: int
    seconds: float
    error: str

    def __str__(self) -> str:
        times = f"{self.count:,} times in a row, for {self.seconds:.0f} s" if self.count > 1 else "once"
        return f"The reward {self.name!r} has failed {times}: {self.error}"


class RewardWatch:
    """Counts failures since the last value, by the reward's name."""

    def __init__(
        self, *, samples_per_step: int, deadline_s: float, applications: Mapping[str, str], notices: Notices, clock: Clock
    ) -> None:  # fmt: skip
        """`deadline_s`: how long a group waits for a reward whose term has no deadline. `applications`: the application of each reward."""
        self._applications = applications
        self._samples_per_step = samples_per_step
        self._deadline_s = deadline_s
        self._notices = notices
        self._clock = clock
        self._lock = threading.Lock()
        self._failing: dict[str, tuple[int, float, str]] = {}

    def counts(self, reward: Reward) -> bool:
        """Whether it comes from the application that the file names for it, if it names one."""
        named = self._applications.get(reward.name)
        if named is None or named == reward.application:
            return True
        who = f"the application {reward.application[:_MOST_NAME]!r}" if reward.application else "an application without a name"
        self._notices.say(
            f"writer of {reward.name}",
            f"The reward {reward.name!r} comes from {who} and is not counted: [scoring.applications] names {named!r}.",
        )
        return False

    def note(self, reward: Reward) -> None:
        """Count a reward that was read."""
        if reward.outcome in _FAILURES:
            with self._lock:
                count, since_s, _ = self._failing.get(reward.name, (0, self._clock.monotonic_s(), ""))
                self._failing[reward.name] = (count + 1, since_s, reward.error or reward.outcome.value)
                said = str(self._of(reward.name))
            self._notices.say(_place(reward.name), said)
        elif reward.outcome is RewardOutcome.SCORED and reward.name in self._failing:
            with self._lock:
                self._failing.pop(reward.name, None)
            self._notices.clear(_place(reward.name))

    def hopeless(self, terms: Sequence[RewardTerm]) -> FailingReward | None:
        """An awaited reward that failed for as many samples as a step has, and for longer than a group waits for it, without one value."""
        for term in terms:
            with self._lock:
                found = self._of(term.name) if term.is_awaited and term.name in self._failing else None
            patience_s = self._deadline_s if term.deadline_s is None else term.deadline_s
            if found is not None and found.count >= self._samples_per_step and found.seconds > patience_s:
                return found
        return None

    def _of(self, name: str) -> FailingReward:
        count, since_s, error = self._failing[name]
        return FailingReward(name=name, count=count, seconds=self._clock.monotonic_s() - since_s, error=error)


def without(terms: Sequence[RewardTerm], names: frozenset[str]) -> tuple[RewardTerm, ...]:
    """The specification in which no group waits for the rewards `names`; a value that comes anyway counts."""
    return tuple(replace(term, required=False) if term.name in names else term for term in terms)


def _place(name: str) -> str:
    return f"reward {name}"
