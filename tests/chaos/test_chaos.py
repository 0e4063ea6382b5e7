"""A run of real processes on three real brokers loses what can be lost, and goes on as if it had not."""

from __future__ import annotations

import random

import pytest

from echo_bus.clock import Deadline
from tests.chaos.faults import ROLES, Fault, Kind
from tests.chaos.proof import num_sessions, prove, retrain
from tests.chaos.scene import Scene
from tests.chaos.schedule import Outcome, suffer
from tests.chaos.swarm import ENDED_AS_TOLD
from tests.thorough import IS_THOROUGH

# All of them take six to ten minutes on two cores; a machine that does other things may need ten times as long.
pytestmark = [pytest.mark.chaos, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(2_400)]

_DRAINED_S = 120.0
_GOES_ON_WITHIN_S = 400.0
# Of a run that is not thorough: the first ones, of all learners until then.
_VERSIONS_RETRAINED = 40

SCHEDULES = {
    "killed-roles": [
        *(Fault(Kind.KILL, role) for role in ROLES),
        Fault(Kind.KILL, "learner"),
        Fault(Kind.KILL_ALL),
    ],
    "frozen-roles": [Fault(Kind.FREEZE, role, seconds) for role, seconds in zip(ROLES, (4.0, 3.0, 2.0, 1.0), strict=True)],
    "brokers": [Fault(Kind.BROKER_KILL, "0", 2.0), Fault(Kind.BROKER_FREEZE, "1", 4.0), Fault(Kind.ROLLING_RESTART)],
    "network": [
        Fault(Kind.LATENCY, seconds=3.0),
        Fault(Kind.SILENCE, "2", 3.0),
        Fault(Kind.HALF_OPEN, "0"),
        Fault(Kind.RESET, "1", 1.0),
    ],
    "partition": [Fault(Kind.PARTITION, seconds=4.0)],
    "two-learners": [Fault(Kind.SECOND_LEARNER), Fault(Kind.SUCCESSOR), Fault(Kind.TAKEOVER)],
    "disk": [Fault(Kind.DISK_FULL)],
    "clocks": [Fault(Kind.CLOCK, role, 2.0) for role in ("learner", "worker-0", "feeder")],
    "hostile-records": [Fault(Kind.HOSTILE)],
}
"""By name: what happens, in an order that the seed decides; of each kind the first alone, unless the run is thorough."""
_IN_TURN = [Fault(Kind.KILL, "learner"), Fault(Kind.KILL, "worker-0"), Fault(Kind.KILL, "reward-0"), Fault(Kind.BROKER_KILL, "1", 1.0)]
"""What a run in sequential mode suffers."""
_NEEDS = {"partition": "network", "disk": "disk"}


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_goes_on_and_nothing_is_lost_or_repeated(scene: Scene, seed: int, name: str, outcomes: list[Outcome]) -> None:
    if why := scene.without.get(_NEEDS.get(name, "")):
        pytest.skip(why)
    rng = random.Random(f"{seed}/{name}")
    faults = _tried(SCHEDULES[name])
    for fault in rng.sample(faults, len(faults)):
        outcomes.append(suffer(scene, fault, rng))
    version = scene.follower.version
    assert prove(scene.bus, is_attacked=scene.is_attacked).num_steps >= version, f"seed {seed}: the audit has read less than is in the log"


def test_a_terminated_run_is_gone_and_all_that_it_trained_is_there(scene: Scene, seed: int) -> None:
    """Behind the schedules: after it there is no run."""
    _drain(scene)
    prove(scene.bus, is_attacked=scene.is_attacked)


def test_it_goes_on_in_sequential_mode_and_neither_loses_nor_repeats_there(scene: Scene, seed: int, outcomes: list[Outcome]) -> None:
    _drain(scene)
    before = scene.follower.version
    scene.swarm.change({"ECHO_RUN__MODE": "sequential"})
    scene.swarm.start_all()
    scene.wait_for(before + 1, _GOES_ON_WITHIN_S, "the run goes on in sequential mode")
    rng = random.Random(f"{seed}/sequential")
    faults = _tried(_IN_TURN)
    for fault in rng.sample(faults, len(faults)):
        outcomes.append(suffer(scene, fault, rng))
    _drain(scene)
    assert prove(scene.bus, is_attacked=scene.is_attacked).num_steps >= scene.follower.version


def test_the_weights_come_out_of_the_log_again(scene: Scene) -> None:
    """Last: of a run whose learner was killed, frozen, fenced, out of space and put into another mode."""
    assert num_sessions(scene.bus) > 1, "no learner has ended: there is nothing to show"
    retrain(scene.swarm, scene.follower.version if IS_THOROUGH else min(scene.follower.version, _VERSIONS_RETRAINED))


def _tried(faults: list[Fault]) -> list[Fault]:
    return faults if IS_THOROUGH else list({fault.kind: fault for fault in reversed(faults)}.values())


def _drain(scene: Scene) -> None:
    """Nothing runs, and everybody ended as told."""
    swarm = scene.swarm
    swarm.terminate_all()
    codes = {name: swarm.wait_ended(swarm.child(name), Deadline.after(_DRAINED_S), scene.wait) for name in swarm.names}
    assert set(codes.values()) <= ENDED_AS_TOLD, codes
