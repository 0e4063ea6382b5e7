"""The files of a snapshot while they arrive: written one after another, hashed beside it, whole or absent under their own name.

    bytes in order ─▶ <parent>/.<name>.partial/ ─ all checksums right ─▶ rename ─▶ <parent>/<name>/

A transfer that the network ended leaves the partial folder and a note of how far it came; the next attempt begins there. What is there is
hashed again, so that nothing is believed of an earlier attempt. One thread uses it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Self

from echo_bus.blobs.digests import StreamDigest
from echo_bus.errors import BlobCorrupt, OffsetLost, TransportError
from echo_schemas.records import WeightFile

_NOTE = ".arrived.json"
_READ_AT_ONCE = 8 << 20


def partial_of(folder: Path) -> Path:
    """Where the files of `folder` are while they arrive, or after a transfer that was interrupted."""
    return folder.parent / f".{folder.name}.partial"


class ArrivingFiles:
    """Fills the new folder `folder`. Use it in a `with` block and call `complete` at its end.

    A block that ends with a TransportError keeps what has arrived; after BlobCorrupt, OffsetLost and anything else nothing stays. Nothing
    is forced onto the disk: the folder survives the end of the process, not of the machine.
    """

    def __init__(self, folder: Path, files: Sequence[WeightFile], sha256: str) -> None:
        """`sha256`: of all files, one after another. Raises FileExistsError if `folder` exists."""
        if folder.exists():
            raise FileExistsError(folder)
        self._folder = folder
        self._staging = partial_of(folder)
        self._files = files
        self._sha256 = sha256
        self._begin()

    def _begin(self) -> None:
        self.num_bytes = 0
        """Bytes that are there, those of an earlier attempt included."""
        self.num_pieces = 0
        """Calls of `add` that they came in."""
        self._number = -1
        self._missing = 0
        self._out: BufferedRandom | None = None
        self._whole = StreamDigest()
        self._others: list[StreamDigest] = []

    def __enter__(self) -> Self:
        self._staging.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._take_over()
        except (OSError, ValueError, KeyError, TypeError, BlobCorrupt):
            # Nothing there, or nothing that this can go on from.
            self._close()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir()
            self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._close()
            if error is None:
                return
            if isinstance(error, TransportError) and not isinstance(error, BlobCorrupt | OffsetLost) and self.num_bytes:
                note = {"sha256": self._sha256, "num_bytes": self.num_bytes, "num_pieces": self.num_pieces}
                (self._staging / _NOTE).write_text(json.dumps(note), encoding="utf-8")
                return
        except OSError:
            # The last bytes or the note found no room. `error`, if there is one, says more.
            if error is None:
                raise
        shutil.rmtree(self._staging, ignore_errors=True)

    def add(self, piece: bytes | memoryview) -> None:
        """The next bytes, which must not change afterwards. Raises BlobCorrupt for more than the files hold."""
        rest = memoryview(piece)
        while len(rest):
            while not self._missing:
                self._open_next(is_new=True)
            part, rest = rest[: self._missing], rest[self._missing :]
            assert self._out is not None
            self._out.write(part)
            self._count(part)
        self.num_pieces += 1

    @property
    def is_whole(self) -> bool:
        """Whether all bytes together have the promised checksum. Blocks until they are hashed; nothing can be added afterwards."""
        return self._whole.finish() == self._sha256

    def complete(self) -> Path:
        """Verify every file and give the folder its name. Raises BlobCorrupt."""
        while self._missing == 0 and self._number + 1 < len(self._files) and not self._files[self._number + 1].num_bytes:
            self._open_next(is_new=True)
        if self._missing or self._number + 1 < len(self._files):
            name = self._files[self._number if self._missing else self._number + 1].name
            raise BlobCorrupt(f"The blob ends before {name} does.")
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
        """Hash what an earlier attempt left, and stand behind it. Raises OSError, ValueError, KeyError or TypeError if that is not fit."""
        note = json.loads((self._staging / _NOTE).read_text(encoding="utf-8"))
        (self._staging / _NOTE).unlink()
        left = int(note["num_bytes"])
        if note["sha256"] != self._sha256 or not 0 < left <= sum(file.num_bytes for file in self._files):
            raise ValueError("it is of another snapshot")
        while left:
            while not self._missing:
                self._open_next(is_new=False)
            assert self._out is not None
            part = self._out.read(min(left, self._missing, _READ_AT_ONCE))
            if not part:
                raise ValueError("it holds less than was noted")
            left -= len(part)
            self._count(part)
        if self._out is not None:
            self._out.truncate()
        self.num_pieces = int(note["num_pieces"])

    def _open_next(self, *, is_new: bool) -> None:
        """Go on in the next file that has bytes, or, at an empty one, make it."""
        self._close_file()
        self._number += 1
        if self._number == len(self._files):
            raise BlobCorrupt("The blob holds more bytes than its files.")
        file = self._files[self._number]
        path = self._staging / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = path.open("x+b" if is_new else "r+b")
        self._missing = file.num_bytes
        if self._number:
            self._others.append(StreamDigest())
        elif not file.num_bytes:
            self._whole.note()

    def _count(self, part: bytes | memoryview) -> None:
        """`part` lies in the file that is open."""
        self._whole.update(part)
        if self._number:
            self._others[-1].update(part)
        self._missing -= len(part)
        self.num_bytes += len(part)
        if not self._missing:
            if not self._number:
                # The first file's checksum is that of the whole up to its end.
                self._whole.note()
            self._close_file()

    def _close_file(self) -> None:
        out, self._out = self._out, None
        if out is not None:
            out.close()

    def _close(self) -> None:
        try:
            self._close_file()
        finally:
            for digest in (self._whole, *self._others):
                digest.close()
