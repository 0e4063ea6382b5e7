"""The faults: what each does to a scene, until it is over."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import pytest

from echo_bus.clock import Deadline
from tests.chaos.cluster import NUM_BROKERS
from tests.chaos.hostile import inject_hostile
from tests.chaos.scene import Scene
from tests.chaos.swarm import said_by

ROLES = ("learner", "worker-0", "reward-0", "feeder")
_ENDS_WITHIN_S = 240.0
_BROKER_S = 240.0
_LATENCY_S = 0.1
_CLOCK_STEP_S = 3_600.0


class Kind(StrEnum):
    """What is done."""

    KILL = "kill -9"
    KILL_ALL = "kill -9 of every role at once"
    FREEZE = "SIGSTOP, SIGCONT"
    BROKER_KILL = "broker: kill -9, started again"
    BROKER_FREEZE = "broker: SIGSTOP, SIGCONT"
    ROLLING_RESTART = "brokers: rolling restart"
    LATENCY = "network: 100 ms more, each way"
    SILENCE = "network: packets to one broker lost"
    HALF_OPEN = "network: connections to one broker half open"
    RESET = "network: connections to one broker reset"
    PARTITION = "network: the worker's cable pulled"
    SECOND_LEARNER = "a second learner beside the first"
    TAKEOVER = "a second learner with --takeover"
    SUCCESSOR = "learner frozen, succeeded, woken"
    DISK_FULL = "the checkpoint's disk full"
    CLOCK = "clock an hour off, and right again"
    HOSTILE = "hostile records on eight topics"


@dataclass(frozen=True, slots=True)
class Fault:
    """`target`: a role, a broker's number from 0, or nothing. `seconds`: how long it lasts."""

    kind: Kind
    target: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [self.kind.value, f"of {self.target}" if self.target else "", f"for {self.seconds:.1f} s" if self.seconds else ""]
        return " ".join(filter(None, parts))

    @property
    def row(self) -> str:
        """Which row of the table counts it: brokers are all alike."""
        return f"{self.kind.value}: {self.target}" if self.target in ROLES else self.kind.value


_NEEDS = {Kind.PARTITION: "network", Kind.DISK_FULL: "disk"}
_OF_ROLES = (Kind.KILL, Kind.FREEZE, Kind.CLOCK)
_OF_BROKERS = (Kind.BROKER_KILL, Kind.BROKER_FREEZE, Kind.SILENCE, Kind.HALF_OPEN, Kind.RESET)
_LASTING = (
    Kind.FREEZE,
    Kind.BROKER_KILL,
    Kind.BROKER_FREEZE,
    Kind.LATENCY,
    Kind.SILENCE,
    Kind.RESET,
    Kind.PARTITION,
    Kind.DISK_FULL,
    Kind.CLOCK,
)


def draw(rng: random.Random, num_faults: int, *, longest_s: float, without: Mapping[str, str]) -> list[Fault]:
    """A schedule: every kind that this machine allows in turn, each time in another order, on targets and for times drawn at random."""
    kinds: list[Kind] = []
    allowed = [kind for kind in Kind if _NEEDS.get(kind) not in without]
    # A killed or frozen role is the everyday fault, and each of the four is another one.
    allowed += [Kind.KILL, Kind.FREEZE] * (len(ROLES) - 1) + [Kind.BROKER_KILL, Kind.BROKER_FREEZE]
    while len(kinds) < num_faults:
        kinds += rng.sample(allowed, len(allowed))
    turns = {Kind.KILL: 0, Kind.FREEZE: 0, Kind.CLOCK: 0}
    found = []
    for kind in kinds[:num_faults]:
        target = ""
        if kind in _OF_ROLES:
            target, turns[kind] = ROLES[turns[kind] % len(ROLES)], turns[kind] + 1
        elif kind in _OF_BROKERS:
            target = str(rng.randrange(NUM_BROKERS))
        found.append(Fault(kind, target, longest_s ** rng.random() if kind in _LASTING else 0.0))
    return found


def inject(scene: Scene, fault: Fault, rng: random.Random) -> None:
    """Do it, and end it; returns when only its consequences are left."""
    _INJECTORS[fault.kind](scene, fault, rng)


def _kill(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.swarm.kill(fault.target)
    scene.swarm.start(fault.target)


def _kill_all(scene: Scene, fault: Fault, rng: random.Random) -> None:
    for name in scene.swarm.names:
        scene.swarm.kill(name)
    scene.swarm.start_all()


def _freeze(scene: Scene, fault: Fault, rng: random.Random) -> None:
    frozen = scene.swarm.child(fault.target)
    scene.swarm.freeze(frozen)
    scene.pause(fault.seconds)
    scene.swarm.thaw(frozen)


def _broker_kill(scene: Scene, fault: Fault, rng: random.Random) -> None:
    node = scene.kafka.nodes[int(fault.target)]
    node.kill()
    scene.pause(fault.seconds)
    node.start(_BROKER_S)


def _broker_freeze(scene: Scene, fault: Fault, rng: random.Random) -> None:
    node = scene.kafka.nodes[int(fault.target)]
    node.suspend()
    scene.pause(fault.seconds)
    node.resume()


def _rolling_restart(scene: Scene, fault: Fault, rng: random.Random) -> None:
    for node in scene.kafka.nodes:
        node.terminate(_BROKER_S)
        node.start(_BROKER_S)
        # As an operator does: the next one only when the run has felt that this one is back.
        scene.wait_for(scene.follower.version + 1, _ENDS_WITHIN_S, f"broker {node.node_id} is back")


def _latency(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.proxies.slow(_LATENCY_S, range(NUM_BROKERS))
    scene.pause(fault.seconds)
    scene.proxies.heal()


def _silence(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.proxies.silence(int(fault.target))
    scene.pause(fault.seconds)
    scene.proxies.heal()


def _half_open(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.proxies.cut_half_open(int(fault.target))


def _reset(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.proxies.reset(int(fault.target), refuse=True)
    scene.pause(fault.seconds)
    scene.proxies.heal()


def _partition(scene: Scene, fault: Fault, rng: random.Random) -> None:
    assert scene.network is not None, "a schedule for this machine has no partitions"
    scene.network.pull_cable()
    try:
        scene.pause(fault.seconds)
    finally:
        scene.network.plug_cable()


def _second_learner(scene: Scene, fault: Fault, rng: random.Random) -> None:
    second = scene.swarm.start_second("learner")
    code = scene.swarm.wait_ended(second, Deadline.after(_ENDS_WITHIN_S), scene.pause)
    said = said_by(second)
    assert code != 0, f"a second learner did not refuse to start: {said[-2_000:]}"
    assert "A learner is alive" in said, f"a second learner ended for another reason: {said[-2_000:]}"


def _takeover(scene: Scene, fault: Fault, rng: random.Random) -> None:
    _succeed(scene, "--takeover", is_frozen=False)


def _successor(scene: Scene, fault: Fault, rng: random.Random) -> None:
    _succeed(scene, is_frozen=True)


def _succeed(scene: Scene, *arguments: str, is_frozen: bool) -> None:
    """A second learner takes the run over; the first notices as soon as it runs, says so and ends."""
    swarm = scene.swarm
    first = swarm.child("learner")
    if is_frozen:
        swarm.freeze(first)
    second = swarm.start_second("learner", *arguments)
    swarm.adopt("learner", second)
    scene.wait_until(
        lambda: second.poll() is not None or "Going on from version" in said_by(second), _ENDS_WITHIN_S, "a second learner goes on"
    )
    if second.poll() is not None:
        # The run is the first one's still, and the next fault finds it so.
        swarm.adopt("learner", first)
        swarm.thaw(first)
        pytest.fail(f"the second learner ended by itself: {said_by(second)[-2_000:]}")
    if is_frozen:
        scene.wait_for(scene.follower.version + 1, _ENDS_WITHIN_S, "the successor trains")
        swarm.thaw(first)
    code = swarm.wait_ended(first, Deadline.after(_ENDS_WITHIN_S), scene.pause)
    said = said_by(first)
    assert code != 0, "a learner that was fenced ended as if it were done"
    assert "taken this namespace over" in said, f"the first learner ended without saying why: {said[-2_000:]}"


def _disk_full(scene: Scene, fault: Fault, rng: random.Random) -> None:
    assert scene.disk is not None, "a schedule for this machine fills no disk"
    known = len(scene.swarm.exits)
    scene.disk.fill()
    try:
        scene.pause(fault.seconds)

        def has_ended() -> bool:
            scene.swarm.tend()
            return any(each.name == "learner" for each in scene.swarm.exits[known:])

        scene.wait_until(has_ended, _ENDS_WITHIN_S, "the learner ends for want of space")
        ended = next(each for each in scene.swarm.exits[known:] if each.name == "learner")
        assert "could not be written to" in " ".join(ended.last_words), f"the learner ended for another reason: {ended.last_words}"
    finally:
        scene.disk.free()


def _clock(scene: Scene, fault: Fault, rng: random.Random) -> None:
    step_s = rng.choice((-1, 1)) * _CLOCK_STEP_S
    scene.swarm.step_clock(fault.target, step_s)
    scene.pause(fault.seconds)
    scene.swarm.step_clock(fault.target, 0.0)


def _hostile(scene: Scene, fault: Fault, rng: random.Random) -> None:
    scene.is_attacked = True
    inject_hostile(scene.bus, scene.kafka.bootstrap, rng)


_INJECTORS: Mapping[Kind, Callable[[Scene, Fault, random.Random], None]] = {
    Kind.KILL: _kill,
    Kind.KILL_ALL: _kill_all,
    Kind.FREEZE: _freeze,
    Kind.BROKER_KILL: _broker_kill,
    Kind.BROKER_FREEZE: _broker_freeze,
    Kind.ROLLING_RESTART: _rolling_restart,
    Kind.LATENCY: _latency,
    Kind.SILENCE: _silence,
    Kind.HALF_OPEN: _half_open,
    Kind.RESET: _reset,
    Kind.PARTITION: _partition,
    Kind.SECOND_LEARNER: _second_learner,
    Kind.TAKEOVER: _takeover,
    Kind.SUCCESSOR: _successor,
    Kind.DISK_FULL: _disk_full,
    Kind.CLOCK: _clock,
    Kind.HOSTILE: _hostile,
}
