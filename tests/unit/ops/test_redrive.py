"""Dead letters brought back: each once, none that would come straight back, and nobody's position moved by mistake."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import NewTopic
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from echo_bus.bus import Bus
from echo_bus.client.cluster import RawMessage
from echo_bus.clock import ManualClock
from echo_bus.dead_letters import REASON, RETRIES, DeadLetters
from echo_bus.signatures import Signer, TrustedKey, Verifier
from echo_memory import MemoryCluster
from echo_ops.cli.main import app
from echo_ops.redrive import redriving
from echo_ops.redrive.letters import REDRIVEN, Letter, letter_of, reason_of
from echo_ops.redrive.preparing import Handling, Mend, load_mend
from echo_ops.redrive.redriving import Backlog, Redrive, discard, require_reasons, require_redrivable
from echo_replay.raw_log import RawLog
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.headers import SIGNATURE, SOURCE
from echo_schemas.naming import Namespace
from echo_schemas.records import Record
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REQUESTS, TRAJECTORIES, Topic
from tests.unit.schemas.samples import trajectory

WAIT_S = 30.0
NAMESPACE = Namespace("unit.redrive")
CODEC = lock_file_codec()
UNKNOWN_SCHEMA = InvalidReason.UNKNOWN_SCHEMA
MALFORMED = InvalidReason.MALFORMED


class Log:
    """A cluster in memory, with what a reader would have made of its messages."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster(clock=self.clock)
        names = [spec.name for spec in load_topic_specs()]
        topics = [NewTopic(f"{NAMESPACE.name}.{name}", 1 if name.endswith(".dlq") else 2, 1) for name in names]
        for future in self.cluster.admin().create_topics(topics).values():
            future.result(WAIT_S)
        self.bus = Bus(
            cluster=self.cluster, namespace=NAMESPACE, clock=ManualClock(), role="redrive", run_id="demo"
        )  # fmt: skip
        self._publisher = self.bus.publisher()

    def write(
        self, topic: Topic, value: bytes | None, *, key: bytes | None, partition: int | None = None, retries: int | None = None
    ) -> None:
        headers = [(SOURCE, b"w1")] + ([] if retries is None else [(RETRIES, str(retries).encode())])
        physical = NAMESPACE.topic(topic)
        self._publisher.publish_bytes(physical, value, key=key, headers=headers, partition=partition).wait(WAIT_S)

    def let_die(self, topic: Topic, reason: InvalidReason, *, is_whole: bool = True) -> None:
        """The newest message of `topic` becomes a dead letter."""
        letters = DeadLetters(self._publisher, self.bus, "echo.learner")
        newest = max(self.messages(NAMESPACE.topic(topic)), key=lambda raw: (raw.timestamp()[1], raw.offset() or 0))
        letters.send(newest, topic, InvalidRecord(reason, "It was wrong."), is_whole).wait(WAIT_S)

    def die(self, record: Record, reason: InvalidReason = UNKNOWN_SCHEMA, *, key: bytes | None = None, retries: int | None = None) -> None:
        """A trajectory that was written and could not be read."""
        own = TRAJECTORIES.key(record).encode() if TRAJECTORIES.key is not None else b""
        self.write(TRAJECTORIES, CODEC.encode(record), key=own if key is None else key, partition=0, retries=retries)
        self.let_die(TRAJECTORIES, reason)

    def messages(self, physical: str) -> list[RawMessage]:
        with RawLog(self.bus, physical) as log:
            return [raw for batch in log.messages() for raw in batch]

    def redriven(self, topic: Topic = TRAJECTORIES) -> list[RawMessage]:
        return [raw for raw in self.messages(NAMESPACE.topic(topic)) if any(name == REDRIVEN + "from" for name, _ in raw.headers() or ())]

    def run(
        self, mend: Mend | None = None, *, reasons: frozenset[str] = frozenset(), passes_by: bool = False, limit: int | None = None
    ) -> Counter[Handling]:
        with Backlog(self.bus, TRAJECTORIES) as backlog:
            work = Redrive(self.bus, backlog, by="me@here", mend=mend)
            return work.run(_first(backlog.waiting(reasons), limit), passes_by=passes_by).done

    def waiting(self, *reasons: str) -> list[int]:
        with Backlog(self.bus, TRAJECTORIES) as backlog:
            return [letter.offset for letter in backlog.waiting(frozenset(reasons))]


