"""[[rollout.pool]]: the kinds of workers of a run whose workers are not alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from echo_settings.devices import DeviceSettings
from echo_settings.section import PartOfKey, Section


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
