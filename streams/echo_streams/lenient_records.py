"""aiokafka's reading of what was fetched, but a header whose name is no UTF-8 does not end it.

aiokafka decodes names strictly, in the middle of a batch, so that one such record would stop its partition at each start. Here the rest of
such a batch is read once more by aiokafka's own slow parser, over bytes that decode with a replacement character; all others as ever.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import islice
from typing import Any

from aiokafka.record.default_records import _DefaultRecordBatchPy
from aiokafka.record.memory_records import MemoryRecords

# Base offset, then the length of what follows (KIP-98, "RecordBatch").
_OVERHEAD = struct.Struct(">qi")


class LenientRecords:
    """In the place of `aiokafka.record.MemoryRecords`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._records: Any = MemoryRecords(data)
        self._position = 0

    def size_in_bytes(self) -> int:
        """As aiokafka's."""
        return int(self._records.size_in_bytes())

    def has_next(self) -> bool:
        """As aiokafka's."""
        return bool(self._records.has_next())

    def next_batch(self) -> Any:
        """As aiokafka's; a batch of records may be read in spite of its headers' names."""
        begin = self._position
        _, length = _OVERHEAD.unpack_from(self._data, begin)
        self._position = begin + _OVERHEAD.size + length
        batch = self._records.next_batch()
        return batch if batch is None or batch.is_control_batch else _Batch(batch, self._data[begin : self._position])


class _Batch:
    """One of aiokafka's batches, and its bytes."""

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
    # What is compressed is not any more.
    batch._buffer = _LenientBytes(batch._buffer)  # noqa: SLF001  its parser reads names out of this, and has no setting for it
    return iter(batch)


class _LenientBytes(bytearray):
    """Decodes whatever it holds."""

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        return _LenientBytes(found) if isinstance(at, slice) else found

    def decode(self, encoding: str = "utf-8", errors: str = "replace") -> str:
        del errors
        return super().decode(encoding, "replace")