def _first(letters: Iterator[Letter], limit: int | None) -> Iterator[Letter]:
    for number, letter in enumerate(letters):
        if limit is not None and number >= limit:
            return
        yield letter


@pytest.fixture
def log() -> Log:
    return Log()


def test_a_letter_comes_back_once_with_its_bytes_its_key_and_where_it_comes_from(log: Log) -> None:
    record = trajectory(seq=3)
    log.die(record)
    assert log.run() == {Handling.WRITE: 1}
    assert log.run() == {}
    (back,) = log.redriven()
    headers = dict(back.headers() or ())
    assert (back.value(), back.key()) == (CODEC.encode(record), b"demo/3")
    assert headers[SOURCE] == b"w1"
    assert headers[RETRIES] == b"0"
    assert headers[REDRIVEN + "from"] == b"unit.redrive.trajectories.dlq[0]@0"
    assert headers[REDRIVEN + "by"] == b"me@here"
    assert not [name for name in headers if name.startswith(("__connect", "kafka_dlt", "echo-reason"))]


def test_reasons_are_apart(log: Log) -> None:
    log.die(trajectory(seq=1), MALFORMED)
    log.die(trajectory(seq=2), UNKNOWN_SCHEMA)
    log.die(trajectory(seq=3), MALFORMED)
    assert log.run(reasons=frozenset({"malformed"})) == {Handling.WRITE: 2}
    assert log.waiting() == [1]
    assert log.run() == {Handling.WRITE: 1}
    assert sorted(raw.key() or b"" for raw in log.redriven()) == [b"demo/1", b"demo/2", b"demo/3"]


def test_a_limit_ends_a_redrive_and_the_next_goes_on_there(log: Log) -> None:
    for seq in range(5):
        log.die(trajectory(seq=seq))
    assert log.run(limit=2) == {Handling.WRITE: 2}
    assert log.waiting() == [2, 3, 4]
    assert log.run() == {Handling.WRITE: 3}
    assert sorted(raw.key() or b"" for raw in log.redriven()) == [f"demo/{seq}".encode() for seq in range(5)]


def test_what_would_come_straight_back_ends_the_redrive_in_front_of_it(log: Log) -> None:
    log.die(trajectory(seq=1))
    log.write(TRAJECTORIES, b"rubbish", key=b"demo/2", partition=0)
    log.let_die(TRAJECTORIES, MALFORMED)
    log.die(trajectory(seq=3))
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        tally = Redrive(log.bus, backlog, by="me").run(backlog.waiting(frozenset()))
    assert tally.done == {Handling.WRITE: 1}
    assert tally.stopped is not None
    assert tally.stopped.letter.offset == 1
    assert "bad_magic" in tally.stopped.why
    assert log.waiting() == [1, 2]
    assert log.run(passes_by=True) == {Handling.STOP: 1, Handling.WRITE: 1}
    assert log.waiting() == []
    assert len(log.redriven()) == 2


def test_a_key_that_is_not_the_records_is_not_written_again_unless_a_mend_makes_the_record(log: Log) -> None:
    log.die(trajectory(seq=1), InvalidReason.KEY_MISMATCH, key=b"another")
    assert log.run(passes_by=False) == {}
    assert log.run(lambda letter: letter.value) == {Handling.WRITE: 1}
    (back,) = log.redriven()
    assert back.key() == b"demo/1"


