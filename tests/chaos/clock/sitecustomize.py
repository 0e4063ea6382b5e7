"""Shifts what Python calls the wall clock, in processes that are started with this folder on PYTHONPATH and CHAOS_CLOCK in the environment.

CHAOS_CLOCK names a file of eight bytes, a little-endian count of nanoseconds, which is looked at whenever the time is asked for: so a test
steps the clock of one running process. librdkafka and the kernel keep the true time.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

_offset = struct.Struct("<q")


def _shift(path: str) -> None:
    with open(path, "rb") as file:  # noqa: PTH123  pathlib is not imported this early for nothing
        shared = mmap.mmap(file.fileno(), _offset.size, prot=mmap.PROT_READ)
    true_ns = time.time_ns

    def time_ns() -> int:
        found: int = true_ns() + _offset.unpack_from(shared)[0]
        return found

    def now() -> float:
        return time_ns() / 1e9

    time.time_ns = time_ns
    time.time = now


if path := os.environ.get("CHAOS_CLOCK"):
    _shift(path)
