"""The supervisor with children that do as the test says, and a clock that moves as it looks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_bus.client.kafka import CLIENT_LOG
from echo_bus.clock import ManualClock
from echo_embedded.memory import OutOfMemoryWatch
from echo_ops.roles import Role
from echo_ops.supervisor.child import Crew, RoleDied
from echo_ops.supervisor.plan import ChildPlan
from echo_ops.supervisor.supervisor import RunEnd, Supervisor
from echo_schemas.errors import UserError

pytestmark = pytest.mark.slow


class FakeChild:
    """Runs until told otherwise; ends `drain_s` after it was asked to, or never."""

    def __init__(self, plan: ChildPlan, clock: ManualClock, story: list[str], drain_s: float | None = 0.0) -> None:
        self.plan = plan
        self.log_start = 0
        self.code: int | None = None
        self._clock, self._story, self._drain_s = clock, story, drain_s
        self._asked_s: float | None = None

    def poll(self) -> int | None:
        drains = self.code is None and self._asked_s is not None and self._drain_s is not None
        if drains and self._clock.monotonic_s() >= (self._asked_s or 0.0) + (self._drain_s or 0.0):
            self.code = 0
        return self.code

    def terminate(self) -> None:
        if self.code is None:
            self._story.append(f"term {self.plan.name}")
            self._asked_s = self._clock.monotonic_s()

    def kill(self) -> None:
        if self.code is None:
            self._story.append(f"kill {self.plan.name}")
            self.code = -signal.SIGKILL


class Scene:
    """A whole run around fakes. `at` says what happens on which tick."""

    def __init__(self, tmp_path: Path, *, stubborn: str = "", broker_error: Exception | None = None, allocator: Role = Role.FEEDER) -> None:
        self.clock = ManualClock()
        self.story: list[str] = []
        self.said: list[str] = []
        self.at: dict[int, Callable[[], None]] = {}
        self._ticks = 0
        self._broker_error = broker_error
        self.prepared = threading.Event()
        self._stubborn = stubborn
        self._allocator = allocator
        self._tmp_path = tmp_path
        self.children: dict[str, FakeChild] = {}
        self.crew = Crew(self._launch, self.clock)
        self.released: set[str] = set()
        self.supervisor = Supervisor(self.crew, self, self, self.clock, drain_s=3.0, released=lambda: self.released)

    def _launch(self, plan: ChildPlan) -> FakeChild:
        child = FakeChild(plan, self.clock, self.story, None if plan.name == self._stubborn else 0.0)
        self.children[plan.name] = child
        return child

    def prepare(self) -> None:
        self.prepared.set()

    def conclude(self) -> None:
        self.story.append("conclude")

    def start(self) -> None:
        if self._broker_error is not None:
            raise self._broker_error

    def stop(self) -> None:
        self.story.append("kafka down")

    def tick(self) -> None:
        assert self._broker_error is not None or self.prepared.wait(60), "waited for the preparation"
        self._ticks += 1
        self.clock.advance(1.0)
        assert self._ticks < 500, f"the run does not end: {self.story}"
        self.at.pop(self._ticks, lambda: None)()

    def say(self, line: str) -> None:
        self.said.append(line)

    def run(self) -> RunEnd:
        names: dict[Role, tuple[str, ...]] = {Role.WORKER: ("worker-0", "worker-1"), Role.LEARNER: ("learner",), Role.REWARD: ("reward-0",)}
        names[self._allocator] = (self._allocator.value,)
        return self.supervisor.run([self._plan(role, name) for role, found in names.items() for name in found])

    def _plan(self, role: Role, name: str) -> ChildPlan:
        log = self._tmp_path / f"{name}.log"
        log.write_text("".join(f"line {number}\n" for number in range(40)))
        announce = self._tmp_path / f"{name}.json"
        announce.touch()
        return ChildPlan(role=role, name=name, command=(), environ={}, cores=(), log=log, announce=announce)

    def announced(self) -> list[str]:
        """Whom monitoring looks for."""
        return sorted(path.stem for path in self._tmp_path.glob("*.json"))

    def ends(self, name: str, code: int) -> Callable[[], None]:
        def end() -> None:
            self.children[name].code = code

        return end


def test_a_run_ends_when_its_learner_has_finished_and_all_others_are_drained_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[3] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    assert sorted(scene.story[:4]) == ["term feeder", "term reward-0", "term worker-0", "term worker-1"]
    assert scene.story[4:] == ["conclude", "kafka down"]


def test_an_interrupt_drains_all_at_once_and_kafka_goes_last(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[2] = scene.supervisor.interrupt
    assert scene.run() is RunEnd.INTERRUPTED
    assert sorted(scene.story[:5]) == ["term feeder", "term learner", "term reward-0", "term worker-0", "term worker-1"]
    assert scene.story[5:] == ["conclude", "kafka down"]
    assert scene.said == ["Draining"]


def test_a_role_that_does_not_end_itself_in_time_is_killed(tmp_path: Path) -> None:
    scene = Scene(tmp_path, stubborn="worker-1")
    scene.at[2] = scene.supervisor.interrupt
    assert scene.run() is RunEnd.INTERRUPTED
    assert [line for line in scene.story if line.startswith("kill")] == ["kill worker-1"]
    assert any(line.startswith("worker-1 did not drain in time") and "worker-1.log" in line for line in scene.said)


def test_a_second_interrupt_ends_everything_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, stubborn="worker-0")
    scene.at[2] = scene.supervisor.interrupt
    scene.at[4] = scene.supervisor.interrupt
    assert scene.run() is RunEnd.INTERRUPTED
    assert "kill worker-0" in scene.story
    assert scene.said == ["Draining"], "it waited for the drain"
    assert "worker-0" not in scene.announced()
    assert scene.story[-1] == "kafka down"


def test_a_signal_of_the_operating_system_interrupts_and_the_handlers_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    scene = Scene(tmp_path)
    scene.at[2] = lambda: signal.raise_signal(signal.SIGTERM)
    assert scene.run() is RunEnd.INTERRUPTED
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_takes_no_lock_that_the_interrupted_code_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Condition, "__enter__", lambda _self: pytest.fail("the handler takes a lock"))
            signal.raise_signal(signal.SIGINT)

    scene = Scene(tmp_path)
    scene.at[2] = interrupt
    assert scene.run() is RunEnd.INTERRUPTED


def test_logged_episodes_may_be_in_the_log_long_before_the_last_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path, allocator=Role.OFFLINE)
    scene.at[2] = scene.ends("offline", 0)
    scene.at[6] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    failing = Scene(tmp_path, allocator=Role.OFFLINE)
    failing.at[2] = failing.ends("offline", 1)
    with pytest.raises(RoleDied, match="The offline ended with exit code 1"):
        failing.run()


def test_a_feeder_that_was_told_to_stop_ends_before_its_learner(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[2] = scene.ends("feeder", 0)
    scene.at[6] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    failing = Scene(tmp_path)
    failing.at[2] = failing.ends("feeder", 1)
    with pytest.raises(RoleDied, match="The feeder ended with exit code 1"):
        failing.run()


def test_a_run_goes_on_without_a_worker_as_long_as_another_works(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[3] = scene.ends("worker-1", 1)
    scene.at[9] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    (said,) = scene.said
    assert said.startswith("worker-1 ended with exit code 1; the run goes on with the other workers")
    assert "worker-1.log" in said


def test_a_worker_that_is_released_ends_and_starts_again_when_it_is_called(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[3] = lambda: scene.released.add("worker-1")
    scene.at[8] = scene.released.clear
    scene.at[12] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    assert scene.said == ["worker-1 is not needed: its process ends", "worker-1 is called: its process starts"]
    assert scene.story.count("term worker-1") == 2, "once for the order, once for the drain"


def test_a_worker_is_not_started_again_before_it_has_ended(tmp_path: Path) -> None:
    scene = Scene(tmp_path, stubborn="worker-1")
    scene.at[3] = lambda: scene.released.add("worker-1")
    scene.at[5] = scene.released.clear
    scene.at[9] = scene.ends("worker-1", 0)
    scene.at[12] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    assert len(scene.said) == 3, "ended, started, killed at the end for it does not drain"


def test_the_last_worker_may_die_while_another_can_be_called(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[3] = lambda: scene.released.add("worker-1")
    scene.at[5] = scene.ends("worker-0", -signal.SIGKILL)
    scene.at[8] = scene.released.clear
    scene.at[12] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    assert "worker-1 is called: its process starts" in scene.said


def test_the_last_worker_that_dies_ends_the_run(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.at[3] = scene.ends("worker-1", -signal.SIGKILL)
    scene.at[5] = scene.ends("worker-0", 0)
    with pytest.raises(RoleDied, match="The worker 'worker-0' ended with exit code 0"):
        scene.run()
    assert len(scene.said) == 1


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("learner", 1, "The learner ended with exit code 1"),
        ("reward-0", -signal.SIGKILL, "The reward 'reward-0' was killed by SIGKILL"),
    ],
)
def test_a_role_that_dies_ends_the_run_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, words: str
) -> None:
    monkeypatch.setattr(OutOfMemoryWatch, "verdict", lambda watch: "Somebody sent it.")
    scene = Scene(tmp_path)
    scene.at[3] = scene.ends(name, code)
    with pytest.raises(RoleDied, match=words) as raised:
        scene.run()
    assert raised.value.exit_code == code
    assert [line.strip() for line in raised.value.message.splitlines()[1:]] == [f"line {number}" for number in range(25, 40)]
    assert str(tmp_path / f"{name}.log") in raised.value.hint
    assert ("Somebody sent it" in raised.value.hint) == (code == -signal.SIGKILL)
    assert all(child.code is not None for child in scene.children.values())
    assert scene.announced() == [name], "the others were ended, and nobody shall be called for them"
    assert scene.story[-2:] == ["conclude", "kafka down"]


def test_what_clients_say_of_connections_does_not_bury_the_error(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    ends = scene.ends("learner", 1)

    def end() -> None:
        with (tmp_path / "learner.log").open("a") as file:
            file.write("the error\n" + f"12:00:00 E {CLIENT_LOG}: FAIL [rdkafka#consumer-1] Connect failed\n" * 100)
        ends()

    scene.at[3] = end
    with pytest.raises(RoleDied) as raised:
        scene.run()
    lines = raised.value.message.splitlines()
    assert lines[-1].strip() == "the error"
    assert CLIENT_LOG not in raised.value.message


def test_a_mistake_in_the_file_ends_the_run_as_such(tmp_path: Path) -> None:
    """The command's exit code is then 2, as if it had found the mistake itself."""
    scene = Scene(tmp_path)
    scene.at[3] = scene.ends("worker-0", 2)
    scene.at[4] = scene.ends("worker-1", 2)
    with pytest.raises(UserError, match="The worker 'worker-0' ended with exit code 2"):
        scene.run()


