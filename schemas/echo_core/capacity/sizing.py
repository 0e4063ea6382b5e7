"""Sizes the pool of a running run: activates workers if the rate is short, and moves step by step to the cheapest choice. Pure.

    rate < target, `short_ticks` ticks in a row
        activate by rising c/mu until the target is reached
    without a worker that `choose_workers` leaves out the others reach target · (1 + margin), `surplus_ticks` ticks in a row
        release that worker; of several the dearest, by c/mu
    no worker can be released, but that choice costs less than the active workers by the margin, `surplus_ticks` ticks in a row
        activate its missing workers; the workers that they replace are then released, as above
    otherwise
        nothing

ECHO-2 §4.3 describes this without numbers; the numbers below are ours. Whatever workers come, go, slow down or change price:

- the rate is below the target no longer than `short_ticks` ticks, if all workers together reach it
- if nothing changes any more, the pool comes to rest. It then costs at most (1 + margin) · `choose_workers`, so at most 2 · (1 + margin) of
  the cheapest workers that reach target · (1 + margin), if all together reach that
- the pool does not flap: after a release it is above the target by half of the margin, so the worker is not activated again unless rates
  or target move by more than that; and each exchange makes the pool cheaper by the margin
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from echo_core.capacity.activation import Candidate, by_unit_price, choose_workers, reaches, total_price, total_rate, until_reached
from echo_schemas.errors import UserError

# A worker's rate in the choice is the mean of so many looks: one group may take ten times as long as another.
_MEAN_OVER = 100
_SAME_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingPolicy:
    """How long and how far the rate must be off target. Raises UserError for a policy that would flap or never act."""

    margin: float = 0.15
    """The surplus that must remain after a release, as a share of the target. The mean rate of a whole pool varies by less."""
    short_ticks: int = 2
    """One tick without a worker's heartbeat, or with new weights being loaded, is no shortage."""
    surplus_ticks: int = 5
    """Longer than for a shortage: a surplus costs some workers' money, a shortage the learner's."""

    def __post_init__(self) -> None:
        if self.margin < 0 or min(self.short_ticks, self.surplus_ticks) < 1:
            raise UserError("The margin of a sizing policy must not be negative, and its ticks must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """The orders of one tick. `activate` or `release` is empty. `replaces`: the dearer workers that the activated ones replace."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


class PoolSizer:
    """The rule, with its state: the active workers, and for how long the rate has been off target."""

    def __init__(self, policy: SizingPolicy, active: Iterable[str] = ()) -> None:
        self._policy = policy
        self._active = set(active)
        # Replaced workers, until they are released.
        self._leaving: set[str] = set()
        # By worker: its mean rate, the number of looks, and the worker with the mean rate.
        self._means: dict[str, tuple[float, int, Candidate]] = {}
        self._num_short = self._num_surplus = self._num_dear = 0

    @property
    def active(self) -> frozenset[str]:
        """The workers that shall work."""
        return frozenset(self._active)

    def admit(self, worker_ids: Iterable[str]) -> None:
        """Count workers as active that this sizer did not activate: newcomers, or workers active before it was made."""
        self._active.update(worker_ids)

    def tick(self, available: Iterable[Candidate], target: float) -> Resizing:
        """One look, at even intervals. `available`: all workers with heartbeats, active or not, with their rates; others become inactive.

        A worker that was just activated counts with its expected rate, so that no other is activated in its place.

        Target 2.0, active a and b of rate 1.2 each, c of rate 0.5 waits; b dies: 1.2 < 2.0 in the first tick, nothing happens;
        1.2 < 2.0 in the second: activate c (1.7, the target is not reached and nobody is left);
        b is back: 1.7 < 2.0 once more, then activate b: 2.9. Without c 2.4 ≥ 2.0 · 1.15, so c is released five ticks later.
        """
        known = by_unit_price(available)
        self._active &= {each.worker_id for each in known}
        active = [each for each in known if each.worker_id in self._active]
        rate = total_rate(active)
        is_short = not reaches(rate, target)
        # If all workers are active and none can be released, there is nothing to choose: saves time with ten thousand workers.
        least = rate - min((each.rate for each in active), default=0.0)
        has_choice = not is_short and (bool(self._leaving) or len(active) < len(known) or least >= target * (1 + self._policy.margin))
        spare, chosen = self._spare(active, self._usually(known), target) if has_choice else (None, [])
        is_dear = bool(chosen) and spare is None and total_price(chosen) * (1 + self._policy.margin) < total_price(active)
        self._num_short = self._num_short + 1 if is_short else 0
        self._num_surplus = self._num_surplus + 1 if spare is not None else 0
        self._num_dear = self._num_dear + 1 if is_dear else 0
        if self._num_short >= self._policy.short_ticks:
            return self._activate(active, known, target)
        if spare is not None and self._num_surplus >= self._policy.surplus_ticks:
            self._num_surplus = 0
            self._active.discard(spare.worker_id)
            return Resizing(release=(spare.worker_id,))
        if self._num_dear >= self._policy.surplus_ticks:
            return self._exchange(active, chosen)
        return Resizing()

    def _usually(self, known: list[Candidate]) -> list[Candidate]:
        """All workers with their mean rates: a choice by the rates of one look would prefer workers with a lucky one."""
        means, usual = self._means, []
        self._means = {}
        for each in known:
            mean, count, shown = means.get(each.worker_id, (each.rate, 0, each))
            count = min(count + 1, _MEAN_OVER)
            mean += (each.rate - mean) / count
            # Make few new objects at each look, also with ten thousand workers.
            if abs(shown.rate - mean) > _SAME_RATE * mean or shown.price_per_hour != each.price_per_hour:
                shown = replace(each, rate=mean)
            self._means[each.worker_id] = mean, count, shown
            usual.append(shown)
        return usual

    def _spare(self, active: list[Candidate], usual: list[Candidate], target: float) -> tuple[Candidate | None, list[Candidate]]:
        """The worker to release, and the cheapest choice; no choice is made while replaced workers leave."""
        self._leaving &= self._active
        if self._leaving:
            staying = {each.worker_id for each in active} - self._leaving
            spare = _dearest_beside(staying, active, target * (1 + self._policy.margin / 2))
            if spare is not None:
                return spare, []
            # The replacing workers are slower than expected.
            self._leaving.clear()
        goal = target * (1 + self._policy.margin)
        chosen = choose_workers(usual, goal)
        return _dearest_beside({each.worker_id for each in chosen}, active, goal), chosen

    def _exchange(self, active: list[Candidate], chosen: list[Candidate]) -> Resizing:
        """Target 2.0, margin 0.15; a makes 2.5 at 5.0 an hour; b and c wait and make 1.5 each at 1.0.

        b and c make 3.0 ≥ 2.3 for 2.0: they are activated, and a is leaving."""
        self._num_dear = 0
        missing = tuple(each.worker_id for each in chosen if each.worker_id not in self._active)
        self._leaving = self._active - {each.worker_id for each in chosen}
        self._active.update(missing)
        return Resizing(activate=missing, replaces=tuple(each.worker_id for each in active if each.worker_id in self._leaving))

    def _activate(self, active: list[Candidate], known: list[Candidate], target: float) -> Resizing:
        waiting = (each for each in known if each.worker_id not in self._active and each.rate > 0)
        chosen = until_reached(waiting, target, total_rate(active))
        self._active.update(each.worker_id for each in chosen)
        self._num_short = 0
        return Resizing(activate=tuple(each.worker_id for each in chosen))


def _dearest_beside(staying: set[str], active: list[Candidate], goal: float) -> Candidate | None:
    """The dearest, by c/mu, that does not stay and without which the others reach the goal.

    Goal 2.3; a, b, c make 1.0, 0.5 and 1.0 at rising c/mu: without c 1.5 < 2.3, without b 2.0 < 2.3, nobody;
    with d of 0.5, dearer than c: without d 2.5 ≥ 2.3, so d."""
    rate = total_rate(active)
    return next((each for each in reversed(active) if each.worker_id not in staying and rate - each.rate >= goal), None)
