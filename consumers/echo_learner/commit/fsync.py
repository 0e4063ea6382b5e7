"""Forces files and folders onto the disk, so that they survive a loss of power."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def sync_tree(folder: Path) -> None:
    """Force `folder` and everything below it onto the disk. Raises OSError."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync_parents(path: Path) -> None:
    """Force the lists of names of all folders above `path` onto the disk."""
    for folder in path.parents:
        # Skip folders that we may not open: we did not create them. Not every file system lets its root be synced.
        with suppress(OSError):
            sync(folder)


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, onto the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
