"""The jobs of engines, where vLLM is imported already."""

from __future__ import annotations

from echo_rollout.engines.catalogue import prefetch
from tests.contract.engines.engine_jobs import keep_contract as keep_contract
from tests.integration.engines.family_jobs import engine_difference as engine_difference
from tests.integration.engines.mixed_adapters import mix_adapters as mix_adapters
from tests.integration.engines.split_model import split_model as split_model

prefetch("vllm")
