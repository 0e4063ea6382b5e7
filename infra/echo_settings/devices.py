"""[[rollout.devices]]: what one worker's devices have, where its engine splits the model over several."""

from __future__ import annotations

from pydantic import Field

from echo_core.layer_split import Device
from echo_settings.section import Section


class DeviceSettings(Section):
    """[[rollout.devices]]: one device of a worker of `vllm` that splits the model over several unequal ones, in the order of
    CUDA_VISIBLE_DEVICES. Which layers go where is planned from it (docs/engines.md)."""

    memory_gb: float = Field(gt=0)
    """Its memory in GB (10⁹ bytes); the plan gives 65 % of it to weights."""
    tflops: float = Field(gt=0)
    """Its speed in the run's `dtype`, in 10¹² operations a second; only the ratio between devices matters."""

    def device(self) -> Device:
        return Device(memory_gb=self.memory_gb, tflops=self.tflops)
