"""A cell's result: curves and evaluations, as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from laboratory.matrix import FINAL, HELD_OUT

QUIET_CORES = 0.2
"""With more work of others, a cell's seconds say nothing about its condition."""
SAME_CORES = 1.1
"""Shared cores change their speed within an hour. Cells on cores that differ by more are not compared by their seconds."""


@dataclass(slots=True)
class Curve:
    """One value per step. `seconds`: from the end of the first step, without start-up; `samples`: trained in all; `reward` and `staleness`:
    means of the batch."""

    version: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)
    zero_s: float = 0.0

    def add(self, version: int, time_s: float, num_samples: int, reward: float, staleness: float) -> None:
        """Add a step that ended at `time_s` of any clock."""
        if not self.version:
            self.zero_s = time_s
        self.version.append(version)
        self.seconds.append(round(time_s - self.zero_s, 2))
        self.samples.append(num_samples + (self.samples[-1] if self.samples else 0))
        self.reward.append(round(reward, 5))
        self.staleness.append(round(staleness, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation of one version on held-out prompts; `stderr` over its prompts."""

    name: str
    version: int
    mean: float
    stderr: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`outcome`: finished or diverged. `wall_s`: the whole command, including its start. `facts`: other figures."""

    outcome: str
    wall_s: float
    curve: Curve
    evaluated: Sequence[Evaluated]
    facts: dict[str, Any]

    @property
    def final(self) -> float:
        """The last version's accuracy on the most held-out prompts; if it diverged, that of the last evaluation, else 0."""
        for name in (FINAL, HELD_OUT):
            found = [each.mean for each in self.evaluated if each.name == name]
            if found:
                return found[-1]
        return 0.0

    @property
    def train_s(self) -> float:
        """From the end of the first step to that of the last, including evaluations."""
        return self.curve.seconds[-1]

    @property
    def num_steps(self) -> int:
        """How many steps were trained."""
        return len(self.curve.version)

    @property
    def engine(self) -> str | None:
        """The engine that generated its samples; None in files of an earlier laboratory."""
        return self.facts.get("engine")

    @property
    def others(self) -> float | None:
        """How many cores other processes of the machine, and its host, took meanwhile; None in files of an earlier laboratory."""
        return self.facts.get("others")

    @property
    def is_timed(self) -> bool:
        """Whether its seconds are its own: others took at most `QUIET_CORES`."""
        return self.others is not None and self.others <= QUIET_CORES

    @property
    def core_s(self) -> float | None:
        """Seconds of a loop that was timed before and after it: how fast the cores were. None in files of an earlier laboratory."""
        return self.facts.get("core_s")

    def is_timed_like(self, other: Result) -> bool:
        """Whether both may be compared by seconds: neither had others beside it, and the cores were as fast (`SAME_CORES`)."""
        if not (self.is_timed and other.is_timed and self.core_s and other.core_s):
            return False
        return max(self.core_s, other.core_s) <= SAME_CORES * min(self.core_s, other.core_s)

    def held_out(self) -> list[Evaluated]:
        """The held-out evaluations by version."""
        return sorted((each for each in self.evaluated if each.name == HELD_OUT), key=lambda each: each.version)


def write_result(file: Path, result: Result, conditions: dict[str, Any]) -> None:
    """Write the file atomically, in a few kilobytes, since it is committed. `conditions`: when, at which commit and beside what it ran."""
    content = {**asdict(result), "wall_s": round(result.wall_s, 1), "conditions": conditions}
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    beside.replace(file)


def read_result(file: Path) -> Result:
    """Read a file of `write_result`."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return Result(
        outcome=content["outcome"],
        wall_s=content["wall_s"],
        curve=Curve(**content["curve"]),
        evaluated=[Evaluated(**each) for each in content["evaluated"]],
        facts={**content["facts"], **content["conditions"]},
    )
