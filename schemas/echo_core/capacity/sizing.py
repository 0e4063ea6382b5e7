"""The pool while a run goes on: short for long, activate the cheapest; far above for longer, release the dearest, one at a time. Pure.

    rate < target, `short_ticks` ticks in a row
        activate by rising c/mu until the target is reached
    rate without the dearest ≥ target · (1 + margin), `surplus_ticks` ticks in a row
        release the dearest, by c/mu; where it cannot be spared, the dearest that can
    a price has moved, and others that wait could take the place of the dearest for less, `surplus_ticks` ticks in a row
        activate them; the dearest is then to spare and is released as above
    anything between
        nothing

ECHO-2 §4.3 says that it is so, and gives no numbers; those below are ours. A release leaves the pool above target · (1 + margin), so what
was released comes back only if rates or target move by more than the margin: the pool does not flap.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo_core.capacity.activation import Candidate, by_unit_price, reaches, total_price, total_rate
from echo_schemas.errors import UserError

# So many times the ticks of a surplus: a price that moved is acted on within them, or does not matter.
_REOPENED = 4


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
    """What one tick asks for. At most one of the two is not empty. `replaces`: whose place the activated take, for less money."""

    activate: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    replaces: str = ""


class PoolSizer:
    """The state of the rule: who is active, and for how long the rate has been off."""

    def __init__(self, policy: SizingPolicy, active: Iterable[str] = ()) -> None:
        self._policy = policy
        self._active = set(active)
        self._num_short = 0
        self._num_surplus = 0
        self._num_dear = 0
        # At the last tick. Ticks left in which others may take the dearest's place, after a price has moved.
        self._prices: dict[str, float] = {}
        self._num_reopened = 0

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
        is_short = not reaches(total_rate(active), target)
        spare = None if is_short else self._spare(active, target)
        self._look_at_prices(known)
        nothing_to_swap = is_short or not self._num_reopened or (spare is not None and spare is active[-1])
        instead = [] if nothing_to_swap else self._instead_of_dearest(active, known, target)
        self._num_short = self._num_short + 1 if is_short else 0
        self._num_surplus = self._num_surplus + 1 if spare is not None and not instead else 0
        self._num_dear = self._num_dear + 1 if instead else 0
        if self._num_short >= self._policy.short_ticks:
            return self._activate(active, known, target)
        if self._num_dear >= self._policy.surplus_ticks:
            self._num_dear = self._num_reopened = 0
            self._active.update(each.worker_id for each in instead)
            return Resizing(activate=tuple(each.worker_id for each in instead), replaces=active[-1].worker_id)
        if spare is not None and self._num_surplus >= self._policy.surplus_ticks:
            self._num_surplus = 0
            self._active.discard(spare.worker_id)
            return Resizing(release=(spare.worker_id,))
        return Resizing()

    def _spare(self, active: list[Candidate], target: float) -> Candidate | None:
        """The dearest, by c/mu, without which the others exceed the target by the margin.

        Target 2.0, margin 0.15; a, b, c make 1.0, 0.5 and 1.0 at rising c/mu: without c 1.5 < 2.3, without b 2.0 < 2.3, nobody;
        with d of 0.5, dearer than c: without d 2.5 ≥ 2.3, so d.
        """
        rate, goal = total_rate(active), target * (1 + self._policy.margin)
        return next((each for each in reversed(active) if rate - each.rate >= goal), None)

    def _look_at_prices(self, known: list[Candidate]) -> None:
        """A price that moves lets others take the dearest's place, for a while: rates move up and down all the time."""
        prices = {each.worker_id: each.price_per_hour for each in known}
        has_moved = any(self._prices.get(name, price) != price for name, price in prices.items())
        self._prices = prices
        self._num_reopened = _REOPENED * self._policy.surplus_ticks if has_moved else max(0, self._num_reopened - 1)

    def _instead_of_dearest(self, active: list[Candidate], known: list[Candidate], target: float) -> list[Candidate]:
        """Who waits and could do the work of the dearest for less, per rollout and together, so that the dearest is then to spare. Empty
        where there is nobody.

        Target 2.0, margin 0.15; a makes 2.5 at 5.0 an hour; b and c wait and make 1.5 each at 1.0: b and c make 3.0 ≥ 2.3 for 2.0.
        """
        if not active:
            return []
        dearest, margin = active[-1], 1 + self._policy.margin
        chosen: list[Candidate] = []
        for each in known:
            if each.unit_price * margin >= dearest.unit_price:
                return []
            if each.worker_id not in self._active:
                chosen.append(each)
                if reaches(total_rate([*active[:-1], *chosen]), target * margin):
                    return chosen if total_price(chosen) * margin < dearest.price_per_hour else []
        return []

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
