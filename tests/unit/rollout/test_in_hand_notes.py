"""What workers note beside the group's offsets: a death counts, a departure does not, and nothing foreign is believed."""

from __future__ import annotations

import asyncio
import json
import threading
from unittest.mock import Mock

import pytest

from echo_bus.group.notes import MAX_NOTE_LENGTH, NoteKeeper
from echo_rollout.in_hand_notes import InHandNotes
from echo_schemas.records import Coordinates

POISON = Coordinates(partition=1, offset=7)
NEIGHBOUR = Coordinates(partition=1, offset=9)


def notes(session: str = "b") -> InHandNotes:
    return InHandNotes(session=session)


def left_by(owner: InHandNotes, *, leaving: bool = False) -> str:
    return owner.write(POISON.partition, POISON.offset, leaving=leaving)


def test_deaths_are_counted_from_owner_to_owner_and_forgiven_by_an_end() -> None:
    note = ""
    for expected in range(3):
        owner = notes(f"session {expected}")
        owner.found(POISON.partition, note, 0)
        assert (owner.deaths(POISON), owner.deaths(NEIGHBOUR)) == (expected, min(expected, 1))
        owner.begin(POISON)
        if expected == 0:
            owner.begin(NEIGHBOUR)
        note = left_by(owner)
    last = notes("last")
    last.found(POISON.partition, note, 0)
    assert (last.deaths(POISON), last.deaths(NEIGHBOUR)) == (3, 1)
    last.end(POISON)
    last.end(NEIGHBOUR)
    assert left_by(last) == ""


def test_who_hands_a_partition_over_alive_leaves_no_suspicion_but_the_old_one() -> None:
    owner, other = notes("a"), notes("b")
    owner.found(POISON.partition, json.dumps({"by": "dead", "in_hand": [POISON.offset], "deaths": {}}), 0)
    owner.begin(POISON)
    owner.begin(NEIGHBOUR)
    other.found(POISON.partition, left_by(owner, leaving=True), 0)
    assert (other.deaths(POISON), other.deaths(NEIGHBOUR)) == (1, 0)


def test_what_may_be_why_a_worker_ends_stays_noted_as_it_leaves() -> None:
    owner, other = notes("a"), notes("b")
    owner.begin(POISON)
    owner.blames = True
    other.found(POISON.partition, left_by(owner, leaving=True), 0)
    assert other.deaths(POISON) == 1


def test_who_loses_a_partition_and_gets_it_back_has_not_died() -> None:
    owner = notes()
    owner.begin(POISON)
    note = left_by(owner)
    owner.found(POISON.partition, note, 0)
    assert owner.deaths(POISON) == 0
    assert left_by(owner) == note, "it is in hand still"


def test_what_lies_below_the_committed_offset_is_over() -> None:
    owner = notes()
    owner.found(1, json.dumps({"by": "a", "in_hand": [3, 7], "deaths": {"3": 1}}), 0)
    owner.begin(NEIGHBOUR)
    assert json.loads(left_by(owner)) == {"by": "b", "in_hand": [9], "deaths": {"7": 1}}
    assert owner.deaths(Coordinates(partition=1, offset=3)) == 0


def test_a_note_fits_however_much_is_in_hand_and_keeps_the_oldest() -> None:
    owner = notes()
    owner.found(1, json.dumps({"by": "a", "in_hand": list(range(7, 400)), "deaths": {}}), 0)
    for offset in range(7, 2_000):
        owner.begin(Coordinates(partition=1, offset=offset))
    note = left_by(owner)
    assert len(note) <= MAX_NOTE_LENGTH
    assert json.loads(note)["in_hand"][0] == 7
    assert json.loads(note)["deaths"]["7"] == 1


@pytest.mark.parametrize("note", ["of another tool", "[]", "3", '{"by": "a"}', '{"by": "a", "in_hand": ["x"], "deaths": {}}'])
def test_what_is_not_ours_says_nothing(note: str) -> None:
    owner = notes()
    owner.found(1, note, 0)
    assert owner.deaths(POISON) == 0


def test_only_a_request_that_may_have_been_in_hand_before_waits_for_its_note(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("echo_rollout.in_hand_notes._PATIENCE_S", 0.02)
    owner = notes()
    owner.found(1, "", NEIGHBOUR.offset)

    async def begin() -> list[str]:
        story: list[str] = []
        owner.changed = lambda: story.append("asked for a commit")
        await owner.noted(NEIGHBOUR)
        story.append("what came later goes on")
        monkeypatch.setattr("echo_rollout.in_hand_notes._PATIENCE_S", 60.0)
        owner.begin(POISON)
        waiting = asyncio.create_task(owner.noted(POISON))
        await asyncio.sleep(0)
        assert not waiting.done()
        threading.Thread(target=lambda: owner.written(1, left_by(owner))).start()
        await waiting
        story.append("noted")
        await owner.noted(POISON)
        story.append("it stands there")
        return story

    assert asyncio.run(begin()) == [
        *("what came later goes on", "asked for a commit", "asked for a commit", "noted", "it stands there"),
    ]
    assert not caplog.records


def test_a_group_that_takes_no_note_stops_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("echo_rollout.in_hand_notes._PATIENCE_S", 0.02)
    owner = notes()
    owner.found(1, "", 100)
    asyncio.run(owner.noted(POISON))
    assert "1[7] is begun without a note" in caplog.text


def test_who_waits_for_a_note_as_the_worker_stops_does_not_begin() -> None:
    owner = notes()
    owner.found(1, "", 100)

    async def stop() -> list[bool]:
        waiting = asyncio.create_task(owner.noted(POISON))
        await asyncio.sleep(0)
        owner.stop()
        return [await waiting, await owner.noted(NEIGHBOUR)]

    assert asyncio.run(stop()) == [False, False]


def test_who_gets_no_partition_asks_for_no_notes() -> None:
    keeper, consumer = NoteKeeper(), Mock()
    keeper.notes = notes()
    keeper.read(consumer, [])
    assert not consumer.method_calls
