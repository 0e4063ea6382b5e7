"""A reward that holds on to memory and to files: what `python -m tests.endurance --leak` must find."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from echo_tasks.rewards import ScoredSample, reward

_held: list[bytes] = []
_files: list[IO[bytes]] = []
_BYTES = 10_000
_FILE_EVERY = 200


@reward(name="hoarder")
def hoarder(sample: ScoredSample) -> float:
    """0, and ten kilobytes less; of every two hundredth sample a file too."""
    _held.append(bytes([len(sample.completion) % 251]) * _BYTES)
    if len(_held) % _FILE_EVERY == 0:
        _files.append(Path("/dev/null").open("rb"))  # noqa: SIM115  that it is never closed is the point
    return 0.0
