"""When Python looks for cycles of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# More objects than any batch of records has.
_SELDOM = 1_000_000


@contextmanager
def seldom_collected() -> Iterator[None]:
    """For a command that makes millions of objects and hardly a cycle: looking for one goes through every object of the process, again and
    again, and took a fifth of an export's time, half of a large simulation's. It is still looked for, each million objects that stay.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_SELDOM, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def without_collection() -> Iterator[None]:
    """For imports at a process's start: switches the garbage collector off meanwhile, and excludes the new objects from it for ever.

    Otherwise it would scan hundreds of thousands of lasting objects again and again: a seventh of the time of vLLM's imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
