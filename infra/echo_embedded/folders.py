"""Folders of the embedded broker: downloads in the user's cache folder, state and data in the state folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from echo_bus.clock import Deadline
from echo_schemas.errors import UserError

CACHE_VARIABLE = "ECHO_CACHE_FOLDER"
STATE_VARIABLE = "ECHO_STATE_FOLDER"
_DYING_S = 1.0
_LOOK_EVERY_S = 0.02


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of downloads; safe to delete while no broker runs. `ECHO_CACHE_FOLDER` overrides."""
    return _folder(environ, CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of a running broker's state file and data. `ECHO_STATE_FOLDER` overrides."""
    return _folder(environ, STATE_VARIABLE, "XDG_STATE_HOME", ".local/state")


def _folder(environ: Mapping[str, str], variable: str, xdg_variable: str, below_home: str) -> Path:
    if override := environ.get(variable):
        return Path(override).expanduser().absolute()
    if xdg := environ.get(xdg_variable):
        return Path(xdg).expanduser().absolute() / "echoswarm"
    home = Path(environ.get("HOME") or Path.home())
    if sys.platform == "darwin":
        return home / "Library" / ("Caches" if variable == CACHE_VARIABLE else "Application Support") / "echoswarm"
    return home / below_home / "echoswarm"


def make_folder(folder: Path) -> None:
    """Create `folder` and its parents. Raises UserError if this user cannot write there."""
    hint = f"{CACHE_VARIABLE} and {STATE_VARIABLE} name other places."
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(f"The folder {folder} cannot be made: {exc.strerror}.", hint=hint) from exc
    if not os.access(folder, os.W_OK):
        raise UserError(f"The folder {folder} cannot be written to.", hint=hint)


def hold(path: Path) -> TextIO | None:
    """The lock file `path`, open and locked; None if another process holds it for a second.

    The lock lasts until the last process that inherited the open file has closed it or died.
    """
    file = _open_lock(path)
    # A killed process loses its command line first and its open files last.
    deadline = Deadline.after(_DYING_S)
    while not deadline.expired():
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        time.sleep(_LOOK_EVERY_S)
    file.close()
    return None


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; blocks while another process holds it. The kernel frees it when its holder ends."""
    with _open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open_lock(path: Path) -> TextIO:
    make_folder(path.parent)
    try:
        return path.open("w")
    except OSError as exc:
        raise UserError(
            f"The lock file {path} cannot be opened: {exc.strerror}.", hint="Is it another user's? Remove it if nobody uses the folder."
        ) from exc


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """An empty folder: renamed to `final` when the block ends, deleted if it raises.

    The caller must hold a lock for `final`, because leftovers of a killed predecessor are deleted first.
    """
    for stale in final.parent.glob(f".{final.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
    try:
        yield scratch
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
