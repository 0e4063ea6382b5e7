"""What the tests of scoring stand on: functions that misbehave, a scorer around them, and messages as a consumer gets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from echo_bus.clock import ManualClock
from echo_memory.message import MemoryMessage
from echo_schemas.codec import lock_file_codec
from echo_schemas.headers import headers_of
from echo_schemas.naming import Namespace
from echo_schemas.records import Trajectory
from echo_schemas.topics import TRAJECTORIES
from echo_settings.sections import ScoringSettings
from echo_streams.metrics import StreamsMetrics
from echo_streams.scoring import Attached, Judgeable, Scorer
from echo_tasks.rewards import RewardFunction, reward
from tests.unit.core.records import at, trajectory

NAMESPACE = Namespace("unit")
CODEC = lock_file_codec()


def attached(function: Callable[..., Any], name: str = "r", **options: Any) -> Attached:
    """A function under a name, decorated if it is not yet."""
    made = function if isinstance(function, RewardFunction) else reward(name=name, **options)(function)
    return Attached(name=name, function=made)


def scorer(*entries: Attached, metrics: StreamsMetrics | None = None, **limits: Any) -> Scorer:
    """Without processes; limits as `ScoringSettings`."""
    metrics = metrics or StreamsMetrics()
    return Scorer(entries, run_id="demo", limits=ScoringSettings(**limits), metrics=metrics, clock=ManualClock())


def judgeable(count: int = 1, **changes: Any) -> list[Judgeable]:
    """Samples whose completions are their numbers, at offsets that are theirs too."""
    return [Judgeable(trajectory=trajectory(number, completion=str(number), **changes), at=at(number)) for number in range(count)]


def message(record: Trajectory, offset: int = 0, *, partition: int = 0, **changes: Any) -> MemoryMessage:
    """A trajectory as the log holds it; `changes` are MemoryMessage's fields without their underscore."""
    fields: dict[str, Any] = {
        "topic": NAMESPACE.topic(TRAJECTORIES),
        "partition": partition,
        "offset": offset,
        "key": record.group_id.encode(),
        "value": CODEC.encode(record),
        "headers": headers_of(record, source="worker", time_ms=5),
    }
    return MemoryMessage(**{f"_{name}": value for name, value in {**fields, **changes}.items()})


def sample(metrics: StreamsMetrics, metric: str, /, **labels: str) -> float:
    """A metric's value, 0 if it was never touched."""
    return metrics.registry.get_sample_value(metric, labels) or 0.0


def values(rewards: Sequence[Any]) -> list[float | None]:
    """The rewards' values."""
    return [found.value for found in rewards]
