"""What an order does to machines: `[coordinator] machines`.

standby   every worker's process stays, and takes part or stands by
local     `echoswarm up` ends the process of a released worker, and starts it again when it is called
metric    no orders: the gauge `wanted_workers` has the number of workers wanted of each kind, for an autoscaler

`Machines.offers` lists the workers that could take part. Rates, target, orders and reasons are the same for all three.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from echo_schemas.records import Control, WorkerState, WorkerStatus
from echo_settings import Settings

# Workers in these states take requests, or would on an order. A worker that starts or ends does not count.
_AVAILABLE = (WorkerState.READY, WorkerState.STANDBY)
# Seconds that a called process has to load its engine; then it counts as missing, and other workers are called.
_START_S = 180.0


@dataclass(frozen=True, slots=True)
class Offer:
    """A worker, or a place for one, that takes part (`is_active`) or could."""

    status: WorkerStatus
    is_active: bool


class Machines(Protocol):
    """The workers that could take part in a run. `calls_back`: whether all shall take part when the coordinator ends."""

    calls_back: bool

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        """`heard`: live workers; `known`: the newest status of every worker; `orders`: the newest of each; `now_ms`: Unix time."""


class Standby:
    """Offers the live workers."""

    calls_back = True

    def offers(
        self, heard: Sequence[WorkerStatus], known: Mapping[str, WorkerStatus], orders: Mapping[str, Control], now_ms: int
    ) -> list[Offer]:
        return [Offer(each, _is_wanted(orders.get(each.worker_id))) for each in heard if each.state in _AVAILABLE]


class LocalProcesses:
    """Offers the live workers, those ended by an order, and those that were called and are starting."""

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
    """Offers places of each kind, up to the most allowed; places beyond the live workers are inactive until they are called.

    A place has the mean rate of its kind's workers. A kind without a known rate has one place to try.
    """

    # Else an autoscaler would start all allowed machines.
    calls_back = False

    def __init__(self, most: Mapping[str, int], price: Callable[[str], float]) -> None:
        """`most`: places by kind; `price`: of a kind without a live worker."""
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
        model = WorkerStatus(run_id="", worker_id="", host="", engine="", state=WorkerState.STANDBY, kind=kind, time_ms=0)
        found = []
        for number in range(max(most, len(living))):
            name = f"{kind or 'worker'}.{number}"
            order = orders.get(name)
            is_there = number < len(living)
            if order is not None and _is_wanted(order) and not is_there and now_ms - order.time_ms >= 1000 * _START_S:
                # The worker was called and did not come: call others.
                continue
            status = replace(model, worker_id=name, rollouts_per_s=rate, price_per_hour=price)
            found.append(Offer(status, is_there if order is None else _is_wanted(order)))
        return found


def machines_of(settings: Settings) -> Machines:
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
