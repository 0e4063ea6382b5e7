"""A worker's folder for the snapshots that it has fetched, in shared memory where there is room.

A worker that is killed leaves its folder behind, which may take up memory. So a living worker holds a lock on its folder, and every worker
that starts removes the folders without a lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "echoswarm-weights-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  the place that is meant
# Room for the versions in use, and for the next one beside them.
_ROOM_FACTOR = 4
# The version in use, and the one that arrives.
_LEAST_FACTOR = 2
_GIB = 1 << 30
# A younger folder is never taken for abandoned: it may not be locked yet.
_YOUNG_S = 60.0


@contextmanager
def snapshot_folder(num_bytes: int, *, shared_memory: Path = _SHARED_MEMORY) -> Iterator[Path]:
    """A new folder for snapshots of about `num_bytes` each, gone afterwards: in shared memory or among temporary files."""
    parent = _parent(num_bytes, shared_memory)
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _parent(num_bytes: int, shared_memory: Path) -> Path:
    with suppress(OSError):
        if shutil.disk_usage(shared_memory).free >= num_bytes * _ROOM_FACTOR and os.access(shared_memory, os.W_OK):
            return shared_memory
    folder = Path(tempfile.gettempdir())
    with suppress(OSError):
        free = shutil.disk_usage(folder).free
        if free < num_bytes * _LEAST_FACTOR:
            logger.warning(
                "%s has %.1f GiB left, and a worker needs room for two snapshots of about %.1f. Free space there, or set TMPDIR.",
                folder,
                free / _GIB,
                num_bytes / _GIB,
            )
    return folder


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose worker is gone. A folder that cannot be removed stays."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.getuid() or time.time() - folder.stat().st_mtime < _YOUNG_S:
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
