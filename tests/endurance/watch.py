"""Everything that a run must not pile up, sampled while it goes on and judged at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_runtime.announcement import read_announcement
from tests.chaos.live_run import LiveRun
from tests.endurance.judge import WARM_UP, Trend, Verdict, trend_of
from tests.endurance.sampling import bytes_below, held_by, megabytes

_EVERY_S = 2.0
# (share of the level, absolute): growth below the larger of the two within the time looked at is none. Allocators keep what was freed, and
# pools of threads and connections grow by one or two.
_ALLOWED = {
    "memory, MiB": (0.02, 4.0),
    "open files": (0.0, 4.0),
    "threads": (0.0, 4.0),
    "metric series": (0.0, 4.0),
    "disk, MiB": (0.05, 4.0),
}


@dataclass
class Watch:
    """Samples by (who, what), and each process's metric series when they changed."""

    run: LiveRun
    series: dict[tuple[str, str], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    metrics: dict[str, list[tuple[float, frozenset[str]]]] = field(default_factory=lambda: defaultdict(list))

    def sample_for(self, seconds: float) -> None:
        """A sample of everything every two seconds; whoever ends by itself meanwhile is in `run.swarm.exits`."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self._sample()
            self.run.pause(_EVERY_S)

    def trends(self) -> dict[tuple[str, str], Trend]:
        """Of everything that was sampled. Raises ValueError if it was sampled too rarely."""
        found = {}
        for (who, what), samples in self.series.items():
            share, allowed = _ALLOWED[what]
            found[who, what] = trend_of(
                [when for when, _ in samples], [value for _, value in samples], allowed_share=share, allowed=allowed
            )
        return found

    def new_metrics(self, who: str) -> list[str]:
        """The metric series of a process that came after its warm-up."""
        times = [when for when, _ in self.series[who, "metric series"]]
        warm_s = times[0] + WARM_UP * (times[-1] - times[0])
        known = [names for when, names in self.metrics[who] if when <= warm_s]
        return sorted(self.metrics[who][-1][1] - known[-1])

    def _sample(self) -> None:
        now_s = time.monotonic()
        for who, what, value in self._values(now_s):
            self.series[who, what].append((now_s, value))

    def _values(self, now_s: float) -> Iterator[tuple[str, str, float]]:
        swarm = self.run.swarm
        for name in swarm.names:
            announced = read_announcement(swarm.announce(name))
            if announced is None or not swarm.is_running(name):
                continue
            try:
                held = held_by(swarm.pid(name), announced.url)
            except ProcessLookupError:
                # The swarm starts it again, and remembers that it had to.
                continue
            yield name, "memory, MiB", held.memory_mb
            yield name, "open files", held.files
            yield name, "threads", held.threads
            if held.series is not None:
                yield name, "metric series", len(held.series)
                if not self.metrics[name] or self.metrics[name][-1][1] != held.series:
                    self.metrics[name].append((now_s, held.series))
        yield "checkpoints", "disk, MiB", megabytes(bytes_below(swarm.folder / "run"))


def table(trends: Mapping[tuple[str, str], Trend]) -> list[str]:
    """Lines of a table: who, what, its level, how it grew with its uncertainty, what may still hide an hour, and the verdict."""
    lines = ["| who | what | level | growth in the time looked at | at most an hour | verdict |", "|---|---|---|---|---|---|"]
    for (who, what), trend in sorted(trends.items()):
        lines.append(
            f"| {who} | {what} | {trend.level:,.1f} | {trend.growth:+,.2f} ± {trend.error:,.2f} | {trend.at_most_per_hour:,.1f} "
            f"| {_marked(trend.verdict)} |"
        )
    return lines


def as_json(trends: Mapping[tuple[str, str], Trend]) -> list[dict[str, Any]]:
    """The same numbers."""
    return [
        {
            "who": who,
            "what": what,
            "level": round(trend.level, 2),
            "growth": round(trend.growth, 3),
            "error": round(trend.error, 3),
            "allowed": round(trend.allowed, 3),
            "window_s": round(trend.window_s, 1),
            "verdict": trend.verdict.value,
        }
        for (who, what), trend in sorted(trends.items())
    ]


def _marked(verdict: Verdict) -> str:
    return f"**{verdict.value}**" if verdict is Verdict.GROWS else verdict.value


def sizes_of_partitions(data: Path, prefix: str) -> dict[str, tuple[int, int]]:
    """Of each partition of a broker whose topic begins so: the bytes of its log without indexes, and the first offset that it still has."""
    found = {}
    for folder in data.glob(f"{prefix}*"):
        segments = sorted(file.stem for file in folder.glob("*.log"))
        found[folder.name] = bytes_below(folder, ".log"), int(segments[0]) if segments else 0
    return found
