"""The user's function that mends a letter, by file or module: `mends.py:shorten`."""

from __future__ import annotations

from collections.abc import Callable

from echo_ops.redrive.letters import Letter
from echo_schemas.errors import UserError
from echo_schemas.records import Record
from echo_tasks.catalogue import import_object

Mend = Callable[[Letter], Record | bytes | None]
"""Returns the correct record, or its bytes; None leaves the letter where it is. `letter.value` is what was written."""


def load_mend(name: str) -> Mend:
    """The function `name` (`file.py:function` or `package.module:function`). Raises UserError if it cannot be loaded."""
    if not all(name.partition(":")):
        raise UserError(f"{name!r} names no function.", hint="Write file.py:function, or package.module:function.")
    found = import_object(name)
    if not callable(found):
        raise UserError(f"{name!r} is no function.", hint="It takes a letter and returns a record, bytes or None.")
    mend: Mend = found
    return mend
