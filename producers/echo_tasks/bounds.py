"""Bounds on processor time and memory, for checkers that compute a model's answer.

Threads: only the main one of a process, where Python handles signals. Code that hangs in C does not return to Python, so it is not ended by
this, but by the pool of scoring processes.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

# The signal is repeated, because libraries that catch everything swallow the first one, or the second.
_REPEAT_S = 0.05
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = resource.getpagesize()


class OutOfBounds(BaseException):
    """The time or the memory is used up. Not an Exception, because code that computes an answer often catches all of those."""


@contextmanager
def bounded(cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """The body may use `cpu_s` seconds of processor time, however busy the machine, and `memory_bytes` more than are mapped now.

    Raises OutOfBounds out of the body; ValueError on any thread but the main one. Memory is bounded on Linux alone.
    """
    is_armed = True

    def end(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if is_armed:
            raise OutOfBounds(f"No end within {cpu_s:g} s of processor time.")

    former = signal.signal(signal.SIGVTALRM, end)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    try:
        _limit_memory(memory_bytes, limits)
        signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s, _REPEAT_S)
        yield
    except MemoryError as exc:
        raise OutOfBounds(f"More than {memory_bytes} bytes of memory.") from exc
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, former)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _limit_memory(more_bytes: int, limits: tuple[int, int]) -> None:
    try:
        mapped = int(_STATM.read_text(encoding="ascii").split()[0]) * _PAGE_BYTES
    except OSError:
        return
    soft, hard = limits
    wanted = mapped + more_bytes
    bounds = [bound for bound in (wanted, soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
