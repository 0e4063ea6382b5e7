"""Everything that the command line prints, and the exit codes of errors."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import IntEnum

from rich.console import Console

from echo_ops.harmless import harmless

_log = logging.getLogger(__name__)

# Of tables in a file or a pipe, where rich takes 80 and cuts what is looked for.
_FILE_WIDTH = 200
# Without emoji: `version:100:` is a version.
out = Console(highlight=False, soft_wrap=True, emoji=False, width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _FILE_WIDTH)
err = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)


class ExitCode(IntEnum):
    """The exit codes of a command besides 0."""

    FAILED = 1
    USAGE = 2
    DRIFT = 3
    BROKEN = 4
    UNPROVED = 5


def fail(message: str, hint: str = "", code: int = ExitCode.FAILED) -> None:
    """Print one sentence and its hint, and exit."""
    err.print(f"[bold red]error:[/] {_escaped(harmless(message, keep_lines=True))}")
    if hint:
        err.print(f"[dim]hint:[/]  {_escaped(harmless(hint, keep_lines=True))}")
    sys.exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print an error of the project, or a file that the system refuses, as one sentence and exit. Any other error is a bug and keeps its
    traceback.
    """
    from echo_schemas.errors import EchoError, UserError

    try:
        yield
    except EchoError as exc:
        fail(exc.message, exc.hint, ExitCode.USAGE if isinstance(exc, UserError) else ExitCode.FAILED)
    except OSError as exc:
        if exc.filename is None or exc.strerror is None:
            raise
        # In the log of a role; a command without a log shows the sentence alone.
        _log.info("The system refuses a file", exc_info=True)
        fail(f"{exc.filename} cannot be read or written: {exc.strerror}.", "Name another file or folder.", ExitCode.USAGE)
    except KeyboardInterrupt:
        sys.exit(130)


def remark(kind: str, sentences: Iterable[str]) -> None:
    """Print each sentence on standard error, behind `missing` or `note`."""
    for sentence in sentences:
        err.print(f"{kind}: {sentence}", markup=False)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, with columns as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def shown_time(time_ms: int) -> str:
    """Unix ms as text in UTC, to the second."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _escaped(text: str) -> str:
    """`text` with its square brackets as text, not as markup."""
    return text.replace("[", r"\[")