def test_a_mend_gives_a_record_bytes_or_leaves_the_letter(log: Log) -> None:
    for seq in range(3):
        log.die(trajectory(seq=seq))

    def mend(letter: Letter) -> Record | bytes | None:
        assert letter.value is not None
        record = CODEC.decode(letter.value)
        assert isinstance(record, type(trajectory()))
        if record.seq == 0:
            return replace(record, prompt="mended")
        return letter.value if record.seq == 1 else None

    assert log.run(mend) == {Handling.WRITE: 2, Handling.LEFT: 1}
    first, second = log.redriven()
    assert CODEC.decode(first.value()) == trajectory(seq=0, prompt="mended")
    assert second.value() == CODEC.encode(trajectory(seq=1))


def test_a_mend_that_raises_or_makes_no_record_is_named_and_nothing_is_lost(log: Log) -> None:
    log.die(trajectory(seq=1))

    def fails(letter: Letter) -> Record:
        raise KeyError("prompt")

    with pytest.raises(UserError, match=r"failed at the letter 0 of trajectories: KeyError"):
        log.run(fails)
    with pytest.raises(UserError, match="made no record of the letter 0"):
        log.run(lambda letter: "text")  # type: ignore[arg-type,return-value]
    assert log.run(lambda letter: b"rubbish") == {}
    assert log.waiting() == [0]
    assert log.redriven() == []


def test_a_message_returns_twice_and_not_a_third_time(log: Log) -> None:
    log.die(trajectory(seq=1), retries=0)
    log.die(trajectory(seq=2), retries=1)
    assert log.run() == {Handling.WRITE: 1, Handling.TOO_OFTEN: 1}
    (back,) = log.redriven()
    assert (back.key(), dict(back.headers() or ())[RETRIES]) == (b"demo/1", b"1")


def test_a_cut_copy_comes_back_whole_from_its_old_place(log: Log) -> None:
    record = trajectory(seq=1)
    for _ in range(2):
        log.write(TRAJECTORIES, CODEC.encode(record), key=b"demo/1", partition=1)
        log.let_die(TRAJECTORIES, UNKNOWN_SCHEMA, is_whole=False)
    assert log.run() == {Handling.WRITE: 2}
    assert [raw.value() for raw in log.redriven()] == [CODEC.encode(record)] * 2


def test_a_cut_copy_whose_original_is_gone_stops_the_redrive(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write(TRAJECTORIES, CODEC.encode(trajectory(seq=1)), key=b"demo/1", partition=1)
    log.let_die(TRAJECTORIES, UNKNOWN_SCHEMA, is_whole=False)
    monkeypatch.setattr(RawLog, "between", lambda self, partition, offsets: iter(()))
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        tally = Redrive(log.bus, backlog, by="me").run(backlog.waiting(frozenset()))
    assert tally.stopped is not None
    assert "does not hold the original any more" in tally.stopped.why


def test_a_record_whose_signature_would_be_refused_again_is_not_brought_back(log: Log) -> None:
    private = Ed25519PrivateKey.generate()
    worker, public = Signer(private), private.public_key()
    record = trajectory(seq=3)
    value = CODEC.encode(record)
    (signature,) = worker.sign(NAMESPACE.topic(TRAJECTORIES), [(b"demo/3", value)])
    log.bus.publisher().publish_bytes(NAMESPACE.topic(TRAJECTORIES), value, key=b"demo/3", headers=[signature], partition=0).wait(WAIT_S)
    log.let_die(TRAJECTORIES, InvalidReason.BAD_SIGNATURE)
    trusted = TrustedKey(id=worker.key_id, public=public, role="worker", names=(record.worker_id,))
    known: dict[str, TrustedKey] = {}
    log.bus = replace(log.bus, verifier=Verifier(lambda: known))
    for says in ("is not among those that are trusted", "has signed for"):
        with Backlog(log.bus, TRAJECTORIES) as backlog:
            stopped = Redrive(log.bus, backlog, by="me").run(backlog.waiting(frozenset({"bad_signature"}))).stopped
        assert stopped is not None
        assert stopped.why.startswith("Its readers would refuse its signature: ")
        assert says in stopped.why
        known = {worker.key_id: replace(trusted, names=("x",))}
    assert not log.redriven()
    # Its key is in the file of signers now, under its own name.
    known = {worker.key_id: trusted}
    assert log.run() == {Handling.WRITE: 1}


def test_a_mended_record_without_a_key_of_the_redrive_stops_with_the_command_that_makes_one(log: Log) -> None:
    log.die(trajectory(seq=1))
    log.bus = replace(log.bus, verifier=Verifier(dict))
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        tally = Redrive(log.bus, backlog, by="me", mend=lambda letter: letter.value).run(backlog.waiting(frozenset()))
    assert tally.stopped is not None
    assert "`echoswarm keys new redrive`" in tally.stopped.why
    assert not log.redriven()


def test_nothing_is_written_and_no_position_moves_where_the_transaction_fails(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.die(trajectory(seq=1))
    fails = KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, "no", retriable=False, txn_requires_abort=True))
    original = log.cluster.producer

    def producer(properties: object) -> object:
        made = original(properties)  # type: ignore[arg-type]

        def commit(timeout: float = -1) -> None:
            raise fails

        monkeypatch.setattr(made, "commit_transaction", commit)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(log.cluster, "producer", producer)
        with pytest.raises(Exception, match=r"(?i)abort|rolled"):
            log.run()
    assert log.waiting() == [0]
    assert log.redriven() == []
    assert log.run() == {Handling.WRITE: 1}


