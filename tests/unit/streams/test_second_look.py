"""What the learner misses a reward of is judged again, if it is ours and nobody has it in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the pipeline's learner is torch's neighbour: install the extra 'learner'")

from echo_bus.clock import ManualClock
from echo_bus.errors import DeadlineExceeded
from echo_schemas.records import Coordinates, MissingRewards
from echo_streams.processing import Outgoing
from echo_streams.scoring import Judgeable
from echo_streams.second_look import SecondLook, read_again
from tests.unit.core.records import trajectory
from tests.unit.learner.pipeline import Pipeline

WAIT_S = 60.0


def places(*offsets: int, partition: int = 0) -> tuple[Coordinates, ...]:
    return tuple(Coordinates(partition=partition, offset=offset) for offset in offsets)


def missing(*where: Coordinates, rewards: tuple[str, ...] = ("exact",)) -> MissingRewards:
    return MissingRewards(run_id="demo", session="s", rewards=rewards, where=where, time_ms=1)


class Stage:
    """A process that has committed offsets below 10 of partition 0, and has no other."""

    def __init__(self) -> None:
        self.named: MissingRewards | None = None
        self.read: list[Coordinates] = []
        self.sent: list[Outgoing] = []
        self.failures: list[Exception] = []
        self.clock = ManualClock()
        self.second_look = SecondLook(
            names=frozenset({"exact", "brevity"}),
            missing=lambda: self.named,
            committed=lambda partition: 10 if partition == 0 else None,
            read=self._read,
            judge=self._judge,
            send=self._send,
            clock=self.clock,
        )

    def _read(self, wanted: Sequence[Coordinates]) -> list[Judgeable]:
        self.read += wanted
        return [Judgeable(trajectory=trajectory(where.offset), at=where) for where in wanted]

    async def _judge(self, items: Sequence[Judgeable]) -> list[Outgoing]:
        return [Outgoing("rewards", item.at.partition, b"key", b"reward", []) for item in items]

    async def _send(self, answers: list[Outgoing]) -> None:
        if self.failures:
            raise self.failures.pop(0)
        self.sent += answers

    def look(self, named: MissingRewards | None) -> list[Coordinates]:
        self.named, self.read = named, []
        asyncio.run(self.second_look.look())
        return self.read


def test_what_is_done_and_without_a_reward_is_judged_again_once_a_minute() -> None:
    stage = Stage()
    assert not stage.look(None)
    assert stage.look(missing(*places(3, 9, 10), *places(2, partition=1))) == list(places(3, 9))
    assert len(stage.sent) == 2
    assert stage.look(missing(*places(3, 4, 9))) == list(places(4))
    stage.clock.advance(60.0)
    assert stage.look(missing(*places(3))) == list(places(3))


def test_a_look_that_fails_is_told_and_is_not_the_last(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("echo_streams.second_look._LOOK_EVERY_S", 0.0)
    stage = Stage()
    stage.failures = [RuntimeError("The producer has not started."), DeadlineExceeded("The log is silent.")]

    async def run() -> None:
        running = asyncio.create_task(stage.second_look.run())
        async with asyncio.timeout(WAIT_S):
            for where in places(3, 4, 5):
                stage.named = missing(where)
                while where not in stage.read and not running.done():
                    await asyncio.sleep(0)
            while not stage.sent and not running.done():
                await asyncio.sleep(0)
        running.cancel()

    asyncio.run(run())
    assert stage.read == list(places(3, 4, 5))
    assert len(stage.sent) == 1
    assert "could not be scored again" in caplog.text
    assert "The log is silent." in caplog.text


def test_rewards_of_other_applications_are_left_to_them() -> None:
    assert not Stage().look(missing(*places(3), rewards=("judge",)))


def test_the_records_are_read_by_their_places_from_the_log(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path)
    written = [where for seq in range(4) for where in pipeline.write_group(seq, values=(None, None))]
    wanted = [written[1], written[6], Coordinates(partition=0, offset=10_000)]
    found = read_again(pipeline.bus, wanted)
    assert {item.at for item in found} == set(wanted[:2])
    assert {item.trajectory.seq for item in found} == {0, 3}
