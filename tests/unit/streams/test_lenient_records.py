"""Fetched bytes with a header name that is no text: aiokafka's reader stops at it, ours reads on."""

from __future__ import annotations

from typing import Any

import pytest
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from aiokafka.record.memory_records import MemoryRecords

from echo_streams.lenient_records import LenientRecords

NONE, GZIP = 0, 1


class Name:
    """What aiokafka takes for a header's name."""

    def encode(self, _: str) -> bytes:
        return b"\xff\xfe"


def batch(first: int, *, is_bad: bool, compression: int = NONE) -> bytes:
    """Three records; the second may have a name that is no text."""
    builder: Any = _DefaultRecordBatchBuilderPy(
        magic=2,
        compression_type=compression,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=10_000,
    )
    for number in range(3):
        name: Any = Name() if is_bad and number == 1 else "name"
        builder.append(number, 5, b"key", b"value %d" % (first + number), [(name, b"x"), ("empty", None)])
    data = bytearray(builder.build())
    data[:8] = first.to_bytes(8, "big")
    return bytes(data)


def read(records: Any) -> list[tuple[int, bytes, list[tuple[str, bytes | None]]]]:
    found = []
    while records.has_next():
        found += [(record.offset, record.value, list(record.headers)) for record in records.next_batch()]
    return found


@pytest.mark.parametrize("compression", [NONE, GZIP])
def test_every_record_is_read_once_whatever_its_headers_are_called(compression: int) -> None:
    data = batch(0, is_bad=False) + batch(3, is_bad=True, compression=compression) + batch(6, is_bad=False)
    with pytest.raises(UnicodeDecodeError):
        read(MemoryRecords(data))
    records = LenientRecords(data)
    assert records.size_in_bytes() == len(data)
    found = read(records)
    assert [(offset, value) for offset, value, _ in found] == [(offset, b"value %d" % offset) for offset in range(9)]
    assert found[4][2] == [("\ufffd\ufffd", b"x"), ("empty", None)]
    assert found[5][2] == [("name", b"x"), ("empty", None)]


def test_sound_bytes_are_read_as_ever() -> None:
    data = batch(0, is_bad=False) + batch(3, is_bad=False, compression=GZIP)
    assert read(LenientRecords(data)) == read(MemoryRecords(data))


def test_the_applications_consumer_reads_so() -> None:
    from aiokafka.consumer import fetcher

    import echo_streams.driver  # noqa: F401  importing it is what is tried

    assert fetcher.MemoryRecords is LenientRecords
