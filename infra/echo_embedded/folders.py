"""Where the embedded broker keeps things: downloads in the user's cache folder, state and data in the state folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from echo_bus.clock import Deadline
from echo_schemas.errors import UserError

CACHE_VARIABLE = "ECHO_CACHE_FOLDER"
STATE_VARIABLE = "ECHO_STATE_FOLDER"
_DYING_S = 1.0
_LOOK_EVERY_S = 0.02


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept; safe to delete while no broker runs. `ECHO_CACHE_FOLDER` overrides."""
    return _folder(environ, CACHE_VARIABLE, "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where a running broker's state file and data are. `ECHO_STATE_FOLDER` overrides."""
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
    """Make `folder` and those above it. Raises UserError if this user cannot write there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UserError(
            f"The folder {folder} cannot be made: {exc.strerror}.", hint=f"{CACHE_VARIABLE} and {STATE_VARIABLE} name other places."
        ) from exc
    if not os.access(folder, os.W_OK):
        raise UserError(f"The folder {folder} cannot be written to.", hint=f"{CACHE_VARIABLE} and {STATE_VARIABLE} name other places.")


def hold(path: Path) -> TextIO | None:
    """The lock file `path`, open and locked; None if somebody else holds it, and goes on to for a second.

    The lock lasts until the last process that inherited the open file has closed it or died.
    """
    make_folder(path.parent)
    file = path.open("w")
    # A process that was killed a moment ago has lost its command line first and its open files last.
    deadline = Deadline.after(_DYING_S)
    while not _try_lock(file):
        if deadline.expired():
            file.close()
            return None
        time.sleep(_LOOK_EVERY_S)
    return file


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`; blocks while another does. The kernel frees it when its holder dies."""
    make_folder(path.parent)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(final: Path) -> Iterator[Path]:
    """An empty folder that becomes `final` by one rename if the block ends well, and vanishes if it does not.

    Call it under a lock of `final`'s own: what a killed predecessor left is removed first.
    """
    for stale in final.parent.glob(f".{final.name}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
    try:
        yield scratch
        scratch.rename(final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
