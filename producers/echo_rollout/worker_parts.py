"""What a worker is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_rollout.engines.engine import Engine
from echo_rollout.journal import CrashJournal
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.sources import SnapshotSource
from echo_runtime.notices import Notices
from echo_runtime.places import PlaceTimes
from echo_settings import Settings
from echo_tasks.prompts import ChatCodec
from echo_tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker works with. `folder`: empty, for this worker alone; `vocabulary`: token ids are below it; `kind`: as in
    [[rollout.pool]]. `may_join`: whether it may take requests by now; may wait a moment.
    """

    settings: Settings
    worker_id: str
    engine_name: str
    bus: Bus
    engine: Engine
    task: Task
    codec: ChatCodec
    vocabulary: int
    source: SnapshotSource
    journal: CrashJournal
    folder: Path
    places: PlaceTimes
    notices: Notices
    metrics: WorkerMetrics
    clock: Clock
    kind: str = ""
    may_join: Callable[[], bool] = lambda: True
    # The source of the newest versions, if not `source`, which has every version; and the address at which peers may ask for them.
    newest_source: SnapshotSource | None = None
    peer_address: str = ""
    # By the evaluation's name; other evaluations use `task`.
    evaluation_tasks: Mapping[str, Task] = field(default_factory=dict)
