"""A disk that keeps its promises and no more: what was not fsynced may be gone or torn after the power was.

    live      the folder as processes see it, on the machine's own file system
    durable   per folder the names that its last fsync wrote, per file the bytes that its last fsync wrote

Every operation below the root is a call to the outside (`Simulation.call`): a process may die before it, or in the middle of a write.
`lose_power` makes of the live folder what a machine may find after it: names and bytes since the last fsync are there, or not, or in part.
"""

from __future__ import annotations

import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from tests.model.simulation import Crash, Simulation


class Loss(StrEnum):
    """What the power takes with it, of all that was not fsynced."""

    EVERYTHING = "everything"
    CONTENTS = "contents, not names"
    AT_RANDOM = "at random"


class _File:
    def __init__(self) -> None:
        self.durable: bytes | None = None


class _Folder:
    def __init__(self) -> None:
        self.live: dict[str, _File | _Folder] = {}
        self.durable: dict[str, _File | _Folder] = {}


class Disk:
    """The folder `root`, which exists and survives. One simulation at a time uses it."""

    def __init__(self, root: Path, simulation: Simulation) -> None:
        self._path = os.path.realpath(root)
        self._simulation = simulation
        self._root = _Folder()

    # What the operating system tells

    def covers(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path below the root, or None."""
        if isinstance(path, int):
            path = _path_of(path)
        elif dir_fd is not None:
            path = f"{_path_of(dir_fd)}/{os.fspath(path)}"
        path = os.fspath(path)
        return path[len(self._path) :].strip("/") if isinstance(path, str) and path.startswith(self._path) else None

    def call(self, operation: str) -> None:
        """A process is about to do it."""
        self._simulation.call(f"disk {operation}")

    def created(self, place: str, *, is_folder: bool) -> None:
        """A name appeared."""
        folder, name = self._parent(place)
        if name not in folder.live:
            folder.live[name] = _Folder() if is_folder else _File()

    def removed(self, place: str) -> None:
        """A name is gone."""
        folder, name = self._parent(place)
        folder.live.pop(name, None)

    def renamed(self, source: str, target: str) -> None:
        """A name became another."""
        folder, name = self._parent(source)
        node = folder.live.pop(name)
        folder, name = self._parent(target)
        folder.live[name] = node

    def linked(self, source: str, target: str) -> None:
        """A file has a second name."""
        node = self._node(source)
        folder, name = self._parent(target)
        folder.live[name] = node

    def synced(self, place: str) -> None:
        """What is there now stays."""
        node = self._node(place)
        if isinstance(node, _Folder):
            node.durable = dict(node.live)
        else:
            node.durable = Path(self._path, place).read_bytes()

    # The power

    def lose_power(self, loss: Loss, seed: int = 0) -> None:
        """Nobody runs here any more; what they left is what the next one finds."""
        chance = random.Random(seed)
        found = self._surviving(self._root, self._path, loss, chance)
        shutil.rmtree(self._path)
        self._root = _Folder()
        self._restore(found, self._root, Path(self._path))

    def _surviving(self, folder: _Folder, live_at: str | None, loss: Loss, chance: random.Random) -> dict[str, Any]:
        """Names to bytes, or to the like of a folder. `live_at`: where the live one is, None if it is no longer there."""
        found: dict[str, Any] = {}
        for name in sorted({*folder.live, *folder.durable}):
            live, durable = folder.live.get(name), folder.durable.get(name)
            node = durable
            if loss is Loss.CONTENTS or (loss is Loss.AT_RANDOM and chance.random() < 0.5):
                node = live
            if node is None:
                continue
            where = f"{live_at}/{name}" if live_at is not None and node is live else None
            if isinstance(node, _Folder):
                found[name] = self._surviving(node, where, loss, chance)
            else:
                found[name] = self._bytes_of(node, where, loss, chance)
        return found

    @staticmethod
    def _bytes_of(file: _File, live_at: str | None, loss: Loss, chance: random.Random) -> bytes:
        live = Path(live_at).read_bytes() if live_at is not None else None
        if live is None or file.durable == live:
            return file.durable or b""
        torn = [file.durable or b"", live[: len(live) // 2], bytes(len(live)), live]
        return torn[1] if loss is Loss.CONTENTS else torn[0] if loss is Loss.EVERYTHING else chance.choice(torn)

    def _restore(self, found: dict[str, Any], folder: _Folder, path: Path) -> None:
        path.mkdir()
        for name, content in found.items():
            if isinstance(content, dict):
                inner = _Folder()
                self._restore(content, inner, path / name)
                folder.live[name] = inner
            else:
                (path / name).write_bytes(content)
                file = _File()
                file.durable = content
                folder.live[name] = file
        folder.durable = dict(folder.live)

    def _node(self, place: str) -> _File | _Folder:
        node: _File | _Folder = self._root
        for part in place.split("/") if place else ():
            assert isinstance(node, _Folder), place
            node = node.live[part]
        return node

    def _parent(self, place: str) -> tuple[_Folder, str]:
        above, _, name = place.rpartition("/")
        node = self._node(above)
        assert isinstance(node, _Folder), place
        return node, name


class _Tearing(io.FileIO):
    """A file whose writes may be cut off by the end of the process."""

    disk: Disk

    def write(self, data: Any, /) -> int:
        try:
            self.disk.call("write")
        except Crash:
            view = memoryview(data)
            super().write(view[: len(view) // 2])
            raise
        return super().write(data) or 0


def _path_of(descriptor: int) -> str:
    return str(Path(f"/proc/self/fd/{descriptor}").readlink())


class Mounted:
    """The disk that is there now."""

    disk: Disk | None = None
    is_watched = False


@contextmanager
def mounted() -> Iterator[None]:
    """The operating system's calls tell `Mounted.disk` about what happens below its root, until the block ends. May be nested."""
    if Mounted.is_watched:
        yield
        return
    real: dict[str, Callable[..., Any]] = {
        name: getattr(os, name)
        for name in ("mkdir", "unlink", "remove", "rmdir", "rename", "replace", "link", "open", "fsync", "listdir", "scandir")
    }
    real_open = io.open

    def place_of(path: Any, dir_fd: int | None = None) -> str | None:
        return None if Mounted.disk is None else Mounted.disk.covers(path, dir_fd)

    def before(name: str) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            place = place_of(path, kwargs.get("dir_fd"))
            if place is None or Mounted.disk is None:
                return real[name](path, *args, **kwargs)
            Mounted.disk.call(name)
            result = real[name](path, *args, **kwargs)
            if name == "mkdir":
                Mounted.disk.created(place, is_folder=True)
            elif name in {"unlink", "remove", "rmdir"}:
                Mounted.disk.removed(place)
            return result

        return call

    def move(name: str) -> Callable[..., Any]:
        def call(source: Any, target: Any, **kwargs: Any) -> None:
            place, goal = place_of(source), place_of(target)
            if place is None or goal is None or Mounted.disk is None:
                real[name](source, target, **kwargs)
                return
            Mounted.disk.call(name)
            real[name](source, target, **kwargs)
            (Mounted.disk.linked if name == "link" else Mounted.disk.renamed)(place, goal)

        return call

    def fsync(descriptor: int) -> None:
        place = place_of(descriptor)
        if place is not None and Mounted.disk is not None:
            Mounted.disk.call("fsync")
            Mounted.disk.synced(place)

    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        place = None if isinstance(file, int) else place_of(file)
        if place is None or Mounted.disk is None:
            return real_open(file, mode, *args, **kwargs)
        Mounted.disk.call("open" if "r" in mode else "create")
        if "r" in mode:
            return real_open(file, mode, *args, **kwargs)
        torn = _Tearing(os.fspath(file), mode.replace("b", "").replace("t", ""))
        torn.disk = Mounted.disk
        Mounted.disk.created(place, is_folder=False)
        return torn if "b" in mode else io.TextIOWrapper(io.BufferedWriter(torn), encoding=kwargs.get("encoding") or "utf-8")

    fakes = {name: before(name) for name in real if name not in {"fsync", "rename", "replace", "link"}}
    fakes |= {"rename": move("rename"), "replace": move("replace"), "link": move("link"), "fsync": fsync}
    for name, fake in fakes.items():
        setattr(os, name, fake)
    io.open = open_file
    Mounted.is_watched = True
    try:
        yield
    finally:
        for name, original in real.items():
            setattr(os, name, original)
        io.open = real_open
        Mounted.is_watched = False
