"""A reward process as a static member of its group: its name, its assignments, and another process under its name."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

from aiokafka.structs import TopicPartition

from echo_bus.clock import ManualClock
from echo_bus.errors import MemberReplaced
from echo_bus.group.replacements import Replacements
from echo_streams.application_run import static_member
from echo_streams.driver import ConsumerThread, RebalanceListener

MINE = [TopicPartition("unit.trajectories", 0)]


def test_a_process_without_a_name_is_no_static_member_and_a_name_belongs_to_one_machine() -> None:
    assert static_member("reward") is None
    assert static_member("reward.r.1") == f"r.1.{socket.gethostname()}"


def test_five_replacements_within_a_minute_mean_another_process() -> None:
    clock = ManualClock()
    replacements = Replacements(clock)
    for _ in range(8):
        assert not replacements.add()
        clock.advance(15)
    clock.advance(60)
    assert [replacements.add() for _ in range(5)] == [False, False, False, False, True]


class Thread:
    """The thread of a consumer that is assigned partitions in the `generation` that the test says."""

    def __init__(self, name: str | None) -> None:
        self.app = SimpleNamespace(consumer_generation_id=0, crash_reason=None)
        self.app._crash = lambda reason: setattr(self.app, "crash_reason", reason)
        self.coordinator = SimpleNamespace(generation=0, group_id="unit.reward.main", _group_instance_id=name)
        self.assigned: list[int] = []
        self.left_as: list[str | None] = []
        self._listener = RebalanceListener(cast("ConsumerThread", self))

    def _ensure_consumer(self) -> Any:
        left = lambda: self.left_as.append(self.coordinator._group_instance_id)  # noqa: E731  a method of the consumer
        return SimpleNamespace(_coordinator=self.coordinator, unsubscribe=left)

    async def on_partitions_assigned(self, assigned: set[Any], generation: int) -> None:
        assert (assigned, generation) == (set(MINE), self.app.consumer_generation_id)
        self.assigned.append(generation)

    def assign(self, generation: int) -> None:
        self.coordinator.generation = generation
        asyncio.run(self._listener.on_partitions_assigned(MINE))


def test_each_assignment_has_a_number_of_its_own_whatever_its_generation() -> None:
    thread = Thread("r1")
    for generation in (7, 7, 8, 8):
        thread.assign(generation)
    assert thread.assigned == [1, 2, 3, 4]
    assert thread.app.crash_reason is None


def test_a_member_that_is_replaced_again_and_again_leaves_and_says_what_to_do() -> None:
    thread = Thread("r1")
    for _ in range(5):
        thread.assign(7)
    assert (len(thread.assigned), thread.app.crash_reason) == (5, None)
    thread.assign(7)
    assert len(thread.assigned) == 5
    # aiokafka leaves at once only without the name.
    assert thread.left_as == [None]
    assert isinstance(thread.app.crash_reason, MemberReplaced)
    assert "somebody else joins unit.reward.main as r1." in thread.app.crash_reason.message
    assert "Two processes have the same name" in str(thread.app.crash_reason.hint)


def test_rebalances_and_members_without_a_name_are_no_replacements() -> None:
    busy, nameless = Thread("r1"), Thread(None)
    for number in range(9):
        busy.assign(number)
        nameless.assign(7)
    assert len(busy.assigned) == len(nameless.assigned) == 9
