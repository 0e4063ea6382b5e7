"""Everything that the command line prints, and the exit codes of errors."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path

from rich.console import Console

# Without emoji: `version:100:` is a version.
out = Console(highlight=False, soft_wrap=True, emoji=False)
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
    err.print(f"[bold red]error:[/] {_escaped(message)}")
    if hint:
        err.print(f"[dim]hint:[/]  {_escaped(hint)}")
    sys.exit(code)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print an error of the project as one sentence and exit. Any other error is a bug and keeps its traceback."""
    from echo_schemas.errors import EchoError, UserError

    try:
        yield
    except EchoError as exc:
        fail(exc.message, exc.hint, ExitCode.USAGE if isinstance(exc, UserError) else ExitCode.FAILED)
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


def write_page(path: Path, content: str) -> None:
    """Raises UserError where the file cannot be written."""
    from echo_schemas.errors import UserError

    try:
        path.write_text(content, encoding="utf-8")
    except OSError as exc:
        raise UserError(f"The page {path} cannot be written: {exc.strerror}.", hint="Name a file in a folder that exists.") from exc


def shown_time(time_ms: int) -> str:
    """Unix ms as text in UTC, to the second."""
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _escaped(text: str) -> str:
    """`text` with its square brackets as text, not as markup."""
    return text.replace("[", r"\[")
