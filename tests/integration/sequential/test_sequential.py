"""A sequential learner with workers as processes on a real Kafka: shared batches, a slow worker, a killed one, a learner started again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline, SystemClock
from echo_learner.metrics import LearnerMetrics
from echo_learner.run import train_in_sessions
from echo_learner.start.beginning import StartOptions
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.columns import OFFSET_DTYPE
from echo_schemas.naming import Namespace
from echo_schemas.records import Reward, RewardOutcome, StepReport, Trajectory
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES
from echo_settings import Settings
from echo_tasks.base_models import resolve_base
from echo_tasks.prompts import PromptCodec
from tests.contract.conftest import create_topics
from tests.integration.rollout.conftest import NUM_PARTITIONS, Fleet, await_in
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.rollout.swarm import RUN

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

GROUPS = 4


class Run:
    """Workers as processes; learner and rewards on threads of the test."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.error: BaseException | None = None
        self._stop = StopSignal()
        self._scored = threading.Event()
        self._threads: list[threading.Thread] = []
        self._start(self._score)

    def learn(self, steps: int, *, takeover: bool = False) -> StopSignal:
        """Start the learner; set the signal to end it."""
        stop = StopSignal()
        self._start(lambda: self._train(steps, stop, takeover))
        return stop

    def end_learning(self, stop: StopSignal) -> None:
        """End the learner that was started last, and wait until it has: what it still publishes would be fenced by the next one."""
        stop.set()
        self._threads[-1].join(60)
        assert not self._threads[-1].is_alive(), "the learner did not end"

    def reports(self) -> list[StepReport]:
        return [record for record in self.fleet.records(STEPS) if isinstance(record, StepReport)]

    def await_steps(self, number: int) -> list[StepReport]:
        def reached() -> list[StepReport] | None:
            if self.error is not None:
                raise self.error
            found = self.reports()
            return found if len(found) >= number else None

        found: list[StepReport] = await_in(self.fleet, reached, f"step {number}")
        return found

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread of the test did not end"

    def _start(self, run: Any) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as exc:  # the edge of the thread: the test looks at it
                self.error = exc

        self._threads.append(threading.Thread(target=guarded, daemon=True))
        self._threads[-1].start()

    def _train(self, steps: int, stop: StopSignal, takeover: bool) -> None:
        settings = Settings.model_validate(
            {
                "run": {"name": RUN, "mode": "sequential"},
                "kafka": {"namespace": self.fleet.bus.namespace.name},
                "task": {"name": "tests.unit.rollout.swarm:LetterTask"},
                "policy": {"base": str(self.fleet.base)},
                "rollout": {"group_size": 2, "probe_size": 0, "max_new_tokens": 4, "heartbeat_s": 0.2, "request_timeout_s": 120},
                "learner": {"groups_per_step": GROUPS, "steps": steps},
                "checkpoint": {"folder": str(self.fleet.folder / "run")},
            }
        )
        registry, clock = CollectorRegistry(), SystemClock()
        self._stop.on_set(stop.set)
        process = RoleProcess(
            settings=settings, bus=self.fleet.bus, registry=registry, places=PlaceTimes(registry, clock), clock=clock, stop=stop
        )  # fmt: skip
        prompts = PromptCodec(resolve_base(settings.policy.base))
        train_in_sessions(process, NumpyTrainer(), LearnerMetrics(registry), prompts, StartOptions(takeover=takeover))

    def _score(self) -> None:
        bus = self.fleet.bus
        with closing(bus.reader([TRAJECTORIES])) as reader, closing(bus.publisher()) as publisher:
            reader.start()
            while not self._stop.is_set():
                for message in reader.read(timeout_s=0.1):
                    if isinstance(message.record, Trajectory):
                        publisher.publish(REWARDS, judged(message.record, message.coordinates), partition=message.partition)


def judged(record: Trajectory, where: Any) -> Reward:
    return Reward(
        run_id=RUN,
        group_id=record.group_id,
        seq=record.seq,
        attempt=record.attempt,
        index=record.index,
        of=where,
        name="exact",
        code_version="1",
        outcome=RewardOutcome.SCORED,
        value=float(record.index),
        time_ms=0,
    )


