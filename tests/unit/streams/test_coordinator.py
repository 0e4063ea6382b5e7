"""A coordinator over the in-memory cluster: what it hears, what it orders, who follows it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline, ManualClock
from echo_memory import MemoryCluster
from echo_runtime.notices import Notices
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, StepReport, WeightManifest, WorkerControl, WorkerShare, WorkerState, WorkerStatus
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import CONTROL, STEPS, WEIGHTS, worker_order_key
from echo_settings import Settings
from echo_settings.rules import staleness_policy
from echo_streams.coordinator.coordinator import Coordinator
from echo_streams.metrics import CoordinatorMetrics
from tests.examples import load_examples
from tests.unit.rollout.test_unequal_workers import PlayedView

RUN, WAIT_S = "demo", 30.0
SETTINGS = Settings.model_validate(
    {
        "run": {"name": RUN},
        "rollout": {"group_size": 2, "heartbeat_s": 1.0},
        "learner": {"groups_per_step": 4},
        "staleness": {"budget": 1, "publication_period": 1},
        "coordinator": {"enabled": True, "every_s": 1.0},
    }
)


@dataclass
class Scene:
    """Learner and workers are played; the coordinator's clock is the test's."""

    bus: Bus
    clock: ManualClock
    stack: ExitStack

    def __post_init__(self) -> None:
        self.workers, self.weights = PlayedView(), PlayedView()
        self.publisher = self.stack.enter_context(closing(self.bus.publisher(profiles.PRODUCER_LATENCY)))
        self.notices = Notices(self.clock)
        self.registry = CollectorRegistry()
        (self._report,) = itertools.islice((each for each in load_examples(STEPS).values() if isinstance(each, StepReport)), 1)
        (self._manifest,) = itertools.islice((each for each in load_examples(WEIGHTS).values() if isinstance(each, WeightManifest)), 1)

    def start(self) -> Coordinator:
        self.registry = CollectorRegistry()
        writer = self.stack.enter_context(closing(self.bus.transactions("coordinator")))
        writer.start()
        parts: Any = {
            "settings": SETTINGS,
            "policy": staleness_policy(SETTINGS),
            "bus": self.bus,
            "writer": writer,
            "steps": self.stack.enter_context(closing(self.bus.reader([STEPS]))),
            "weights": self.weights,
            "workers": self.workers,
            "control": self.stack.enter_context(closing(self.bus.orders())),
            "notices": self.notices,
            "metrics": CoordinatorMetrics(self.registry),
            "clock": self.clock,
        }
        coordinator = Coordinator(**parts)
        coordinator.begin()
        coordinator.hear_steps(1.0)
        return coordinator

    def step(self, version: int, training_s: float, **delivered: int) -> None:
        shares = tuple(WorkerShare(worker_id=name, delivered=count) for name, count in delivered.items())
        report = replace(self._report, run_id=RUN, version=version, training_s=training_s, workers=shares)
        self.publisher.publish(STEPS, report, partition=0).wait(WAIT_S)

    def word(
        self, name: str, rate: float, price: float, *, installed: int = 0, busy_s: float = 0.0, state: WorkerState = WorkerState.READY
    ) -> None:
        status = WorkerStatus(
            run_id=RUN,
            worker_id=name,
            host="h",
            engine="e",
            state=state,
            rollouts_per_s=rate,
            price_per_hour=price,
            busy_s=busy_s,
            installed_version=installed,
            weights_sha256="0" * 64,
            time_ms=self.clock.time_ms(),
        )
        self.workers.put(name, status)

    def publish(self, version: int, *acknowledged: tuple[str, float, float], after_s: float) -> None:
        """A snapshot, and its acknowledgements."""
        self.weights.put(f"{RUN}/current", replace(self._manifest, run_id=RUN, version=version))
        self.clock.advance(after_s)
        for name, rate, price in acknowledged:
            self.word(name, rate, price, installed=version)

    def looks(self, coordinator: Coordinator, times: int, *workers: tuple[str, float, float]) -> dict[str, bool]:
        """A look each second, with a word of every worker before it; the orders of all."""
        found: dict[str, bool] = {}
        for _ in range(times):
            self.clock.advance(1.0)
            for name, rate, price in workers:
                self.word(name, rate, price)
            found.update(coordinator.look().orders)
        return found

    def orders(self) -> dict[str, Control]:
        """The newest of each worker, by name."""
        return {str(order.worker_id): order for order in self.bus.newest(CONTROL, Control).values()}

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"echo_streams_coordinator_{name}", labels)


@pytest.fixture
def scene() -> Iterator[Scene]:
    cluster, clock, namespace = MemoryCluster(), ManualClock(), Namespace("test.coordinator")
    topics = [NewTopic(f"{namespace.name}.{spec.name}", min(2, spec.partitions), 1) for spec in load_topic_specs()]
    for future in cluster.admin().create_topics(topics).values():
        future.result(WAIT_S)
    bus = Bus(
        cluster=cluster, namespace=namespace, clock=clock, role="coordinator", run_id=RUN
    )  # fmt: skip
    with ExitStack() as stack:
        yield Scene(bus, clock, stack)


CHEAP, DEAR = ("cheap", 20.0, 1.0), ("dear", 20.0, 4.0)


def _released(scene: Scene) -> Coordinator:
    """A coordinator that has put the dear one on standby."""
    for version in range(1, 4):
        scene.step(version, 1.0)
    for name, rate, price in (CHEAP, DEAR):
        scene.word(name, rate, price)
    coordinator = scene.start()
    scene.publish(1, CHEAP, DEAR, after_s=0.2)
    assert scene.looks(coordinator, 6, CHEAP, DEAR) == {"dear": False}
    return coordinator


def test_the_dear_one_stands_by_until_the_cheap_one_is_silent(scene: Scene) -> None:
    coordinator = _released(scene)
    order = scene.orders()["dear"]
    assert order.worker is not None
    assert (order.epoch, order.worker.active, order.issued_by) == (1, False, "test.coordinator.coordinator")
    assert order.worker.reason.startswith("release dear: 20 rollouts/s without it are enough for 11")
    assert (order.worker.figures["rate"], order.worker.figures["price_standby"]) == (40.0, 4.0)
    assert (scene.metric("price", state="active"), scene.metric("price", state="standby")) == (1.0, 4.0)
    assert scene.metric("target_rate") == pytest.approx(11.0)
    assert (scene.metric("workers", state="active"), scene.metric("workers", state="standby")) == (1, 1)
    assert scene.looks(coordinator, 9, DEAR) == {"dear": True}
    order = scene.orders()["dear"]
    assert (order.epoch, order.worker is not None and order.worker.active) == (2, True)


def test_a_restart_knows_steps_orders_and_epoch_from_the_log_and_ends_its_predecessor(scene: Scene) -> None:
    first = _released(scene)
    second = scene.start()
    assert not scene.looks(second, 3, CHEAP, DEAR), "what stands by goes on to"
    assert scene.metric("train_seconds") == 1.0
    assert scene.looks(second, 9, DEAR) == {"dear": True}, "before it has seen a publication it still mends a shortage"
    assert scene.orders()["dear"].epoch == 2
    deadline = Deadline.after(WAIT_S)
    while (order := first.control.get(worker_order_key(RUN, "dear"))) is None or order.epoch < 2:
        assert not deadline.expired(), "the first never heard of the second's order"
    with pytest.raises(UserError, match="Another coordinator has taken over"):
        scene.looks(first, 1, CHEAP, DEAR)


def test_orders_are_above_the_highest_epoch_of_the_log(scene: Scene) -> None:
    foreign = Control(run_id=RUN, epoch=700, worker_id="x", worker=WorkerControl(active=True), issued_by="operator", time_ms=1)
    scene.publisher.publish(CONTROL, foreign).wait(WAIT_S)
    _released(scene)
    assert scene.orders()["dear"].epoch == 701


def test_the_median_of_five_steps_counts(scene: Scene) -> None:
    for version, training_s in enumerate((9.0, 1.0, 2.0, 50.0, 3.0, 4.0), 1):
        scene.step(version, training_s)
    scene.word(*CHEAP)
    coordinator = scene.start()
    scene.looks(coordinator, 1, CHEAP)
    assert scene.metric("train_seconds") == 3.0


def test_a_worker_that_says_no_number_ends_nobody(scene: Scene) -> None:
    coordinator = _released(scene)
    scene.looks(coordinator, 2, CHEAP, ("odd", float("inf"), 1.0), ("odder", float("nan"), float("inf")))


def test_a_pool_that_is_too_small_is_told_what_would_help(scene: Scene) -> None:
    scene.step(1, 1.0)
    scene.word("a", 2.0, 1.0)
    coordinator = scene.start()
    assert not scene.looks(coordinator, 3, ("a", 2.0, 1.0))
    assert "every worker takes part" in scene.notices.current()["capacity"]
    assert scene.metric("feasible") == 0
    scene.looks(coordinator, 1, ("a", 200.0, 1.0))
    assert not scene.notices.current()


def test_at_its_end_everybody_takes_part(scene: Scene) -> None:
    _released(scene)
    coordinator = scene.start()
    stop = StopSignal()
    stop.set()
    coordinator.run(stop)
    order = scene.orders()["dear"].worker
    assert order == WorkerControl(active=True, reason="the coordinator ends, so every worker takes part")
    assert scene.orders()["dear"].epoch == 2


def test_a_worker_that_delivers_a_tenth_of_what_it_says_counts_with_that_and_is_named(scene: Scene) -> None:
    coordinator = _released(scene)
    for version in range(4, 10):
        for name, rate, price in (("cheap", 200.0, 1.0), ("dear", 20.0, 4.0)):
            scene.word(name, rate, price, busy_s=10.0 * version)
        scene.step(version, 1.0, cheap=200, dear=200)
        coordinator.hear_steps(1.0)
    scene.clock.advance(1.0)
    scene.word("cheap", 200.0, 1.0, busy_s=100.0)
    scene.word("dear", 20.0, 4.0, busy_s=100.0)
    coordinator.look()
    assert scene.notices.current()["claims"] == "cheap says 200 rollouts/s and delivers 20, so it counts with what it delivers."
    assert scene.metric("rate") == pytest.approx(20.0)
    assert scene.metric("workers_disbelieved") == 1


def test_a_pool_that_shrinks_to_none_is_said_and_forgotten_when_somebody_comes(scene: Scene) -> None:
    coordinator = scene.start()
    scene.looks(coordinator, 1)
    assert not scene.notices.current(), "before anybody was heard the run begins"
    scene.looks(coordinator, 1, CHEAP)
    scene.looks(coordinator, 9)
    assert "No worker is heard any more" in scene.notices.current()["pool"]
    scene.looks(coordinator, 1, CHEAP)
    assert not scene.notices.current()


def test_missing_prices_are_on_healthz(scene: Scene) -> None:
    scene.step(1, 1.0)
    coordinator = scene.start()
    scene.looks(coordinator, 1, CHEAP, ("free", 20.0, 0.0))
    assert "Without a price free count as free" in scene.notices.current()["prices"]