def test_a_second_redrive_ends_the_first_which_writes_nothing_more(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redriving, "_AT_ONCE", 10)
    for seq in range(25):
        log.die(trajectory(seq=seq))
    counts: list[Counter[Handling]] = []

    def second(_: object) -> None:
        if not counts:
            counts.append(Counter())
            counts[0] = log.run()

    with Backlog(log.bus, TRAJECTORIES) as backlog, pytest.raises(UserError, match="Another redrive"):
        Redrive(log.bus, backlog, by="me").run(backlog.waiting(frozenset()), note=second)
    assert counts[0] == {Handling.WRITE: 15}
    assert sorted(raw.key() or b"" for raw in log.redriven()) == sorted(f"demo/{seq}".encode() for seq in range(25))


def test_a_message_that_two_readers_could_not_use_is_written_again_once(log: Log) -> None:
    for seq in range(2):
        log.die(trajectory(seq=seq))
        log.let_die(TRAJECTORIES, UNKNOWN_SCHEMA)
    assert len(log.waiting()) == 4
    assert log.run() == {Handling.WRITE: 2, Handling.REPEATED: 2}
    assert sorted(raw.key() or b"" for raw in log.redriven()) == [b"demo/0", b"demo/1"]
    assert log.waiting() == []


def test_discarded_letters_wait_no_more_and_stay_readable(log: Log) -> None:
    for seq in range(3):
        log.die(trajectory(seq=seq), MALFORMED)
    log.die(trajectory(seq=3), UNKNOWN_SCHEMA)
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        assert discard(log.bus, backlog, backlog.waiting(frozenset({"malformed"})), by="me") == {"malformed": 3}
    assert log.waiting() == [3]
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        assert [backlog.last_done(reason) for reason in ("malformed", "unknown_schema")] == ["discarded by me", ""]
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        assert len(list(backlog.letters())) == 4


def test_until_leaves_younger_letters(log: Log) -> None:
    log.die(trajectory(seq=1))
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        end = backlog.end
    log.die(trajectory(seq=2))
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        assert [letter.offset for letter in backlog.waiting(frozenset(), end)] == [0]


def test_where_keys_do_not_place_a_record_it_returns_to_its_partition(log: Log) -> None:
    log.write(REQUESTS, b"rubbish", key=None, partition=1)
    log.let_die(REQUESTS, MALFORMED)
    with Backlog(log.bus, REQUESTS) as backlog:
        (letter,) = backlog.waiting(frozenset())
    assert letter.origin is not None
    assert letter.origin.partition == 1


def test_headers_that_are_missing_or_wrong_are_unknown(log: Log) -> None:
    physical = NAMESPACE.dead_letters(TRAJECTORIES)
    log.bus.publisher().publish_bytes(physical, b"x", key=b"k", headers=[(RETRIES, b"\xff")]).wait(WAIT_S)
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        (letter,) = backlog.letters()
    assert (letter.reason, letter.origin, letter.num_redriven, letter.writer) == ("unknown", None, 0, "unknown")
    assert log.run(passes_by=True) == {Handling.STOP: 1}


