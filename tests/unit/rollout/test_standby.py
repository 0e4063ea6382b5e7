"""Orders to a worker: it leaves the group and comes back, and its engine follows the weights all the while."""

from __future__ import annotations

import pytest

from echo_bus.clock import Deadline
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import Control, WorkerControl, WorkerState
from echo_schemas.topics import CONTROL, worker_order_key
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import RUN, WAIT_S, GatedEngine, Swarm, wait_until

pytestmark = pytest.mark.slow

COORDINATOR = "test.rollout.coordinator"


def order(swarm: Swarm, worker_id: str, *, active: bool, epoch: int, issued_by: str = COORDINATOR) -> None:
    """An order to one worker."""
    control = Control(
        run_id=RUN, epoch=epoch, worker_id=worker_id, worker=WorkerControl(active=active), issued_by=issued_by, time_ms=epoch
    )  # fmt: skip
    swarm.publisher.publish(CONTROL, control).wait(WAIT_S)


def state_of(swarm: Swarm, worker_id: str = "w0") -> tuple[WorkerState | None, int | None, tuple[int, ...]]:
    """What the worker says: state, installed version, partitions."""
    words = [status for status in swarm.statuses() if status.worker_id == worker_id]
    return (words[-1].state, words[-1].installed_version, words[-1].partitions) if words else (None, None, ())


def test_a_worker_stands_by_and_takes_part_again(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(coordinator={"enabled": True})
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    swarm.ask(swarm.request(0))
    wait_until(lambda: len(swarm.trajectories()) == 2, "the first group")
    order(swarm, "w0", active=False, epoch=1)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the worker to leave the group")
    swarm.ask(swarm.request(1))
    swarm.publish_version(1)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 1, ()), "the weights to be installed on standby")
    assert len(swarm.trajectories()) == 2, "a worker on standby takes nothing"
    order(swarm, "w0", active=True, epoch=2)
    called = Deadline.after(2.0)
    wait_until(lambda: len(swarm.trajectories()) == 4, "the second group")
    assert not called.expired(), "the first request is there within two seconds"
    assert {record.min_version for record in swarm.groups()[f"{RUN}/1"]} == {1}
    order(swarm, "w0", active=False, epoch=3)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 1, ()), "the worker to leave once more")


def test_one_that_starts_under_an_order_to_stand_by_never_joins(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(coordinator={"enabled": True})
    order(swarm, "w0", active=False, epoch=1)
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the weights")
    assert not swarm.trajectories()
    assert all(not status.partitions for status in swarm.statuses())
    swarm.publisher.publish_tombstone(CONTROL, worker_order_key(RUN, "w0")).wait(WAIT_S)
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group: without an order a worker takes part")


def test_what_is_in_hand_is_finished_before_the_worker_leaves(make_swarm: MakeSwarm) -> None:
    swarm, engine = make_swarm(coordinator={"enabled": True, "release_s": WAIT_S}), GatedEngine()
    swarm.publish_version(0)
    swarm.start_worker(engine)
    swarm.ask(swarm.request(0))
    wait_until(lambda: engine.num_running, "the group to be generated")
    order(swarm, "w0", active=False, epoch=1)
    wait_until(lambda: state_of(swarm)[0] is WorkerState.STANDBY, "the worker to obey")
    swarm.ask(swarm.request(1))
    engine.gate.set()
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the worker to leave")
    assert set(swarm.groups()) == {f"{RUN}/0"}
    other = swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(lambda: f"{RUN}/1" in swarm.groups(), "the other worker to do the second")
    assert other.is_alive
    assert len({record.attempt for record in swarm.groups()[f"{RUN}/0"]}) == 1, "what was finished is not done again"


def test_what_does_not_end_in_time_is_handed_back_and_done_by_another(make_swarm: MakeSwarm) -> None:
    swarm, stuck = make_swarm(coordinator={"enabled": True, "release_s": 0.0}), GatedEngine()
    swarm.publish_version(0)
    swarm.start_worker(stuck)
    swarm.ask(swarm.request(0), swarm.request(1))
    wait_until(lambda: stuck.num_running, "a group to be generated")
    order(swarm, "w0", active=False, epoch=1)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the worker to leave")
    swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(lambda: len(swarm.groups()) == 2, "the other worker to do both")
    assert {record.worker_id for record in swarm.trajectories()} == {"w1"}
    stuck.gate.set()
    order(swarm, "w1", active=False, epoch=1)
    wait_until(lambda: state_of(swarm, "w1") == (WorkerState.STANDBY, 0, ()), "the other one to leave")
    order(swarm, "w0", active=True, epoch=2)
    swarm.ask(swarm.request(2))
    wait_until(lambda: f"{RUN}/2" in swarm.groups(), "the first worker to take part again")


def test_a_worker_that_ends_on_standby_ends_in_good_order(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(coordinator={"enabled": True})
    swarm.publish_version(0)
    worker = swarm.start_worker(ScriptedEngine())
    order(swarm, "w0", active=False, epoch=1)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the worker to stand by")
    worker.stop()
    assert worker.error is None
    assert state_of(swarm)[0] is WorkerState.GONE


def test_a_worker_that_is_told_to_end_while_it_leaves_hands_back_at_once(make_swarm: MakeSwarm) -> None:
    swarm, stuck = make_swarm(coordinator={"enabled": True, "release_s": 10 * WAIT_S}, run={"name": RUN, "drain_s": 0.2}), GatedEngine()
    swarm.publish_version(0)
    worker = swarm.start_worker(stuck)
    swarm.ask(swarm.request(0))
    wait_until(lambda: stuck.num_running, "the group to be generated")
    order(swarm, "w0", active=False, epoch=1)
    wait_until(lambda: state_of(swarm)[0] is WorkerState.STANDBY, "the worker to obey")
    worker.stop()
    assert worker.error is None
    swarm.start_worker(ScriptedEngine(), "w1")
    wait_until(lambda: len(swarm.trajectories()) == 2, "another to do it")


def test_orders_to_others_and_of_lower_epochs_change_nothing(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(coordinator={"enabled": True})
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    order(swarm, "w0", active=True, epoch=5)
    order(swarm, "nobody", active=False, epoch=6)
    order(swarm, "w0", active=False, epoch=4)
    swarm.ask(swarm.request(0))
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group")
    assert all(status.state is not WorkerState.STANDBY for status in swarm.statuses())
    # Whatever comes later on the topic is read after them.
    order(swarm, "w0", active=False, epoch=5)
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "an order of the same epoch to be obeyed")


def test_in_a_run_without_coordinator_its_orders_are_void_and_an_operators_are_not(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    order(swarm, "w0", active=False, epoch=7)
    swarm.publish_version(0)
    swarm.start_worker(ScriptedEngine())
    swarm.ask(swarm.request(0))
    wait_until(lambda: len(swarm.trajectories()) == 2, "the group")
    order(swarm, "w0", active=False, epoch=8, issued_by="test.rollout.operator")
    wait_until(lambda: state_of(swarm) == (WorkerState.STANDBY, 0, ()), "the worker to obey the operator")