def test_the_last_words_are_of_this_attempt(tmp_path: Path) -> None:
    scene = Scene(tmp_path)

    def end() -> None:
        child = scene.children["learner"]
        child.log_start = child.plan.log.stat().st_size
        with child.plan.log.open("a", encoding="utf-8") as log:
            log.write("of this attempt\n")
        child.code = 1

    scene.at[3] = end
    with pytest.raises(RoleDied) as raised:
        scene.run()
    assert [line.strip() for line in raised.value.message.splitlines()[1:]] == ["of this attempt"]


def test_a_broker_that_does_not_start_ends_the_run_with_its_error(tmp_path: Path) -> None:
    scene = Scene(tmp_path, broker_error=UserError("Port 9 is taken."))
    with pytest.raises(UserError, match="Port 9"):
        scene.run()
    assert all(child.code is not None for child in scene.children.values())
    assert "conclude" not in scene.story
    assert scene.story[-1] == "kafka down"


def test_who_was_told_to_end_is_not_missed_by_whoever_watches(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for name in ("learner", "worker-0"):
        (tmp_path / f"{name}.json").write_text("[]")
    scene.at[2] = scene.ends("learner", 0)
    assert scene.run() is RunEnd.FINISHED
    assert not list(tmp_path.glob("*.json"))