@pytest.mark.parametrize(
    "headers",
    [
        [(REASON, b"malformed")],
        [(REASON, b"malformed"), (SOURCE, b"w1"), (REASON, b"truncated")],
        [(REASON, b"malformed"), (REASON, None)],
        [(REASON, b"")],
        [(REASON, b"\xff")],
        [],
    ],
)
def test_the_reason_alone_is_that_of_the_letter(log: Log, headers: list[Any]) -> None:
    log.bus.publisher().publish_bytes(NAMESPACE.dead_letters(TRAJECTORIES), b"x", key=b"k", headers=headers).wait(WAIT_S)
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        (raw,) = backlog.messages()
    assert reason_of(raw) == letter_of(raw, TRAJECTORIES).reason


@pytest.mark.parametrize("name", ["steps", "control", "nonsense"])
def test_other_topics_letters_are_not_brought_back(name: str) -> None:
    with pytest.raises(UserError, match="not brought back"):
        require_redrivable(name)


def test_a_reason_that_there_is_not_is_refused_with_those_there_are() -> None:
    assert require_reasons(["malformed"]) == {"malformed"}
    with pytest.raises(UserError, match="no reason 'mallformed'") as caught:
        require_reasons(["mallformed"])
    assert "malformed" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("mend", "", "names no function"),
        ("none.py:mend", None, "no Python file none.py"),
        ("mends.py:mend", "import nothing_of_this_name", "there is no module 'nothing_of_this_name'"),
        ("mends.py:mend", "mend = 3", "is no function"),
        ("mends.py:other", "mend = 3", "no attribute 'other'"),
        ("no_such_module_anywhere:mend", None, "cannot be imported"),
    ],
)
def test_a_mend_that_is_not_there_is_refused(
    name: str, content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "mends.py").write_text(content)
    with pytest.raises(UserError, match=said):
        load_mend(name)


def test_a_mend_is_a_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "mends.py").write_text("def shorten(letter):\n    return letter.value[:1]\n")
    assert callable(load_mend(f"{tmp_path}/mends.py:shorten"))


