"""The pool while a run goes on: short for long, activate the cheapest; too dear for longer, step by step to the cheapest choice. Pure.

    rate < target, `short_ticks` ticks in a row
        activate by rising c/mu until the target is reached
    the others reach target · (1 + margin) without somebody whom `choose_workers` leaves out there, `surplus_ticks` ticks in a row
        release it; of several the dearest, by c/mu
    nobody can be spared, but that choice costs less by the margin than who is active, `surplus_ticks` ticks in a row
        activate who is missing of it; whose place they take is then released, as above
    anything between
        nothing

ECHO-2 §4.3 says that it is so, and gives no numbers; those below are ours. What holds, whoever comes, goes, slows down or changes price:

- below the target no longer than `short_ticks` ticks, where all together reach it
- where nothing changes any more, it comes to rest, and costs at most (1 + margin) · `choose_workers` then, so at most 2 · (1 + margin) of
  the cheapest that reach target · (1 + margin), where all together reach that
- it does not flap: a release leaves the pool above the target by half of the margin, so nobody is called back for want of it unless rates
  or target move by more than that, and each exchange makes the pool cheaper by the margin
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from echo_core.capacity.activation import Candidate, by_unit_price, choose_workers, reaches, total_price, total_rate
from echo_schemas.errors import UserError

# Looks whose mean a worker's rate is in the choice: one group may take ten times as long as another.
_MEAN_OVER = 100
_SAME_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class SizingPolicy:
    """How long and how far the rate must be off. Raises UserError for one that would flap or never act."""

    margin: float = 0.15
    """What must be left above the target after a release, as a share of it. The mean rate of a whole pool varies by less."""
    short_ticks: int = 2
    """One tick in which a worker is not heard, or loads new weights, is no shortage."""
    surplus_ticks: int = 5
    """Longer than a shortage: what is too much costs money, what is too little costs the learner's money."""

    def __post_init__(self) -> None:
        if self.margin < 0 or min(self.short_ticks, self.surplus_ticks) < 1:
            raise UserError("The margin of a sizing policy must not be negative, and its ticks must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """What one tick asks for. `activate` or `release` is empty. `replaces`: whose place the activated take, for less money."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


class PoolSizer:
    """The state of the rule: who is active, and for how long the rate has been off."""

    def __init__(self, policy: SizingPolicy, active: Iterable[str] = ()) -> None:
        self._policy = policy
        self._active = set(active)
        # Whose place others have taken, until they are released.
        self._leaving: set[str] = set()
        # By worker, its mean rate, over how many looks, and the worker with it.
        self._means: dict[str, tuple[float, int, Candidate]] = {}
        self._num_short = self._num_surplus = self._num_dear = 0

    @property
    def active(self) -> frozenset[str]:
        """Who shall work."""
        return frozenset(self._active)

    def admit(self, worker_ids: Iterable[str]) -> None:
        """These take part without having been activated: newcomers, or who was active before this sizer was made."""
        self._active.update(worker_ids)

    def tick(self, available: Iterable[Candidate], target: float) -> Resizing:
        """One look, at even intervals. `available`: everybody that answers, active or not, with its rate; others leave the active set.

        Somebody who was just activated counts with the rate it is expected to have, so that nobody is activated in its place.

        Target 2.0, active a and b of rate 1.2 each, c of rate 0.5 waits; b dies: 1.2 < 2.0 in the first tick, nothing happens;
        1.2 < 2.0 in the second: activate c (1.7, the target is not reached and nobody is left);
        b is back: 1.7 < 2.0 once more, then activate b: 2.9. Without c 2.4 ≥ 2.0 · 1.15, so c is released five ticks later.
        """
        known = by_unit_price(available)
        self._active &= {each.worker_id for each in known}
        active = [each for each in known if each.worker_id in self._active]
        rate = total_rate(active)
        is_short = not reaches(rate, target)
        # Where everybody works and nobody can be spared there is nothing to choose, which is worth knowing of ten thousand.
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
        """Everybody with its mean rate: a choice by the rates of one look would take whoever is lucky in it."""
        means, usual = self._means, []
        self._means = {}
        for each in known:
            mean, count, shown = means.get(each.worker_id, (each.rate, 0, each))
            count = min(count + 1, _MEAN_OVER)
            mean += (each.rate - mean) / count
            # Of ten thousand workers few are made anew at each look.
            if abs(shown.rate - mean) > _SAME_RATE * mean or shown.price_per_hour != each.price_per_hour:
                shown = replace(each, rate=mean)
            self._means[each.worker_id] = mean, count, shown
            usual.append(shown)
        return usual

    def _spare(self, active: list[Candidate], usual: list[Candidate], target: float) -> tuple[Candidate | None, list[Candidate]]:
        """Who can be spared, and the cheapest choice; nobody is chosen while those leave whose place others have taken."""
        self._leaving &= self._active
        if self._leaving:
            staying = {each.worker_id for each in active} - self._leaving
            spare = _dearest_beside(staying, active, target * (1 + self._policy.margin / 2))
            if spare is not None:
                return spare, []
            # Those who have come make less than was expected.
            self._leaving.clear()
        goal = target * (1 + self._policy.margin)
        chosen = choose_workers(usual, goal)
        return _dearest_beside({each.worker_id for each in chosen}, active, goal), chosen

    def _exchange(self, active: list[Candidate], chosen: list[Candidate]) -> Resizing:
        """Target 2.0, margin 0.15; a makes 2.5 at 5.0 an hour; b and c wait and make 1.5 each at 1.0.

        b and c make 3.0 ≥ 2.3 for 2.0: they are activated, and a is leaving.
        """
        self._num_dear = 0
        missing = tuple(each.worker_id for each in chosen if each.worker_id not in self._active)
        self._leaving = self._active - {each.worker_id for each in chosen}
        self._active.update(missing)
        return Resizing(activate=missing, replaces=tuple(each.worker_id for each in active if each.worker_id in self._leaving))

    def _activate(self, active: list[Candidate], known: list[Candidate], target: float) -> Resizing:
        chosen: list[Candidate] = []
        rate = total_rate(active)
        for each in known:
            if reaches(rate, target):
                break
            if each.worker_id not in self._active and each.rate > 0:
                chosen.append(each)
                rate += each.rate
        self._active.update(each.worker_id for each in chosen)
        self._num_short = 0
        return Resizing(activate=tuple(each.worker_id for each in chosen))


def _dearest_beside(staying: set[str], active: list[Candidate], goal: float) -> Candidate | None:
    """The dearest, by c/mu, that does not stay and without which the others reach the goal.

    Goal 2.3; a, b, c make 1.0, 0.5 and 1.0 at rising c/mu: without c 1.5 < 2.3, without b 2.0 < 2.3, nobody;
    with d of 0.5, dearer than c: without d 2.5 ≥ 2.3, so d.
    """
    rate = total_rate(active)
    return next((each for each in reversed(active) if each.worker_id not in staying and rate - each.rate >= goal), None)
