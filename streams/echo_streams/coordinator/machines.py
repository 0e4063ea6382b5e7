"""What an order means for machines: `[coordinator] machines`.

standby   every worker stays on, and takes part or stands by
local     `echoswarm up` ends the process of a worker that is released, and starts it again when it is called
metric    nobody is ordered: the gauge `wanted_workers` says how many of each kind are wanted, and an autoscaler makes it so

`Machines.offers` says who could take part: all else (rates, target, orders, reasons) is the same for the three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from echo_schemas.records import Control, WorkerState, WorkerStatus
from echo_settings import Settings

# Who takes requests, or would if it were told to. One that starts or ends is nobody to count on.
_AVAILABLE = (WorkerState.READY, WorkerState.STANDBY)
# A process that was called has so long to load its engine; then it counts as missing, and others are called.
_START_S = 180.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker, or the place of one, that takes part (`is_active`) or could."""

    status: WorkerStatus
    is_active: bool


class Machines(Protocol):
    """Who could take part in a run. `calls_back`: whether everybody shall take part when the coordinator ends."""

    calls_back: bool

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        """`heard`: workers that live; `known`: the newest word of each, however old; `orders`: the newest of each; `now_ms`: Unix time."""


class Standby:
    """Everybody who is heard."""

    calls_back = True

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        return [Offer(each, _is_wanted(orders.get(each.worker_id))) for each in heard if each.state in _AVAILABLE]


class LocalProcesses:
    """Everybody who is heard, whoever was ended by an order, and whoever was called and starts."""

    calls_back = True

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        available = {each.worker_id: each for each in heard if each.state in _AVAILABLE}
        found = [Offer(each, _is_wanted(orders.get(name))) for name, each in available.items()]
        for name, status in sorted(known.items()):
            order = orders.get(name)
            if name in available or order is None:
                continue
            is_wanted = _is_wanted(order)
            if not is_wanted or now_ms - order.time_ms < 1000 * _START_S:
                found.append(Offer(status, is_wanted))
        return found


class ScaledKinds:
    """Places of each kind, up to the most that there may be; those beyond the workers that are heard wait until they are called.

    A place makes what the workers of its kind make in the mean. Of a kind of which nothing is known there is one place to try.
    """

    # An autoscaler would rent all there are.
    calls_back = False

    def __init__(self, most: Mapping[str, int], price: Callable[[str], float]) -> None:
        """`most`: places by kind; `price`: of a kind of which nobody is heard."""
        self._most = most
        self._price = price

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        by_kind: defaultdict[str, list[WorkerStatus]] = defaultdict(list)
        for each in heard:
            if each.state is not WorkerState.DRAINING:
                by_kind[each.kind].append(each)
        found: list[Offer] = []
        for kind in sorted({*by_kind, *self._most}):
            found += self._places(kind, by_kind[kind], known, orders, now_ms)
        return found

    def _places(
        self, kind: str, living: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        measured = [each.rollouts_per_s for each in living if each.rollouts_per_s > 0]
        measured = measured or [each.rollouts_per_s for each in known.values() if each.kind == kind and each.rollouts_per_s > 0]
        rate = sum(measured) / len(measured) if measured else 0.0
        price = max((each.price_per_hour for each in living), default=self._price(kind))
        most = self._most.get(kind, len(living)) if measured else 1
        model = _nobody(kind)
        found = []
        for number in range(max(most, len(living))):
            name = f"{kind or 'worker'}.{number}"
            order = orders.get(name)
            is_there = number < len(living)
            if order is not None and _is_wanted(order) and not is_there and now_ms - order.time_ms >= 1000 * _START_S:
                # It was wanted and did not come: others are called.
                continue
            status = replace(model, worker_id=name, rollouts_per_s=rate, price_per_hour=price)
            found.append(Offer(status, is_there if order is None else _is_wanted(order)))
        return found


def machines_of(settings: Settings) -> Machines:
    """As [coordinator] machines says."""
    match settings.coordinator.machines:
        case "local":
            return LocalProcesses()
        case "metric":
            pool = {kind.name: kind for kind in settings.rollout.pool}
            most = {name: kind.most_workers for name, kind in pool.items() if kind.most_workers is not None}

            def price(kind: str) -> float:
                found = pool.get(kind)
                own = None if found is None else found.price_per_hour
                return settings.rollout.price_per_hour if own is None else own

            return ScaledKinds(most, price)
        case _:
            return Standby()


def _is_wanted(order: Control | None) -> bool:
    """Without an order a worker takes part."""
    return order is None or order.worker is None or order.worker.active


def _nobody(kind: str) -> WorkerStatus:
    return WorkerStatus(run_id="", worker_id="", host="", engine="", state=WorkerState.STANDBY, kind=kind, time_ms=0)
