"""Whose namespace it is, before a role joins a group or fences anybody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_memory import MemoryCluster
from echo_runtime.ownership import await_turn
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress
from echo_schemas.topics import PROGRESS
from echo_settings import Settings

SPACE = Namespace("echo.test")
WAIT_S = 30.0


@dataclass
class Scene:
    """One namespace, and a role of run `demo` that asks whose it is, on a thread of its own."""

    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    outcome: list[bool | BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cluster.admin().create_topics([NewTopic(SPACE.topic(PROGRESS), num_partitions=1, replication_factor=1)])
        self.bus = Bus(
            cluster=self.cluster,
            namespace=SPACE,
            role="feeder",
            run_id="demo",
        )
        self.publisher = self.bus.publisher()

    def speak(self, run_id: str = "demo", session: str = "s") -> None:
        progress = Progress(
            run_id=run_id,
            session=session,
            version=0,
            published=0,
            groups_trained=0,
            groups_dropped=0,
            groups_ready=0,
            next_seq=0,
            time_ms=1,
        )
        self.publisher.publish(PROGRESS, progress).wait(WAIT_S)

    def process(self, start: str = "") -> RoleProcess:
        registry, clock = CollectorRegistry(), SystemClock()
        settings = Settings.model_validate({"run": {"name": "demo"}})
        return RoleProcess(
            settings=settings, bus=replace(self.bus), registry=registry, places=PlaceTimes(registry, clock), clock=clock, stop=StopSignal(),
            start=start,
        )  # fmt: skip

    @contextmanager
    def asking(self, *, start: str = "", needs_learner: bool = True) -> Iterator[threading.Thread]:
        process = self.process(start)

        def ask() -> None:
            try:
                self.outcome.append(await_turn(process, needs_learner=needs_learner))
            except UserError as exc:
                self.outcome.append(exc)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield thread
        finally:
            process.stop.set()
            thread.join(WAIT_S)

    def speak_until_answered(self, thread: threading.Thread, **who: Any) -> bool | BaseException:
        for _ in range(int(WAIT_S / 0.05)):
            self.speak(**who)
            thread.join(0.05)
            if not thread.is_alive():
                return self.outcome[0]
        raise AssertionError("waited for the role's decision")


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    with suppress(Exception):
        made.publisher.close()


def test_where_no_other_run_ever_was_a_worker_begins_at_once(scene: Scene) -> None:
    scene.speak()
    assert await_turn(scene.process(), needs_learner=False)


@pytest.mark.parametrize("needs_learner", [True, False])
def test_a_namespace_of_a_living_run_is_refused(scene: Scene, needs_learner: bool) -> None:
    scene.speak("other", "before")
    with scene.asking(needs_learner=needs_learner) as thread:
        refused = scene.speak_until_answered(thread, run_id="other", session="before")
    assert isinstance(refused, UserError)
    assert "belongs to run 'other', whose learner is alive (session before)" in refused.message


def test_a_run_that_fell_silent_holds_nobody_up_for_long(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_runtime.ownership.SILENCE_S", 0.1)
    scene.speak("other")
    assert await_turn(scene.process(), needs_learner=False)


def test_whoever_asks_for_work_waits_for_a_learner_that_lives(scene: Scene) -> None:
    scene.speak(session="died long ago")
    with scene.asking() as thread:
        thread.join(0.3)
        assert thread.is_alive(), "a record of an earlier learner has been taken for a living one"
        assert scene.speak_until_answered(thread, session="lives") is True


def test_roles_that_were_started_together_wait_for_their_own_learner(scene: Scene) -> None:
    """A second `up` of a run: its feeder hears the first one's learner, and must not fence the first one's feeder."""
    with scene.asking(start="b7") as thread:
        for _ in range(6):
            scene.speak(session="a4c0ffee")
            thread.join(0.05)
        assert thread.is_alive(), "the learner of another start was taken for its own"
        assert scene.speak_until_answered(thread, session="b7c0ffee") is True


def test_a_learner_of_this_start_that_has_spoken_already_is_enough(scene: Scene) -> None:
    scene.speak(session="b7c0ffee")
    with scene.asking(start="b7") as thread:
        thread.join(WAIT_S)
        assert scene.outcome == [True]


def test_whoever_is_told_to_stop_waits_no_longer(scene: Scene) -> None:
    with scene.asking():
        pass
    assert scene.outcome == [False]
