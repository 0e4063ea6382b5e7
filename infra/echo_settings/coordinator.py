"""[coordinator]: how many of the workers take part while a run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from echo_settings.section import Section


class CoordinatorSettings(Section):
    """[coordinator]: puts workers that the learner does not need on standby, and calls them back (docs/coordinator.md)."""

    enabled: bool = False
    """Whether there is a coordinator. Without one every worker takes part, whatever a coordinator of an earlier start ordered."""
    every_s: float = Field(default=5.0, gt=0)
    """Seconds between two looks. A shortage of two looks activates the cheapest; a surplus of five releases the dearest, one at a time."""
    gamma: float = Field(default=1.1, ge=1)
    """Safety factor on the smallest rate that hides generation behind training; 1.1 is ECHO-2's."""
    hysteresis: float = Field(default=0.15, ge=0)
    """What a release must leave above the target, as a share of it; less saves more and calls back more often."""
    release_s: float = Field(default=30.0, ge=0)
    """How long a worker that is released goes on with what it has in hand; what is not done by then is handed back, and others do it."""
    machines: Literal["standby", "local", "metric"] = "standby"
    """What becomes of a worker that is released: it stands by with its engine; `local`: `echoswarm up` ends its process and starts it again
    when it is called; `metric`: nothing, and the gauge `wanted_workers` tells an autoscaler how many of each kind are wanted."""
