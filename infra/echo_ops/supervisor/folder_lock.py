"""One `echoswarm up` per run folder: a lock that ends with its process."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_NAME = "up.lock"


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Make `folder` and hold its lock. Raises UserError, before anything in it is changed, if another process holds the lock.

    The lock is the system's (flock), so a file that stays behind locks nothing. A file system without locks gives only a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"A run is going on in {folder} already ({file.read().strip() or 'its process is not known'}).",
                hint="Stop it first, or give this run a [checkpoint] folder and a [run] name of its own. Nothing was changed.",
            ) from None
        except OSError as exc:
            logger.warning("%s cannot be locked (%s): take care that only one `echoswarm up` uses it", folder, exc.strerror)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield
