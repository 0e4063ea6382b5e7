"""aiokafka's parser of fetched batches, made tolerant of header names that are not UTF-8.

aiokafka decodes names strictly, so one such record would stop its partition at each start. Here the rest of such a batch is read again by
aiokafka's slow parser, over bytes that decode with a replacement character; other batches are read as usual.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

# Base offset, then the length of the rest (KIP-98, "RecordBatch").
_OVERHEAD = struct.Struct(">qi")


class LenientRecords:
    """Replaces `aiokafka.record.MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._records: Any = MemoryRecords(data)
        self._position = 0

    def size_in_bytes(self) -> int:
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        """As aiokafka's, with tolerant batches of records."""
        begin = self._position
        _, length = _OVERHEAD.unpack_from(self._data, begin)
        self._position = begin + _OVERHEAD.size + length
        batch = self._records.next_batch()
        return batch if batch is None or batch.is_control_batch else _Batch(batch, self._data[begin : self._position])


class _Batch:
    """A batch of aiokafka's, and its bytes."""

    def __init__(self, batch: Any, data: bytes) -> None:
        self._batch = batch
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def __iter__(self) -> Iterator[Any]:
        num_read = 0
        try:
            for record in self._batch:
                num_read += 1
                yield record
        except UnicodeDecodeError:
            yield from islice(_read_leniently(self._data), num_read, None)


def _read_leniently(data: bytes) -> Iterator[Any]:
    batch: Any = _DefaultRecordBatchPy(data)
    iter(batch)
    # The buffer is decompressed now.
    batch._buffer = _LenientBytes(batch._buffer)  # noqa: SLF001  the parser reads names from this buffer, and has no setting for it
    return iter(batch)


class _LenientBytes(bytearray):
    """Decodes any bytes."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _LenientBytes(found) if isinstance(at, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        del errors
        return super().decode(encoding, "replace")
