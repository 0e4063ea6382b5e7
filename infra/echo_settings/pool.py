"""[[rollout.pool]], [[rollout.devices]], [coordinator]: workers that are not alike, their devices, and how many take part at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from echo_core.layer_split import Device
from echo_settings.section import PartOfKey, Section


class DeviceSettings(Section):
    """[[rollout.devices]]: one device of a worker of `vllm` that splits the model over several unequal ones, in the order of
    CUDA_VISIBLE_DEVICES. Which layers go where is planned from it (docs/engines.md)."""

    memory_gb: float = Field(gt=0)
    """Its memory in GB (10⁹ bytes); the plan gives 65 % of it to weights."""
    tflops: float = Field(gt=0)
    """Its speed in the run's `dtype`, in 10¹² operations a second; only the ratio between devices matters."""

    def device(self) -> Device:
        return Device(memory_gb=self.memory_gb, tflops=self.tflops)


class PoolSettings(Section):
    """[[rollout.pool]]: one kind of worker; a file may have several. Values that it leaves out are those of [rollout]."""

    name: PartOfKey
    """Names the kind: on the screen, in the report, and for `echoswarm run worker --kind`; letters, digits, '.', '_' and '-'."""
    engine: str | None = None
    """As [rollout] engine; none: that one."""
    workers: int = Field(default=1, ge=0)
    """Workers of this kind that `echoswarm up` starts on this machine; 0 where they are started by hand, on others."""
    price_per_hour: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Price of one worker of this kind; none: as in [rollout]."""
    price_file: str | None = None
    """As [rollout] price_file; none: that one, unless the kind has a `price_per_hour`."""
    most_workers: int | None = Field(default=None, ge=1)
    """Most workers that an autoscaler may start ([coordinator] machines = "metric"); none: as many as there are now."""
    drain_s: float | None = Field(default=None, gt=0)
    """As [run] drain_s, for workers that are told some time before their machine is taken away; none: that one."""
    groups_in_flight: int | None = Field(default=None, ge=1)
    """Requests that one of them works on at once; none: as in [rollout]."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the engine, over those of [rollout.options], which hold for kinds of the same engine."""
    devices: tuple[DeviceSettings, ...] | None = None
    """As [rollout] devices; none: those, for kinds of the same engine."""


def check_pool(pool: Sequence[PoolSettings], *, has_workers: bool) -> None:
    """Raise ValueError unless each kind is named once. `has_workers`: [rollout] has a number of workers of its own."""
    repeated = [name for name, count in Counter(kind.name for kind in pool).items() if count > 1]
    if repeated:
        raise ValueError(f"[[rollout.pool]] describes the kind {repeated[0]!r} twice; give each kind its own name")
    if pool and has_workers:
        raise ValueError(
            "[rollout] workers and [[rollout.pool]] exclude one another: write how many there are of each kind in its [[rollout.pool]]"
        )


class CoordinatorSettings(Section):
    """[coordinator]: puts workers that the learner does not need on standby, and calls them back (docs/coordinator.md)."""

    enabled: bool = False
    """Whether there is a coordinator. Without one every worker takes part, and orders of earlier coordinators do not count."""
    every_s: float = Field(default=5.0, gt=0)
    """Seconds between two checks. Two checks with a shortage activate the cheapest worker; five with a surplus release the dearest one."""
    gamma: float = Field(default=1.1, ge=1)
    """Safety factor on the smallest rate that hides generation behind training; 1.1 is ECHO-2's."""
    hysteresis: float = Field(default=0.15, ge=0)
    """The surplus that must remain after a release, as a share of the target; less saves more and calls workers back more often."""
    release_s: float = Field(default=30.0, ge=0)
    """How long a released worker goes on with its requests; then it hands the unfinished ones back to others."""
    machines: Literal["standby", "local", "metric"] = "standby"
    """A released worker: `standby`: keeps its engine; `local`: `echoswarm up` ends its process and starts it again when it is needed;
    `metric`: nothing happens, and the gauge `wanted_workers` tells an autoscaler how many workers of each kind are needed."""
