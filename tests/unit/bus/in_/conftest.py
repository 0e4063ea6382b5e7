"""What the tests of reading share: a codec, records, and messages as the client returns them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Message as ClientMessage

from echo_schemas.codec import Codec, lock_file_codec
from echo_schemas.headers import headers_of
from echo_schemas.naming import Namespace
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Drop, DropReason, Record
from echo_schemas.topics import Topic

NUM_PARTITIONS = 4


@pytest.fixture
def codec() -> Codec:
    return lock_file_codec()


@pytest.fixture
def test_namespace() -> Namespace:
    return Namespace("test")


@pytest.fixture
def make_drop() -> Callable[..., Drop]:
    """A drop of a run: small, keyed, on a topic whose key decides the partition."""

    def make(seq: int = 1, run_id: str = "demo") -> Drop:
        return Drop(run_id=run_id, group_id=f"{run_id}/{seq}", seq=seq, why=DropReason.STALE, learner_version=3, time_ms=5)

    return make


@pytest.fixture
def make_raw(codec: Codec, test_namespace: Namespace) -> Callable[..., Any]:
    """`record` on `topic` as a client would return it; every part may be given otherwise."""

    def make(topic: Topic, record: Record | None, **other: Any) -> Any:
        key = None if record is None else topic.key_of(record)
        parts = {
            "topic": test_namespace.topic(topic),
            "partition": 0 if key is None else partition_of(key, NUM_PARTITIONS),
            "offset": 7,
            "key": None if key is None else key.encode(),
            "value": None if record is None else codec.encode(record),
            "headers": [] if record is None else headers_of(record, source="test", time_ms=5),
            "timestamp": (1, 1234),
        }
        return ClientMessage(**{**parts, **other})

    return make
