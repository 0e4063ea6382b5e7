"""vLLM in processes of its own (AsyncLLM), for GPUs: scheduling and sampling share no interpreter with the worker. Imports vllm.

Threads: none of its own; everything runs on the asyncio loop. `install` of full weights closes the gate, waits until no generation runs,
reloads, and opens the gate again; adapters are loaded while generations run.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo_rollout.engines.adapters import Adapter
from echo_rollout.engines.engine import EngineConfig, EngineError, Generation, Snapshot, SnapshotRejected
from echo_rollout.engines.fitting import check_fit, weight_shapes
from echo_rollout.engines.serving import LoopEngine
from echo_rollout.engines.vllm_arguments import (
    batch_decoder,
    capabilities_of,
    engine_arguments,
    generations_of,
    max_rank,
    sampling_params,
    set_environment,
)
from echo_schemas.errors import UserError
from echo_schemas.records import Sampling, WeightKind


class VllmAsync(LoopEngine):
    """See `Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.capabilities = capabilities_of(config)
        self._engine: Any = None
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Start vLLM's processes and generate once."""
        config = self._config
        set_environment(in_process=False)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            self._base = weight_shapes(config.base)
            # On the loop's thread, because vLLM looks for the running loop; nothing else runs yet.
            arguments = engine_arguments(config)
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except (ValueError, TypeError, OSError, RuntimeError) as exc:
            raise UserError(f"vLLM cannot serve {config.base}: {exc}", hint="See [rollout.options] and [policy].") from exc
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._decode = batch_decoder(config.base)
        if arguments.get("pipeline_parallel_size", 1) > 1:
            await self._engine.collective_rpc("echo_prepare_stage")
        await self._final([0, 0], 2, Sampling(max_new_tokens=2), None)

    async def install(self, snapshot: Snapshot) -> None:
        """An adapter while generations run; full weights when everything under way has finished."""
        self._check_alive()
        self._check_kind(snapshot)
        async with self._installing:
            if snapshot.kind is WeightKind.LORA:
                check_fit(snapshot, self._base, max_rank=max_rank(self._config))
                await self._install_adapter(snapshot)
            else:
                check_fit(snapshot, self._base, max_rank=0)
                async with self._gate.drained():
                    await self._install_weights(snapshot)

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Join vLLM's batch. Cancelled, it leaves the batch."""
        self._check_alive()
        self._check_prompt(prompt, sampling)
        return await self._under_way(self._generate(prompt, n, sampling))

    async def close(self) -> None:
        """End vLLM's processes; generations under way raise EngineError."""
        if self._end_all() and self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)

    def _check_alive(self) -> None:
        self._check_open()
        if self._engine is None:
            raise EngineError("The engine was not started.")

    async def _generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        async with self._gate.admitted():
            # No await between here and the request: the version read is the version used.
            ref, adapter = self.installed, self._adapters.take()
            if ref is None:
                raise EngineError("No version is installed yet.")
            try:
                output = await self._final(prompt, n, sampling, None if adapter is None else adapter.request)
                return generations_of(output, n, sampling, ref, self._decode, self.capabilities)
            finally:
                if adapter is not None:
                    await self._unload(self._adapters.give_back(adapter.number))

    async def _final(self, prompt: Sequence[int], n: int, sampling: Sampling, request: Any) -> Any:
        from vllm.inputs import TokensPrompt

        name, last = str(next(self._numbers)), None
        try:
            tokens = TokensPrompt(prompt_token_ids=list(prompt))
            async for output in self._engine.generate(tokens, sampling_params(n, sampling), name, lora_request=request):
                last = output
        except (ValueError, TypeError) as exc:
            raise EngineError(f"vLLM refuses the request: {exc}") from exc
        except Exception as exc:  # vLLM raises anything when its process dies
            raise EngineError(
                f"vLLM has failed ({type(exc).__name__}: {exc}). One of its processes may have ended: its own lines in this log say which."
            ) from exc
        return last

    async def _install_adapter(self, snapshot: Snapshot) -> None:
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        request = LoRARequest(f"v{snapshot.ref.version}-{number}", number, str(snapshot.folder))
        try:
            await self._engine.add_lora(request)
        except Exception as exc:  # vLLM raises anything for an adapter that it cannot serve
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        unused = self._adapters.put(Adapter(snapshot.ref, number, request))
        self.installed = snapshot.ref
        await self._unload(unused)

    async def _unload(self, numbers: list[int]) -> None:
        for number in numbers:
            if not self._closed:
                await self._engine.remove_lora(number)

    async def _install_weights(self, snapshot: Snapshot) -> None:
        try:
            await self._reload(snapshot.folder)
        except Exception as exc:  # vLLM raises anything; the model may be half new, so the old weights are loaded again
            await self._reload(self._folder)
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        self._folder = snapshot.folder
        self.installed = snapshot.ref

    async def _reload(self, folder: Path) -> None:
        complaints = set(await self._engine.collective_rpc("echo_reload", args=(str(folder),))) - {""}
        if complaints:
            raise SnapshotRejected(f"After loading, {min(complaints)}.")
