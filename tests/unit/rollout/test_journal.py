"""A request that kills its worker: worked on alone at the third try, then set aside. Neighbours are not blamed for long."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo_bus.clock import ManualClock
from echo_bus.message import ACCEPTED, BUSY, Accepted, Invalid, Message
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.journal import CrashJournal
from echo_schemas.columns import pack_tokens
from echo_schemas.errors import InvalidReason
from echo_schemas.records import Coordinates, Purpose, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS
from tests.unit.rollout.swarm import LetterCodec

POISON = Coordinates(partition=1, offset=7)
NEIGHBOUR = Coordinates(partition=0, offset=3)


@pytest.fixture
def open_journal(tmp_path: Path) -> Iterator[Callable[..., CrashJournal]]:
    """Opens the journal of one worker, written beforehand if given; closes what it opened."""
    opened: list[CrashJournal] = []

    def open_(before: str | None = None) -> CrashJournal:
        path = tmp_path / "w.journal"
        if before is not None:
            path.write_text(before, encoding="utf-8")
        opened.append(CrashJournal(path))
        return opened[-1]

    yield open_
    for journal in opened:
        journal.close()


def message(where: Coordinates) -> Message:
    request = RolloutRequest(
        run_id="demo",
        group_id=group_id_of("demo", 0),
        seq=0,
        purpose=Purpose.TRAIN,
        task="letters",
        prompt_token_ids=pack_tokens([1]),
        group_size=1,
        sampling=Sampling(max_new_tokens=1),
        required_version=0,
        learner_version=0,
        issued_ms=0,
    )
    return Message(REQUESTS, where.partition, where.offset, None, request, {}, 0, 0)


def intake_of(journal: CrashJournal, take: Callable[[Work], None], clock: ManualClock | None = None) -> RequestIntake:
    return RequestIntake(LetterCodec(), journal, capacity=8, vocabulary=32, max_length=16, take=take, clock=clock or ManualClock())


def test_deaths_are_counted_over_restarts_and_forgiven_by_an_end(open_journal: Callable[..., CrashJournal]) -> None:
    for expected in range(3):
        journal = open_journal()
        assert journal.deaths(POISON) == expected
        journal.begin(POISON)
        journal.begin(NEIGHBOUR)
        journal.end(NEIGHBOUR)
        journal.close()
    journal = open_journal()
    assert (journal.deaths(POISON), journal.deaths(NEIGHBOUR)) == (3, 0)
    journal.end(POISON)
    journal.close()
    assert open_journal().deaths(POISON) == 0


def test_a_torn_line_is_passed_over(open_journal: Callable[..., CrashJournal]) -> None:
    journal = open_journal("= 1 7 2\n+ 0 3\n+ 1")
    assert (journal.deaths(POISON), journal.deaths(NEIGHBOUR)) == (2, 1)
    journal.close()


def test_a_long_journal_is_written_anew_and_forgets_nothing_that_counts(
    open_journal: Callable[..., CrashJournal], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("echo_rollout.journal._MOST_LINES", 10)
    journal = open_journal("= 1 7 1\n")
    journal.begin(NEIGHBOUR)
    journal.begin(POISON)
    for offset in range(100, 200):
        journal.begin(Coordinates(partition=2, offset=offset))
        journal.end(Coordinates(partition=2, offset=offset))
    assert len((tmp_path / "w.journal").read_text(encoding="utf-8").splitlines()) < 10 + 3
    journal.close()
    after = open_journal()
    assert (after.deaths(POISON), after.deaths(NEIGHBOUR)) == (2, 1)
    assert all(after.deaths(Coordinates(partition=2, offset=offset)) == 0 for offset in range(100, 200))


def test_a_worker_whose_disk_takes_no_journal_works_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    nowhere = CrashJournal(tmp_path / "file" / "w.journal")
    path = tmp_path / "w.journal"
    path.write_text("= 1 7 2\n", encoding="utf-8")
    with Path("/dev/full").open("ab", buffering=0) as refusing:
        monkeypatch.setattr("echo_rollout.journal._rewritten", lambda *_: refusing)
        full = CrashJournal(path)
        assert [nowhere.deaths(POISON), full.deaths(POISON)] == [0, 2]
        for journal in (nowhere, full):
            for where in (NEIGHBOUR, POISON):
                journal.begin(where)
                journal.end(where)
            assert journal.deaths(POISON) == 0
            journal.close()
    # One sentence each, and no file that would blame the neighbour.
    assert len(caplog.messages) == 2
    assert "No space left on device" in caplog.messages[1]
    assert not path.exists()


def test_a_journal_whose_folder_was_removed_is_made_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("echo_rollout.journal._MOST_LINES", 3)
    (tmp_path / "cache").mkdir()
    journal = CrashJournal(tmp_path / "cache" / "w.journal")
    journal.begin(POISON)
    shutil.rmtree(tmp_path / "cache")
    journal.begin(NEIGHBOUR)
    journal.end(NEIGHBOUR)
    journal.close()
    after = CrashJournal(tmp_path / "cache" / "w.journal")
    assert (after.deaths(POISON), after.deaths(NEIGHBOUR)) == (1, 0)
    after.close()


def test_a_suspect_waits_until_it_is_alone_and_nothing_starts_beside_it(open_journal: Callable[..., CrashJournal]) -> None:
    journal = open_journal("= 1 7 2\n")
    taken: list[Work] = []
    intake = intake_of(journal, taken.append)
    assert isinstance(intake(message(NEIGHBOUR)), Accepted)
    assert intake(message(POISON)) is BUSY
    other = Coordinates(partition=0, offset=4)
    assert intake(message(other)) is BUSY
    intake.done(taken[0])
    assert isinstance(intake(message(POISON)), Accepted)
    assert intake(message(other)) is BUSY
    intake.done(taken[1])
    assert isinstance(intake(message(other)), Accepted)


def test_a_suspect_that_went_elsewhere_holds_nobody_up(open_journal: Callable[..., CrashJournal]) -> None:
    journal = open_journal("= 1 7 2\n")
    clock, taken = ManualClock(), list[Work]()
    intake = intake_of(journal, taken.append, clock)
    intake(message(NEIGHBOUR))
    assert intake(message(POISON)) is BUSY
    clock.advance(60)
    assert isinstance(intake(message(Coordinates(partition=0, offset=4))), Accepted)


def test_a_record_that_comes_again_is_done_with_the_one_in_hand_or_done_already(open_journal: Callable[..., CrashJournal]) -> None:
    taken: list[Work] = []
    intake = intake_of(open_journal(), taken.append)
    outcomes = [intake(message(NEIGHBOUR)) for _ in range(3)]
    done: list[int] = []
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Accepted)
        assert outcome.completion is not None
        outcome.completion.on_done(lambda _, number=number: done.append(number))  # type: ignore[misc]  # bound per round
    assert (len(taken), intake.num_in_hand, done) == (1, 1, [])
    intake.done(taken[0])
    assert (intake.num_in_hand, done) == (0, [0, 1, 2])
    assert intake(message(NEIGHBOUR)) is ACCEPTED, "it was done, and the commit got lost"
    assert len(taken) == 1


def test_a_request_that_saw_three_deaths_is_refused(open_journal: Callable[..., CrashJournal]) -> None:
    journal = open_journal("= 1 7 3\n")
    outcome = intake_of(journal, lambda work: None)(message(POISON))
    assert isinstance(outcome, Invalid)
    assert outcome.reason is InvalidReason.RETRIES_EXHAUSTED
