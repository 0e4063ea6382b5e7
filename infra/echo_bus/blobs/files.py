"""The files of a snapshot while they arrive: verified, and under their final name only when all are complete.

    pieces in order, or chunks in any order ─▶ <parent>/.<name>.partial/ ─ all checksums right ─▶ rename ─▶ <parent>/<name>/

Files are hashed during the transfer, up to the first missing byte. After a transport error the partial folder stays, with a note of its
content, and the next attempt goes on there. It hashes the folder's bytes again, so it trusts nothing of the earlier attempt. One thread
uses it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from echo_bus.blobs.digests import StreamDigest, sha256_of
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_schemas.records import ChunkRef, WeightFile

_NOTE = ".arrived.json"
_READ_AT_ONCE = 8 << 20


def partial_of(folder: Path) -> Path:
    """The folder of the files of `folder` while they arrive, or after an interrupted transfer."""
    return folder.parent / f".{folder.name}.partial"


class ArrivingFiles:
    """Fills the new folder `folder`. Use it in a `with` block and call `complete` at its end.

    Give it the bytes either with `add`, in order, or as the named chunks with `put`, in any order.

    If the block ends with a TransportError, the arrived bytes stay; after BlobCorrupt, OffsetLost and any other error they are deleted.
    There is no fsync: the folder survives the end of the process, but not a crash of the machine.
    """

    def __init__(self, folder: Path, files: Sequence[WeightFile], sha256: str, chunks: Sequence[ChunkRef] = ()) -> None:
        """`sha256`: of all files joined. `chunks`: all chunks of the same bytes. Raises FileExistsError if `folder` exists."""
        if folder.exists():
            raise FileExistsError(folder)
        self._folder = folder
        self._staging = partial_of(folder)
        self._files = files
        self._ends = tuple(accumulate(file.num_bytes for file in files))
        self._sha256 = sha256
        self._chunks = chunks
        self._starts = starts_of(chunks)
        self._begin()

    def _begin(self) -> None:
        self.num_bytes = 0
        """Bytes from the start without a gap, including those of an earlier attempt."""
        self.num_pieces = 0
        """Number of `add` calls for these bytes."""
        self.arrived: set[int] = set()
        """Indices of the chunks that have arrived, each verified."""
        self._next = 0
        self._number = -1
        self._whole = StreamDigest()
        self._others: list[StreamDigest] = []

    def __enter__(self) -> Self:
        self._staging.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._take_over()
        except (OSError, ValueError, KeyError, TypeError, BlobCorrupt):
            # There is no usable partial folder.
            self._close()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir()
            for file in self._files:
                (self._staging / file.name).parent.mkdir(parents=True, exist_ok=True)
                (self._staging / file.name).touch(exist_ok=False)
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()
        if error is None:
            return
        is_resumable = isinstance(error, TransportError) and not isinstance(error, BlobCorrupt | OffsetLost)
        if is_resumable and (self.num_bytes or self.arrived):
            note = {
                "sha256": self._sha256,
                "num_bytes": self.num_bytes,
                "num_pieces": self.num_pieces,
                "chunks": sorted(self.arrived),
            }
            try:
                (self._staging / _NOTE).write_text(json.dumps(note), encoding="utf-8")
            except OSError:
                # No room for the note; `error` is more important.
                pass
            else:
                return
        shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, piece: bytes | memoryview) -> None:
        """The next bytes, which must not change afterwards. Raises BlobCorrupt for more bytes than the files have."""
        self._write(self.num_bytes, piece)
        self._hash(memoryview(piece))
        self.num_pieces += 1

    def put(self, index: int, data: bytes) -> None:
        """The chunk of this index; a repeated one changes nothing. Raises BlobCorrupt for a wrong checksum or index."""
        if index in self.arrived:
            return
        if not 0 <= index < len(self._chunks) or not _is_chunk(data, self._chunks[index]):
            raise BlobCorrupt(f"Chunk {index} of {self._folder.name} does not have the promised checksum.")
        self._write(self._starts[index], data)
        self._note_arrived(index, data)

    @property
    def is_whole(self) -> bool:
        """Whether all bytes joined have the promised checksum. Blocks until they are hashed; no bytes can be added afterwards."""
        return self._whole.finish() == self._sha256

    def complete(self) -> Path:
        """Verify every file and rename the folder. Raises BlobCorrupt."""
        if self.num_bytes < self._ends[-1]:
            raise BlobCorrupt(f"The blob ends before {self._files[self._file_at(self.num_bytes)].name} does.")
        self._reach(len(self._files) - 1)
        is_whole = self.is_whole
        for file, digest in zip(self._files, [*self._whole.noted, *(other.finish() for other in self._others)], strict=True):
            if digest != file.sha256:
                raise BlobCorrupt(f"The file {file.name} does not have the promised checksum.")
        if not is_whole:
            raise BlobCorrupt(f"The files of {self._folder.name} together do not have the promised checksum.")
        self._close()
        (self._staging / _NOTE).unlink(missing_ok=True)
        self._staging.rename(self._folder)
        return self._folder

    def _take_over(self) -> None:
        """Hash the bytes of an earlier attempt. Raises OSError, ValueError, KeyError or TypeError if they cannot be used."""
        note = json.loads((self._staging / _NOTE).read_text(encoding="utf-8"))
        (self._staging / _NOTE).unlink()
        left = int(note["num_bytes"])
        if note["sha256"] != self._sha256 or not 0 <= left <= self._ends[-1] or bool(self._chunks) != bool(note["chunks"]):
            raise ValueError("it is of another snapshot")
        for file in self._files:
            if (self._staging / file.name).stat().st_size > file.num_bytes:
                os.truncate(self._staging / file.name, file.num_bytes)
        if self._chunks:
            for index in note["chunks"]:
                data = read_span(self._staging, self._files, self._starts[index], self._chunks[index].num_bytes)
                if _is_chunk(data, self._chunks[index]):
                    self._note_arrived(index, data)
            return
        while self.num_bytes < left:
            part = read_span(self._staging, self._files, self.num_bytes, min(_READ_AT_ONCE, left - self.num_bytes))
            if not part:
                raise ValueError("it holds less than was noted")
            self._hash(memoryview(part))
        self.num_pieces = int(note["num_pieces"])

    def _note_arrived(self, index: int, data: bytes) -> None:
        """Hash the chunk if all chunks before it are hashed, then the later ones that waited for it."""
        self.arrived.add(index)
        while self._next in self.arrived:
            chunk = self._chunks[self._next]
            again = data if self._next == index else read_span(self._staging, self._files, self._starts[self._next], chunk.num_bytes)
            self._hash(memoryview(again))
            self._next += 1

    def _write(self, start: int, data: bytes | memoryview) -> None:
        """Write `data` at `start` of all bytes. Raises BlobCorrupt for more bytes than the files have."""
        rest = memoryview(data)
        if start + len(rest) > self._ends[-1]:
            raise BlobCorrupt("The blob holds more bytes than its files.")
        for path, offset, size in _spans(self._staging, self._files, start, len(rest)):
            part, rest = rest[:size], rest[size:]
            with path.open("r+b", buffering=0) as out:
                out.seek(offset)
                while len(part):
                    part = part[out.write(part) or 0 :]

    def _hash(self, rest: memoryview) -> None:
        """Hash the next bytes in order; they are already written."""
        while len(rest):
            number = self._file_at(self.num_bytes)
            self._reach(number)
            part, rest = rest[: self._ends[number] - self.num_bytes], rest[self._ends[number] - self.num_bytes :]
            self._whole.update(part)
            if number:
                self._others[number - 1].update(part)
            self.num_bytes += len(part)
            if not number and self.num_bytes == self._ends[0]:
                # The first file's checksum is the whole's digest up to its end.
                self._whole.note()

    def _reach(self, number: int) -> None:
        """Start the digests of the files up to this one."""
        while self._number < number:
            self._number += 1
            if self._number:
                self._others.append(StreamDigest())
            elif not self._files[0].num_bytes:
                self._whole.note()

    def _file_at(self, position: int) -> int:
        """The file that holds the byte at `position`."""
        return next(number for number, end in enumerate(self._ends) if position < end)

    def _close(self) -> None:
        for digest in (self._whole, *self._others):
            digest.close()


def starts_of(chunks: Sequence[ChunkRef]) -> tuple[int, ...]:
    """The start of each chunk among all bytes."""
    return tuple(accumulate((chunk.num_bytes for chunk in chunks), initial=0))[:-1]


def read_span(folder: Path, files: Sequence[WeightFile], start: int, num_bytes: int) -> bytes:
    """`num_bytes` bytes from `start` on of all files of `folder` joined; fewer if the files end before. Raises OSError."""
    parts = []
    for path, offset, size in _spans(folder, files, start, num_bytes):
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            parts.append(file.read(size))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _spans(folder: Path, files: Sequence[WeightFile], start: int, num_bytes: int) -> Iterator[tuple[Path, int, int]]:
    """File, offset in it and size of each part of the bytes from `start` on."""
    for file in files:
        size = min(num_bytes, file.num_bytes - start)
        if size > 0:
            yield folder / file.name, start, size
            num_bytes -= size
        start = max(0, start - file.num_bytes)


def _is_chunk(data: bytes, chunk: ChunkRef) -> bool:
    return len(data) == chunk.num_bytes and sha256_of(data) == chunk.sha256