def test_letters_of_one_reason_are_found_among_the_others(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq, reason in enumerate((UNKNOWN_SCHEMA, MALFORMED, UNKNOWN_SCHEMA)):
        log.die(trajectory(seq=seq), reason)
    monkeypatch.setattr("echo_ops.cli.dlq.reach_bus", lambda *_, **__: log.bus)

    def said(*words: str) -> str:
        return CliRunner().invoke(app, ["dlq", *words]).output

    assert "trajectories  unknown_schema  2" in said("list"), "the reason is typed again, so it is not cut"
    heaps = json.loads(said("list", "--reason", "malformed", "--json"))
    assert [(heap["topic"], heap["reason"], heap["waiting"]) for heap in heaps] == [("trajectories", "malformed", 1)]
    assert "No such dead letters" in said("list", "--reason", "oversized")
    shown = said("show", "trajectories", "--reason", "malformed")
    assert ("trajectories.dlq @1 " in shown, shown.count("trajectories.dlq @")) == (True, 1)
    assert said("show", "trajectories", "--reason", "unknown_schema", "--last", "1").startswith("trajectories.dlq @2 ")
    assert "has no such dead letter" in said("show", "trajectories", "0", "--reason", "malformed")


def test_letters_are_chosen_by_their_time(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for seq in range(3):
        log.die(trajectory(seq=seq))
        log.clock.advance(3_600)
    monkeypatch.setattr("echo_ops.cli.dlq.reach_bus", lambda *_, **__: log.bus)
    first, second, third = (f"2023-11-{day}" for day in ("14T22:13:20", "14T23:13:20Z", "15T01:13:20+01:00"))

    def said(*words: str) -> str:
        return CliRunner().invoke(app, ["dlq", *words]).output

    def listed(*words: str) -> list[tuple[int, int]]:
        return [(heap["waiting"], heap["handled"]) for heap in json.loads(said("list", *words, "--json"))]

    def shown(*words: str) -> list[int]:
        lines = said("show", "trajectories", *words).splitlines()
        return [int(line.split("@")[1].split()[0]) for line in lines if line.startswith("trajectories.dlq @")]

    assert [listed("--since", time) for time in (first, second, third)] == [[(3, 0)], [(2, 0)], [(1, 0)]]
    assert [listed("--until", time) for time in (first, second, third)] == [[(1, 0)], [(2, 0)], [(3, 0)]]
    assert listed("--since", second, "--until", second) == [(1, 0)]
    assert "No such dead letters" in said("list", "--since", "1m")
    assert "No such dead letters" in said("list", "--until", "1960-01-01")
    assert shown("--until", second) == shown("--until", second, "--last", "2", "--reason", "unknown_schema") == [0, 1]
    assert shown("--since", second, "--last", "1") == [2]
    assert shown("1", "--since", second) == [1]
    assert "has no such dead letter" in said("show", "trajectories", "0", "--since", second)
    assert "1 unknown_schema" in said("discard", "trajectories", "--until", first, "--yes")
    assert "1 written again" in said("redrive", "trajectories", "--until", second, "--yes")
    assert (log.waiting(), [raw.key() for raw in log.redriven()]) == ([2], [b"demo/1"])
    assert listed("--since", second) == [(1, 1)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["list", "--since", "yesterday"], "--since 'yesterday' is no time"),
        (["show", "trajectories", "--since", "1h", "--until", "2h"], "--until 2h lies before --since 1h"),
        (["redrive", "trajectories", "--until", "noon"], "--until 'noon' is no time"),
        (["discard", "trajectories", "--until", "noon"], "--until 'noon' is no time"),
    ],
)
def test_a_time_that_is_none_is_refused_before_the_cluster_is_asked(words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["dlq", *words])
    assert (found.exit_code, message in found.output) == (2, True)


def test_a_signature_comes_back_with_its_record_and_who_mends_one_signs_it_anew(log: Log) -> None:
    worker, mender = (Signer(Ed25519PrivateKey.generate()) for _ in range(2))
    record = trajectory(seq=3)
    physical, value = NAMESPACE.topic(TRAJECTORIES), CODEC.encode(record)
    (signature,) = worker.sign(physical, [(b"demo/3", value)])
    for _ in range(2):
        log.bus.publisher().publish_bytes(physical, value, key=b"demo/3", headers=[signature], partition=0).wait(WAIT_S)
        log.let_die(TRAJECTORIES, UNKNOWN_SCHEMA)
    log.bus = replace(log.bus, signer=mender)
    with Backlog(log.bus, TRAJECTORIES) as backlog:
        letters = list(backlog.waiting(frozenset()))
        Redrive(log.bus, backlog, by="me").run(iter(letters[:1]))
        Redrive(log.bus, backlog, by="me", mend=lambda letter: replace(record, completion="mended")).run(iter(letters[1:]))
    keys = [dict(raw.headers() or ())[SIGNATURE].split(b";")[1].decode() for raw in log.redriven()]
    assert keys == [worker.key_id, mender.key_id]


def test_what_a_worker_did_not_sign_is_signed_by_who_says_that_it_is_right(log: Log) -> None:
    """A worker without a key on its machine, and a mend that returns its records as they are."""
    mender = Ed25519PrivateKey.generate()
    known = TrustedKey(id=Signer(mender).key_id, public=mender.public_key(), role="redrive", names=("*",))
    log.bus = replace(log.bus, signer=Signer(mender), verifier=Verifier(lambda: {known.id: known}))
    log.die(trajectory(seq=3), InvalidReason.BAD_SIGNATURE)
    assert log.run() == {}, "it would come straight back"
    assert log.run(lambda letter: letter.value) == {Handling.WRITE: 1}
    (raw,) = log.redriven()
    assert dict(raw.headers() or ())[SIGNATURE].split(b";")[1].decode() == known.id
