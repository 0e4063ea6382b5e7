"""One fault after another on one run, what each cost, and the table of them."""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.chaos.faults import Fault, inject
from tests.chaos.scene import Scene
from tests.chaos.swarm import Exit

# So many steps after a fault no sample from before it is left to train: three steps' prompts are under way at most.
SETTLED_STEPS = 4
# On two quiet cores a step follows within 15 s of any fault; a machine that does other things may take ten times as long.
GOES_ON_WITHIN_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fault cost. `stall_s`: the longest time without a step until the run had settled; `recovery_s`: from the fault's end (started
    again, woken, healed) to the next new step; `exits`: who ended by itself and was started again.
    """

    fault: Fault
    stall_s: float
    recovery_s: float
    exits: tuple[Exit, ...]

    def __str__(self) -> str:
        ended = f"; {', '.join(map(str, self.exits))}" if self.exits else ""
        return f"{self.fault}: longest stall {self.stall_s:.1f} s, next step {self.recovery_s:.1f} s after its end{ended}"


def suffer(scene: Scene, fault: Fault, rng: random.Random) -> Outcome:
    """One fault, until the run has settled. Fails if training does not go on in time."""
    known, started_s = len(scene.swarm.exits), time.monotonic()
    inject(scene, fault, rng)
    ended_s, version = time.monotonic(), scene.follower.version
    scene.wait_for(version + SETTLED_STEPS, GOES_ON_WITHIN_S, str(fault))
    return Outcome(
        fault=fault,
        stall_s=scene.follower.longest_gap_s(started_s, version + SETTLED_STEPS),
        recovery_s=max(0.0, scene.follower.seen_s(version + 1) - ended_s),
        exits=tuple(scene.swarm.exits[known:]),
    )


def table(outcomes: Iterable[Outcome]) -> list[str]:
    """Lines of a table: fault, times, recovery median and worst, worst stall, exits by themselves."""
    rows: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        rows[outcome.fault.row].append(outcome)
    lines = [
        "| fault | times | next step after its end, median (s) | worst (s) | longest stall (s) | processes that ended by themselves |",
        "|---|---|---|---|---|---|",
    ]
    for row, found in sorted(rows.items()):
        recoveries = [outcome.recovery_s for outcome in found]
        exits = sum(len(outcome.exits) for outcome in found)
        worst_stall_s = max(outcome.stall_s for outcome in found)
        lines.append(
            f"| {row} | {len(found)} | {statistics.median(recoveries):.1f} | {max(recoveries):.1f} | {worst_stall_s:.1f} | {exits} |"
        )  # fmt: skip
    return lines


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """Each outcome with all that is known of it."""
    return [
        {
            "fault": outcome.fault.kind.value,
            "target": outcome.fault.target,
            "seconds": round(outcome.fault.seconds, 2),
            "stall_s": round(outcome.stall_s, 2),
            "recovery_s": round(outcome.recovery_s, 2),
            "exits": [str(each) for each in outcome.exits],
        }
        for outcome in outcomes
    ]
