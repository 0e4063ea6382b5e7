"""The page on the coordinator: the screen shows its lines, word for word, where examples/pool.toml runs with the figures of that run."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from echo_core.capacity.activation import Candidate
from echo_core.capacity.decision import PoolLook, PoolRule, PoolWorker
from echo_core.capacity.sizing import SizingPolicy
from echo_ops.report.run_view import RunView
from echo_ops.report.screen import render
from echo_schemas.records import Control, WorkerControl
from echo_settings.load import load_settings
from echo_settings.rules import staleness_policy

ROOT = Path(__file__).parents[3]
SHOWN = re.findall(r"^\d+:\d\d coordinator: .*$", (ROOT / "docs" / "coordinator.md").read_text(encoding="utf-8"), re.MULTILINE)
POOL = load_settings(ROOT / "examples" / "pool.toml", {})
PRICES = {f"worker-{kind.name}-0": kind.price_per_hour or 0.0 for kind in POOL.rollout.pool}
LINE_WIDTH = 240
# Of the run on the page at each order: the second, T_train and T_bcast in seconds, and the rates of the workers that were heard.
ORDERS = [
    (34.256, 1.01318, 0.1172, {"worker-server-0": 256.95, "worker-spot-0": 196.1, "worker-laptop-0": 224.28}),
    (46.256, 1.84078, 0.09658, {"worker-server-0": 256.95, "worker-spot-0": 196.1, "worker-laptop-0": 224.28}),
    (56.256, 1.24359, 0.07718, {"worker-server-0": 256.95, "worker-spot-0": 196.1}),
]


def order(train_s: float, broadcast_s: float, rates: Mapping[str, float], standby: set[str]) -> tuple[str, Mapping[str, bool]]:
    """The coordinator's next order in a pool that stays as it is, with its reason."""
    rule = PoolRule(staleness_policy(POOL), SizingPolicy(margin=POOL.coordinator.hysteresis), gamma=POOL.coordinator.gamma)
    workers = [
        PoolWorker(candidate=Candidate(worker_id=name, rate=rate, price_per_hour=PRICES[name]), is_active=name not in standby)
        for name, rate in rates.items()
    ]
    look = PoolLook(train_s=train_s, broadcast_s=broadcast_s, workers=workers)
    return next((sizing.reason, sizing.orders) for sizing in (rule.decide(look) for _ in range(10)) if sizing.orders)


def test_the_orders_that_are_shown_are_those_of_the_rule_in_the_words_of_the_screen() -> None:
    standby: set[str] = set()
    assert len(SHOWN) == len(ORDERS)
    for shown, (time_s, train_s, broadcast_s, rates) in zip(SHOWN, ORDERS, strict=True):
        reason, orders = order(train_s, broadcast_s, rates, standby)
        view = RunView("pool", started_ms=0, steps_wanted=60, budget=POOL.budget)
        for worker, is_active in orders.items():
            (standby.discard if is_active else standby.add)(worker)
            told = WorkerControl(active=is_active, reason=reason)
            view.apply(Control(run_id="pool", epoch=1, worker_id=worker, worker=told, issued_by="c", time_ms=round(1000 * time_s)))
        console = Console(width=LINE_WIDTH, height=40, file=io.StringIO(), color_system=None)
        with console.capture() as screen:
            console.print(render(view, time_s, LINE_WIDTH, 40, "logs", []))
        assert shown in screen.get()
