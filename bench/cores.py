"""How much longer the same work takes on one core while the other one is busy: processor time, not waiting for a turn.

    python bench/cores.py [--rounds N] [--json FILE]

Virtual cores of a shared machine may be halves of one real core, and share caches and memory with others. So a process's processor time
grows with what runs beside it, and a benchmark's figures with it. Each kind of work is timed alone and beside itself, in turn; the
middle of the ratios is printed with its quartiles. 1.00: the cores do not disturb each other.
"""

from __future__ import annotations

import functools
import multiprocessing as mp
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from command import parser_of, save

_CONTEXT = mp.get_context("spawn")
_SETTLED_S = 0.02


def interpret() -> None:
    """A loop in Python: the interpreter's own work, within the first caches."""
    total = 0
    for number in range(400_000):
        total += number * number


def look_up() -> None:
    """A dictionary of a hundred thousand names, read in no order: the second and third caches."""
    names = _names()
    total = 0
    for number in range(0, 7 * len(names), 7):
        total += names[str(number % len(names))]


def multiply() -> None:
    """Matrices that fit into the caches: the vector units."""
    import numpy as np

    matrix = np.ones((400, 400), np.float32)
    for _ in range(20):
        matrix @ matrix


def copy() -> None:
    """Sixteen times 16 MiB: the memory."""
    import numpy as np

    source = np.ones(1 << 24, np.uint8)
    for _ in range(16):
        source.copy()


WORKS: Mapping[str, Callable[[], None]] = {"interpret": interpret, "look_up": look_up, "multiply": multiply, "copy": copy}


@functools.cache
def _names() -> dict[str, int]:
    return {str(number): number for number in range(100_000)}


def accompany(name: str, core: int, is_wanted: Any, is_over: Any) -> None:
    """The other core's process: works while it is wanted."""
    os.sched_setaffinity(0, {core})
    WORKS[name]()
    while not is_over.is_set():
        if is_wanted.wait(0.1):
            WORKS[name]()


def ratios_of(name: str, cores: tuple[int, int], rounds: int) -> list[float]:
    """Processor time beside the same work over that alone, for each round."""
    is_wanted, is_over = _CONTEXT.Event(), _CONTEXT.Event()
    other = _CONTEXT.Process(target=accompany, args=(name, cores[1], is_wanted, is_over), daemon=True)
    other.start()
    os.sched_setaffinity(0, {cores[0]})
    try:
        WORKS[name]()
        alone_s, found = _timed(name), []
        for _ in range(rounds):
            is_wanted.set()
            time.sleep(_SETTLED_S)
            beside_s = _timed(name)
            is_wanted.clear()
            time.sleep(10 * _SETTLED_S)
            after_s = _timed(name)
            found.append(2 * beside_s / (alone_s + after_s))
            alone_s = after_s
    finally:
        is_over.set()
        other.join()
        os.sched_setaffinity(0, set(cores))
    return found


def _timed(name: str) -> float:
    began_s = time.process_time()
    WORKS[name]()
    return time.process_time() - began_s


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    # Before numpy is loaded, here and in the other process: one thread, on the core that it is timed on.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("This process may use one core only; the comparison needs two.")
    figures = {}
    for name in WORKS:
        found = ratios_of(name, (cores[0], cores[1]), arguments.rounds)
        low, middle, high = statistics.quantiles(found, n=4)
        figures[name] = {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
        sys.stdout.write(f"{name:10} {middle:.2f} times as long beside itself (half of {len(found)} rounds: {low:.2f} to {high:.2f})\n")
        sys.stdout.flush()
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