def seqs_of(report: StepReport) -> set[int]:
    assert report.batch is not None
    return set(np.frombuffer(report.batch.seqs, OFFSET_DTYPE).tolist())


@pytest.fixture
def fleet(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Iterator[Fleet]:
    """No role runs yet, and nothing is published."""
    cluster = KafkaCluster(kafka_bootstrap)
    create_topics(cluster, {f"{namespace.name}.{spec.name}": min(spec.partitions, NUM_PARTITIONS) for spec in load_topic_specs()})
    bus = Bus(
        cluster=cluster, namespace=namespace, role="tester", run_id=RUN
    )  # fmt: skip
    made = Fleet(bus, tmp_path, kafka_bootstrap)
    yield made
    made.close()


@pytest.fixture
def run(fleet: Fleet) -> Iterator[Run]:
    made = Run(fleet)
    yield made
    made.close()


def assert_on_policy(reports: list[StepReport]) -> None:
    """Every step trained its own version's samples, every seq once."""
    trained = [seq for report in reports for seq in seqs_of(report)]
    assert len(trained) == len(set(trained)) == GROUPS * len(reports)
    assert {report.staleness_total for report in reports} == {(GROUPS * 2,)}


def test_two_workers_share_each_batch_and_the_slow_one_is_waited_for(run: Run) -> None:
    run.fleet.launch("worker", "w0")
    run.fleet.launch("worker", "w1", seconds=0.3)
    await_in(run.fleet, lambda: [len(owned) for owned in run.fleet.owners().values()] == [2, 2], "the workers to share the partitions")
    run.learn(5)
    reports = run.await_steps(5)
    assert_on_policy(reports)
    shares = Counter(record.worker_id for record in run.fleet.trajectories())
    assert set(shares) == {"w0", "w1"}
    assert not sum(report.metrics["requests_resent"] for report in reports)
    assert not sum(report.metrics["replies_refused"] + report.metrics["replies_duplicate"] for report in reports)


def test_a_worker_that_dies_in_the_middle_of_a_batch_leaves_it_to_the_other(run: Run) -> None:
    held = run.fleet.folder / "held"
    run.fleet.launch("worker", "w0", held=str(held))
    run.fleet.launch("worker", "w1")
    await_in(run.fleet, lambda: [len(owned) for owned in run.fleet.owners().values()] == [2, 2], "the workers to share the partitions")
    run.learn(4)
    run.await_steps(1)
    held.touch()
    await_in(run.fleet, lambda: _in_hand(run.fleet, "w0"), "the first worker to hold part of a batch")
    run.fleet.kill("w0")
    assert_on_policy(run.await_steps(4))


def test_a_learner_that_starts_again_in_the_middle_of_a_batch_trains_each_seq_once(run: Run) -> None:
    held = run.fleet.folder / "held"
    run.fleet.launch("worker", "w0", held=str(held))
    first = run.learn(4)
    run.await_steps(1)
    held.touch()
    await_in(run.fleet, lambda: _in_hand(run.fleet, "w0"), "the worker to hold a batch")
    before = len(run.reports())
    run.end_learning(first)
    run.learn(4, takeover=True)
    held.unlink()
    reports = run.await_steps(4)
    assert before < 4
    assert_on_policy(reports)
    assert len({report.session for report in reports}) == 2
    attempts = Counter(record.group_id for record in run.fleet.trajectories())
    assert set(attempts.values()) == {2}, "what was on its way was asked for again"


def _in_hand(fleet: Fleet, worker_id: str) -> bool:
    """Whether the worker began what it has not ended."""
    lines = [line.split() for line in fleet.journal(worker_id)]
    begun = {tuple(rest) for sign, *rest in lines if sign == "+"}
    return bool(begun - {tuple(rest) for sign, *rest in lines if sign == "-"})


def test_nobody_waits_forever_without_workers(run: Run) -> None:
    stop = run.learn(1)
    await_in(run.fleet, lambda: len(run.fleet.requests()) == GROUPS, "the requests")
    deadline = Deadline.after(30)
    stop.set()
    run.close()
    assert not deadline.expired()
    assert not run.reports()
