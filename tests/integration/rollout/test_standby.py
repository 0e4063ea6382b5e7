"""Workers that are put on standby and called back, by hand and by a coordinator, as processes on a real Kafka."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import replace

import pytest

from echo_schemas.columns import pack_seqs
from echo_schemas.records import Control, StepReport, WorkerControl, WorkerState
from echo_schemas.topics import CONTROL, REQUESTS, STEPS
from tests.examples import load_examples
from tests.integration.rollout.conftest import Fleet, await_in
from tests.integration.rollout.test_processes import assembled
from tests.thorough import only_thorough
from tests.unit.rollout.swarm import RUN, WAIT_S

pytestmark = pytest.mark.kafka

logger = logging.getLogger(__name__)

# From the order to a request in hand it takes one or two seconds on cores that are free. A worker that its group took in only after a
# session would need ten; the limit is between, because a busy machine doubles the first.
FIRST_REQUEST_S = 6.0
GROUPS_PER_STEP = 4
# A clean end is asked for, not a quick one.
DRAIN_S = 30.0
# A machine is taken away so long after it is told.
NOTICE_S = 10.0


class PlayedLearner:
    """Trains each four groups that are complete, and says that a step takes `training_s`."""

    def __init__(self, fleet: Fleet, *, training_s: float) -> None:
        self._fleet = fleet
        self._training_s = training_s
        self._closed: set[int] = set()
        (self._report,) = itertools.islice((each for each in load_examples(STEPS).values() if isinstance(each, StepReport)), 1)

    def trains(self) -> None:
        """A step, if there is a batch."""
        fleet, progress = self._fleet, self._fleet.progress
        complete = {members[0].seq for members in fleet.groups().values() if len(members) >= 2} - self._closed
        if len(complete) < GROUPS_PER_STEP:
            return
        self._closed |= set(sorted(complete)[:GROUPS_PER_STEP])
        version, floor = progress.version + 1, next(seq for seq in itertools.count() if seq not in self._closed)
        above = sorted(seq for seq in self._closed if seq > floor)
        report = replace(self._report, run_id=RUN, version=version, training_s=self._training_s, workers=())
        fleet.publisher.publish(STEPS, report, partition=0).wait(WAIT_S)
        fleet.say(version=version, groups_trained=len(self._closed), next_seq=floor, closed=pack_seqs(floor, above), seen=b"")
        fleet.publish_version(version, next_seq=floor)


def order(fleet: Fleet, worker_id: str, *, active: bool, epoch: int) -> float:
    """By hand; returns when it was in the log."""
    control = Control(run_id=RUN, epoch=epoch, worker_id=worker_id, worker=WorkerControl(active=active), issued_by="test", time_ms=0)
    fleet.publisher.publish(CONTROL, control).wait(WAIT_S)
    return time.monotonic()


def stands_by(fleet: Fleet, worker_id: str) -> bool:
    """Whether the worker says so, and has left the group."""
    words = [status for status in fleet.statuses() if status.worker_id == worker_id]
    return bool(words) and words[-1].state is WorkerState.STANDBY and not words[-1].partitions


def num_taken(fleet: Fleet, worker_id: str) -> int:
    """Requests that the worker ever had in hand."""
    return sum(line[0] == "+" for line in fleet.journal(worker_id))


def num_in_hand(fleet: Fleet, worker_id: str) -> int:
    """Requests that it has in hand now."""
    return sum({"+": 1, "-": -1}.get(line[0], 0) for line in fleet.journal(worker_id))


@pytest.mark.slow
def test_a_worker_on_standby_has_a_request_long_before_a_session_has_passed(fleet: Fleet) -> None:
    fleet.launch("worker", "stays", seconds=0.05)
    fleet.launch("worker", "called", seconds=0.05)
    await_in(fleet, lambda: len(fleet.owners()) == 2 and all(fleet.owners().values()), "both workers to have partitions")
    fleet.launch("feeder", "feeder", admission="free", drain_s=DRAIN_S)
    await_in(fleet, lambda: num_taken(fleet, "called") > 0, "the worker to work")
    took = []
    for turn in range(3):
        order(fleet, "called", active=False, epoch=2 * turn + 1)
        await_in(fleet, lambda: stands_by(fleet, "called"), "the worker to stand by")
        before = num_taken(fleet, "called")
        ordered_s = order(fleet, "called", active=True, epoch=2 * turn + 2)
        await_in(fleet, lambda known=before: num_taken(fleet, "called") > known, "its first request")
        took.append(time.monotonic() - ordered_s)
    logger.warning("From the order to the first request: %s s", ", ".join(f"{each:.2f}" for each in took))
    assert sorted(took)[1] <= FIRST_REQUEST_S, took
    fleet.tell_to_end("feeder")
    fleet.await_end("feeder")
    asked = {record.seq for record in fleet.records(REQUESTS)}
    await_in(fleet, lambda: {f"{RUN}/{seq}" for seq in asked} <= set(fleet.groups()), "every group")


@pytest.mark.slow
@pytest.mark.parametrize("is_told", [False, pytest.param(True, marks=only_thorough)], ids=["killed", "told"])
def test_a_coordinator_puts_the_dear_worker_on_standby_and_takes_it_back_when_the_cheap_one_goes(fleet: Fleet, is_told: bool) -> None:
    """Killed, or told by SIGTERM that its machine is taken away, with groups in its engine that will not end in time."""
    held = fleet.folder / "held"
    learner = PlayedLearner(fleet, training_s=4.0)

    def until(condition: object, what: str) -> None:
        def is_so() -> bool:
            learner.trains()
            return bool(condition())  # type: ignore[operator]

        await_in(fleet, is_so, what)

    fleet.launch("worker", "cheap", seconds=0.2, price=1.0, drain_s=NOTICE_S, held=str(held))
    fleet.launch("worker", "dear", seconds=0.2, price=4.0)
    await_in(fleet, lambda: len(fleet.owners()) == 2 and all(fleet.owners().values()), "both workers to have partitions")
    fleet.launch("feeder", "feeder", drain_s=DRAIN_S)
    fleet.launch("coordinator", "coordinator", drain_s=DRAIN_S)
    until(lambda: stands_by(fleet, "dear"), "the dear worker to stand by")
    done = len(fleet.groups())
    until(lambda: len(fleet.groups()) > done + 2 * GROUPS_PER_STEP, "the cheap one to go on alone")
    taken = num_taken(fleet, "dear")
    assert stands_by(fleet, "dear")
    held.touch()
    until(lambda: num_in_hand(fleet, "cheap") > 0, "the cheap one to have groups in its engine")
    told_s = time.monotonic()
    if is_told:
        fleet.tell_to_end("cheap")
        fleet.await_end("cheap")
        assert num_in_hand(fleet, "cheap") == 0, "nothing is left to be found out"
        gone_s = time.monotonic() - told_s
        assert gone_s <= NOTICE_S
    else:
        fleet.kill("cheap")
    until(lambda: num_taken(fleet, "dear") > taken, "the dear one to be called back")
    logger.warning(
        "From %s to the first request of who was on standby: %.2f s", "SIGTERM" if is_told else "the death", time.monotonic() - told_s
    )
    version = fleet.progress.version
    until(lambda: fleet.progress.version > version + 2, "the run to go on with it")
    (newest,) = [each for each in fleet.records(CONTROL) if each.worker_id == "dear"][-1:]
    assert newest.worker is not None
    assert newest.worker.active
    assert newest.worker.reason.startswith("activate dear: the active workers make 0 of ")
    assert newest.worker.figures["price_active"] == 4.0, newest.worker
    epochs = [each.epoch for each in fleet.records(CONTROL)]
    assert epochs == sorted(set(epochs)), "epochs rise"
    fleet.tell_to_end("feeder")
    fleet.await_end("feeder")
    asked = {record.seq for record in fleet.records(REQUESTS)}
    await_in(fleet, lambda: {f"{RUN}/{seq}" for seq in asked} <= set(fleet.groups()), "every group that was asked for")
    seqs = [group.seq for group in assembled(fleet).ready]
    assert len(seqs) == len(set(seqs)), "a group was assembled twice"
    assert asked <= set(seqs)
    fleet.tell_to_end("coordinator")
    fleet.await_end("coordinator")
