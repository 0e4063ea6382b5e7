"""The pool: each worker's kind, work and cost, and the orders to it with their reasons. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from echo_ops.harmless import harmless
from echo_ops.report.pool import WorkerLine, cost_per_1000
from echo_ops.viewer.windows import Json, Window, number
from echo_schemas.records import Control, StepReport, WorkerControl, WorkerState, WorkerStatus

_TEXTS = ("worker_id", "kind", "engine")
# A worker that has ended costs nothing.
_PAID = (WorkerState.STARTING, WorkerState.READY, WorkerState.STANDBY, WorkerState.DRAINING)


def pool_page(
    lines: Sequence[WorkerLine],
    statuses: Mapping[str, WorkerStatus],
    orders: Iterable[Control],
    reports: Iterable[StepReport],
    window: Window,
    now_ms: int,
) -> Json:
    """`lines`: measured since the viewer began; `orders`: in the order of the log; `reports`: for the costs."""
    newest = sorted((each for each in orders if each.worker is not None), key=lambda each: -each.time_ms)
    paid = [statuses[line.worker_id].price_per_hour for line in lines if statuses[line.worker_id].state in _PAID]
    return {
        "now_ms": now_ms,
        "price_per_hour": number(sum(paid)),
        "cost_per_1000": number(cost_per_1000(lines)),
        "costs": _costs(reports),
        "workers": [_worker(line, statuses[line.worker_id], now_ms) for line in lines],
        "window": window.plain(len(newest)),
        "orders": [_order(order, order.worker) for order in window.of(newest) if order.worker is not None],
    }


def _costs(reports: Iterable[StepReport]) -> list[Json]:
    """The costs of the whole run by kind of worker and use; the learner's has the use `learner`."""
    paid: Counter[tuple[str, str]] = Counter()
    for report in reports:
        paid["", "learner"] += report.learner_cost  # type: ignore[assignment]  # a counter of money
        for each in report.costs:
            for use, cost in (("busy", each.busy), ("idle", each.idle), ("standby", each.standby)):
                paid[each.kind, use] += cost  # type: ignore[assignment]  # see above
    return [{"kind": harmless(kind), "use": use, "cost": number(cost)} for (kind, use), cost in sorted(paid.items()) if cost]


def _order(order: Control, worker: WorkerControl) -> Json:
    return {
        "time_ms": order.time_ms,
        "worker": harmless(order.worker_id or ""),
        "is_active": worker.active,
        "by": harmless(order.issued_by),
        "epoch": order.epoch,
        "reason": harmless(worker.reason),
        "figures": {harmless(name): number(value) for name, value in sorted(worker.figures.items())},
    }


def _worker(line: WorkerLine, status: WorkerStatus, now_ms: int) -> Json:
    numbers = {name: number(value) if isinstance(value, float) else value for name, value in asdict(line).items()}
    return {
        **numbers,
        **{name: harmless(str(numbers[name])) for name in _TEXTS},
        "state": line.state.value,
        "host": harmless(status.host),
        "rollouts_per_s": number(status.rollouts_per_s),
        "rollouts": status.rollouts,
        "capacity": status.capacity,
        "partitions": list(status.partitions),
        "silent_s": max(0.0, (now_ms - status.time_ms) / 1000),
    }
