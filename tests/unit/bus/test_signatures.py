"""A record counts if a trusted key of its author has signed exactly it, for exactly its place; anything else is a dead letter."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Message as ClientMessage
from confluent_kafka.admin import NewTopic
from hypothesis import given
from hypothesis import strategies as st

import echo_bus.signatures
from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.reading.decoding import Decoder
from echo_bus.signatures import MOST_TOGETHER, Signer, TrustedKey, Verifier, key_id_of
from echo_bus.wire import Wire
from echo_memory import MemoryCluster
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.headers import SIGNATURE
from echo_schemas.naming import Namespace
from echo_schemas.records import Record
from echo_schemas.topics import REWARDS, TRAJECTORIES, Topic
from tests.unit.core.records import at, reward, trajectory

ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519", reason="install the extra 'signatures'")
NAMESPACE = Namespace("test")
CODEC = lock_file_codec()
NOW_MS = 1_000
WORKER, OTHER, JUDGE = (ed25519.Ed25519PrivateKey.generate() for _ in range(3))


def trusted(private: Any, role: str = "worker", names: tuple[str, ...] = ("w",)) -> dict[str, TrustedKey]:
    public = private.public_key()
    key_id = key_id_of(public)
    return {key_id: TrustedKey(id=key_id, public=public, role=role, names=names)}


KEYS = {**trusted(WORKER), **trusted(OTHER, names=("other", "gpu-*")), **trusted(JUDGE, "reward", ("exact",))}


def message(topic: Topic, record: Record, private: Any = WORKER, **changes: Any) -> Any:
    """`record` as its author signed it, then changed."""
    key, value = topic.key_of(record), CODEC.encode(record)
    headers = Signer(private).sign(NAMESPACE.topic(topic), [(key, value)])
    parts = {"topic": NAMESPACE.topic(topic), "partition": 0, "offset": 7, "key": key.encode() if key else None, "value": value}
    return ClientMessage(**{**parts, "headers": headers, "timestamp": (1, NOW_MS), **changes})


def wire(verifier: Verifier, **changes: Any) -> Wire:
    return Wire(**{"namespace": NAMESPACE, "role": "reader", "verifier": verifier, **changes})


def decoder(keys: dict[str, TrustedKey] | None = None) -> Decoder:
    known = KEYS if keys is None else keys
    return Decoder(wire(Verifier(lambda: known), run_id="demo"), [TRAJECTORIES, REWARDS])


def refusal(raw: Any, by: Decoder | None = None) -> str:
    with pytest.raises(InvalidRecord) as caught:
        (by or decoder()).decode(raw)
    assert caught.value.reason is InvalidReason.BAD_SIGNATURE
    return caught.value.message


@pytest.mark.parametrize(
    ("topic", "record", "private"), [(TRAJECTORIES, trajectory(), WORKER), (REWARDS, reward(at(3)), JUDGE)], ids=["worker", "reward"]
)
def test_what_its_author_has_signed_is_read(topic: Topic, record: Record, private: Any) -> None:
    found = decoder().decode(message(topic, record, private))
    assert found is not None
    assert found.record == record


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"headers": []}, "is not signed"),
        ({"headers": [(SIGNATURE, None)]}, "is not signed"),
        ({"headers": [(SIGNATURE, b"1;a"), (SIGNATURE, b"1;b")]}, "several"),
        ({"headers": [(SIGNATURE, b"rubbish")]}, "cannot be read"),
        ({"headers": [(SIGNATURE, b"1;aa;!!;AAAA")]}, "cannot be read"),
        ({"headers": [(SIGNATURE, b"2;aa;AAAA;AAAAAAAAAAAAAAAAAAAAAA==")]}, "not one that this release reads"),
        ({"headers": [(SIGNATURE, b"1;aa;AAAA;")]}, "not one that this release reads"),
        ({"headers": [(SIGNATURE, b"1;aa;AAAA;AAAAAAAAAAAAAAAAAAAAAA==")]}, "not among those that are trusted"),
        ({"key": b"demo/1"}, "of another record"),
        ({"key": None}, "of another record"),
        ({"value": CODEC.encode(trajectory(completion="forged"))}, "of another record"),
        ({"value": b"\x00no record"}, "of another record"),
    ],
)
def test_a_message_that_is_not_the_signed_one_is_refused(changes: dict[str, Any], says: str) -> None:
    assert says in refusal(message(TRAJECTORIES, trajectory(), **changes))


@given(data=st.data())
def test_no_change_of_a_byte_is_taken_for_signed(data: st.DataObject) -> None:
    record = trajectory()
    raw = message(TRAJECTORIES, record)
    parts = {"value": raw.value(), "key": raw.key(), "header": raw.headers()[0][1]}
    part = data.draw(st.sampled_from(sorted(parts)))
    at_byte, flip = data.draw(st.integers(0, len(parts[part]) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(parts[part])
    changed[at_byte] ^= flip
    parts[part] = bytes(changed)
    copy = message(TRAJECTORIES, record, value=parts["value"], key=parts["key"], headers=[(SIGNATURE, parts["header"])])
    if part == "header" and is_same_text(parts["header"], raw.headers()[0][1]):
        assert decoder().decode(copy) is not None
    else:
        refusal(copy)


def is_same_text(one: bytes, other: bytes) -> bool:
    """Whether two headers say the same: base64 has bits in its last letter that mean nothing."""
    try:
        return [b64decode(part, validate=True) for part in one.split(b";")[2:]] == [
            b64decode(part, validate=True) for part in other.split(b";")[2:]
        ] and (one.split(b";")[:2] == other.split(b";")[:2])
    except ValueError:
        return False


def test_a_signature_counts_in_its_own_namespace_only() -> None:
    raw = message(TRAJECTORIES, trajectory())
    elsewhere = Decoder(wire(Verifier(lambda: KEYS), namespace=Namespace("copy")), [TRAJECTORIES])
    raw.set_topic("copy.trajectories")
    assert "of another record" in refusal(raw, elsewhere)


def test_a_signature_that_was_made_by_another_key_is_refused() -> None:
    _, real, made, digests = message(TRAJECTORIES, trajectory()).headers()[0][1].split(b";")
    claimed = key_id_of(OTHER.public_key()).encode()
    assert real != claimed
    assert "not one of the key" in refusal(
        message(TRAJECTORIES, trajectory(), headers=[(SIGNATURE, b";".join((b"1", claimed, made, digests)))])
    )


@pytest.mark.parametrize(
    ("topic", "record", "private", "says"),
    [
        (TRAJECTORIES, trajectory(), OTHER, "has signed for 'w'"),
        (TRAJECTORIES, trajectory(worker_id="exact"), JUDGE, "writes no trajectories"),
        (REWARDS, reward(at(3), name="w"), WORKER, "writes no rewards"),
        (REWARDS, reward(at(3), name="helpful"), JUDGE, "has signed for 'helpful'"),
    ],
)
def test_a_key_speaks_for_its_own_names_and_topics_only(topic: Topic, record: Record, private: Any, says: str) -> None:
    assert says in refusal(message(topic, record, private))


def test_a_pattern_names_several() -> None:
    assert decoder().decode(message(TRAJECTORIES, trajectory(worker_id="gpu-7"), OTHER)) is not None


@pytest.mark.parametrize(
    ("validity", "counts"), [({"since_ms": NOW_MS}, True), ({"since_ms": NOW_MS + 1}, False), ({"until_ms": NOW_MS}, False)]
)
def test_a_key_counts_in_its_time_only(validity: dict[str, Any], counts: bool) -> None:
    by = decoder({name: replace(key, **validity) for name, key in trusted(WORKER).items()})
    if counts:
        assert by.decode(message(TRAJECTORIES, trajectory())) is not None
    else:
        assert "does not count at the time" in refusal(message(TRAJECTORIES, trajectory()), by)


def test_one_signature_stands_under_many_records_and_each_is_read_without_the_others() -> None:
    records = [trajectory(seq, index) for seq in range(20) for index in (0, 1)]
    pairs = [(TRAJECTORIES.key_of(record), CODEC.encode(record)) for record in records]
    headers = Signer(WORKER).sign(NAMESPACE.topic(TRAJECTORIES), pairs)
    assert len({value for _, value in headers}) == -(-len(records) // MOST_TOGETHER)
    last = message(TRAJECTORIES, records[-1], headers=[headers[-1]])
    assert decoder().decode(last) is not None
    assert "of another record" in refusal(message(TRAJECTORIES, records[0], headers=[headers[-1]]))


def test_a_key_that_is_withdrawn_does_not_count_any_more() -> None:
    known = [KEYS]
    by = Decoder(wire(Verifier(lambda: known[0])), [TRAJECTORIES])
    raw = message(TRAJECTORIES, trajectory())
    assert by.decode(raw) is not None
    known[0] = trusted(OTHER)
    assert "not among those that are trusted" in refusal(raw, by)


def test_each_good_signature_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bytes] = []
    real: Callable[..., Any] = echo_bus.signatures._opened

    def note(header: bytes, keys: dict[str, TrustedKey]) -> Any:
        opened.append(header)
        return real(header, keys)

    monkeypatch.setattr(echo_bus.signatures, "_opened", note)
    by, records = decoder(), [trajectory(1, index) for index in (0, 1)]
    headers = Signer(WORKER).sign(NAMESPACE.topic(TRAJECTORIES), [(TRAJECTORIES.key_of(each), CODEC.encode(each)) for each in records])
    for record, header in zip(records, headers, strict=True):
        assert by.decode(message(TRAJECTORIES, record, headers=[header])) is not None
    assert len(opened) == 1


def test_what_a_publisher_has_signed_a_reader_takes_and_what_a_stranger_writes_it_does_not() -> None:
    cluster = MemoryCluster()
    for future in cluster.admin().create_topics([NewTopic(NAMESPACE.topic(TRAJECTORIES), 1, 1)]).values():
        future.result(10)
    bus = Bus(cluster=cluster, namespace=NAMESPACE, role="worker", run_id="demo")
    honest, stranger = replace(bus, signer=Signer(WORKER)).publisher(), bus.publisher()
    group = [trajectory(0, index) for index in (0, 1)]
    stranger.publish_together(TRAJECTORIES, group)
    stranger.flush(10)
    honest.publish_together(TRAJECTORIES, group)
    honest.flush(10)
    honest.publish(TRAJECTORIES, trajectory(1)).wait(10)
    refused: list[str] = []
    reader = replace(bus, verifier=Verifier(lambda: KEYS)).reader(
        [TRAJECTORIES], on_invalid=lambda raw, topic, invalid, whole: refused.append(invalid.reason.value)
    )
    with closing(reader), closing(honest), closing(stranger):
        reader.start()
        found = [message.record for batch in reader.read_to_end(Deadline.after(10)) for message in batch]
    assert found == [*group, trajectory(1)]
    assert refused == ["bad_signature"] * 2
