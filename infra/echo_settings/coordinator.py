"""[coordinator]: how many of the workers take part in a run at a time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from echo_settings.section import Section


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
