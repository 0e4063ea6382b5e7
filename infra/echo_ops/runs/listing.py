"""The runs of a namespace, with the state of each."""

from __future__ import annotations

import json
import math
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum

from echo_bus.bus import Bus
from echo_bus.errors import TopicMissing
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Progress, Run, RunState, ordered_state
from echo_schemas.topics import PROGRESS, RUNS

# A learner writes its progress at least once a second.
_HEARD_MS = 10_000
# A quota holds single records back for minutes, and the reading of the log at a start as well.
_HEARD_UNDER_QUOTA_MS = 600_000


class RunStatus(StrEnum):
    TRAINING = "training"
    THROTTLED = "throttled"
    """A client quota holds its learner back (`Progress.held`): what is heard of it may be minutes old."""
    PAUSED = "paused"
    """Its learner is alive and waits for an order to go on."""
    STOPPING = "stopping"
    """It has the order to stop, and its learner is still alive."""
    STOPPED = "stopped"
    FINISHED = "finished"
    """All its steps are trained."""
    SILENT = "silent"
    """It has no order to stop, and its learner writes no progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """One run. `progress` None: its learner never wrote any; `steps`: of the whole run, 0: without an end; `order`: the newest one."""

    run: Run
    progress: Progress | None
    steps: int
    order: Control | None
    status: RunStatus

    @property
    def is_alive(self) -> bool:
        """Whether its learner wrote progress lately."""
        return self.status in {RunStatus.TRAINING, RunStatus.THROTTLED, RunStatus.PAUSED, RunStatus.STOPPING}


def read_runs(bus: Bus) -> list[RunLine]:
    """Every run of the namespace, the oldest first. `bus`: without a run. Raises TransportError."""
    runs = bus.newest(RUNS, Run)
    progress: dict[str, Progress] = {}
    orders: dict[str, Control] = {}
    # After an interrupted removal only the topic `runs` may be left.
    with suppress(TopicMissing):
        progress = bus.newest(PROGRESS, Progress)
    with suppress(TopicMissing), closing(bus.orders()) as view:
        orders = view.items()
    now_ms = bus.clock.time_ms()
    lines = (line_of(run, progress.get(name), orders.get(f"{name}/run"), now_ms) for name, run in runs.items())
    return sorted(lines, key=lambda line: line.run.created_ms)


def line_of(run: Run, progress: Progress | None, order: Control | None, now_ms: int) -> RunLine:
    """The state of a run at `now_ms`."""
    wanted = ordered_state(order)
    steps = _steps_of(run)
    age_ms = math.inf if progress is None else now_ms - progress.time_ms
    is_finished = progress is not None and 0 < steps <= progress.version
    is_held = progress is not None and progress.held is not None and age_ms <= _HEARD_UNDER_QUOTA_MS
    if is_held and wanted is RunState.RUNNING and not is_finished:
        status = RunStatus.THROTTLED
    elif age_ms <= _HEARD_MS:
        status = {RunState.RUNNING: RunStatus.TRAINING, RunState.PAUSED: RunStatus.PAUSED, RunState.STOPPING: RunStatus.STOPPING}[wanted]
    elif is_finished:
        status = RunStatus.FINISHED
    else:
        status = RunStatus.STOPPED if wanted is RunState.STOPPING else RunStatus.SILENT
    return RunLine(run=run, progress=progress, steps=steps, order=order, status=status)


def find_run(lines: list[RunLine], name: str, namespace: str) -> RunLine:
    """The run `name`. Raises UserError, which names the known runs."""
    for line in lines:
        if line.run.run_id == name:
            return line
    known = ", ".join(line.run.run_id for line in lines)
    raise UserError(f"{namespace} has no run {name!r}.", hint=f"It has {known}." if known else "No run was ever accepted there.")


def _steps_of(run: Run) -> int:
    try:
        return int(json.loads(run.config)["learner"]["steps"])
    except (ValueError, KeyError, TypeError):
        # Another release wrote it.
        return 0
