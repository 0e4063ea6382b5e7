"""vLLM in this process: one thread steps its engine, which batches all requests continuously. Imports vllm.

On a CPU this starts in half the time of vLLM's own server processes and needs a third of their memory.

Threads: the asyncio loop hands over requests and installs. The engine thread alone touches vLLM: between two steps it takes what was handed
over; it steps while a request is unfinished, and else blocks on its queue. Results go back to the asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_rollout.engines.adapters import Adapter
from echo_rollout.engines.engine import EngineConfig, EngineError, Generation, Snapshot, SnapshotRef, SnapshotRejected
from echo_rollout.engines.fitting import check_fit, weight_shapes
from echo_rollout.engines.serving import Asked, ResultT, ThreadEngine
from echo_rollout.engines.vllm_arguments import (
    batch_decoder,
    bind_engine_thread,
    capabilities_of,
    engine_arguments,
    generations_of,
    max_rank,
    sampling_params,
    set_environment,
)
from echo_schemas.errors import UserError
from echo_schemas.records import Sampling, WeightKind

logger = logging.getLogger(__name__)


def prefetch() -> None:
    """Import vLLM, which takes seconds, for an engine in this process: no engine process, no second import of everything."""
    set_environment(in_process=True)
    import vllm.lora.request
    import vllm.v1.engine.llm_engine  # noqa: F401  the slow part


@dataclass(eq=False, slots=True)
class _Asked(Asked):
    """`name`: vLLM's; `ref`, `adapter`: what it runs under, from its admission on."""

    name: str = ""
    ref: SnapshotRef = field(default=SnapshotRef(version=-1, sha256=""))
    adapter: int = 0


class VllmInProcess(ThreadEngine):
    """See `Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, "vllm")
        self.capabilities = capabilities_of(config)
        self._engine: Any = None
        self._asked: dict[str, _Asked] = {}
        self._held: deque[_Asked] = deque()
        self._numbers = itertools.count(1)
        self._waiting: deque[tuple[Snapshot, asyncio.Future[None]]] = deque()
        self._broken: Exception | None = None

    async def install(self, snapshot: Snapshot) -> None:
        """An adapter is loaded between two steps; full weights when everything under way has finished."""
        self._check_kind(snapshot)
        if snapshot.kind is WeightKind.LORA:
            await self._done_in_turn(lambda: self._install_adapter(snapshot))
            return
        done: asyncio.Future[None] = self._running_loop().create_future()
        self._order(lambda: self._wait_for_idle(snapshot, done))
        await done

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Join the batch. Cancelled, it leaves the batch."""
        loop = self._running_loop()
        self._check_prompt(prompt, sampling)
        asked = _Asked(prompt, n, sampling, loop.create_future())
        self._order(lambda: self._add(asked))
        try:
            return await asked.answer
        except asyncio.CancelledError:
            self._orders.put(lambda: self._abandon(asked))
            raise

    async def on_thread(self, work: Callable[[Any, Any], ResultT]) -> ResultT:
        """`work(vLLM's engine, the LoRARequest in force or None)` on the engine thread, between two steps: for measuring vLLM itself."""

        def ask() -> ResultT:
            current = self._adapters.current
            return work(self._engine, None if current is None else current.request)

        return await self._done_in_turn(ask)

    # The engine thread

    def _run(self) -> None:
        bind_engine_thread()
        while self._obey():
            if self._asked:
                self._step()
        self._fail_all(EngineError("The engine was closed."))
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _obey(self) -> bool:
        """Carry out the orders that were handed over; block for one only when no request is unfinished. False: end."""
        is_idle = not self._asked
        while True:
            try:
                order = self._orders.get(block=is_idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            try:
                order()
            except Exception as exc:  # vLLM raises anything; without this thread no request would be answered
                self._break(exc)
            is_idle = False

    def _step(self) -> None:
        try:
            finished = [output for output in self._engine.step() if output.finished]
        except Exception as exc:  # vLLM raises anything; every generation under way fails with it, and the worker decides
            self._break(exc)
            return
        answers: list[tuple[asyncio.Future[Any], Any]] = []
        for output in finished:
            asked = self._asked.pop(output.request_id, None)
            if asked is not None:
                self._unload(self._adapters.give_back(asked.adapter))
                answers.append((asked.answer, generations_of(output, asked.n, asked.sampling, asked.ref, self._decode, self.capabilities)))
        self._answer(answers)
        self._install_when_idle()

    def _break(self, error: Exception) -> None:
        """From now on every request fails: vLLM cannot be used any more."""
        logger.error("vLLM has failed", exc_info=error)
        self._broken = error
        self._fail_all(EngineError(f"vLLM has failed: {error}"))

    def _fail_all(self, error: EngineError) -> None:
        generations = [(asked.answer, error) for asked in (*self._asked.values(), *self._held)]
        self._answer([*generations, *((done, error) for _, done in self._waiting)])
        self._asked.clear()
        self._held.clear()
        self._waiting.clear()

    def _load(self) -> None:
        """Load the model and generate once, so that the first real generation is as fast as the others."""
        config = self._config
        prefetch()
        import torch
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = engine_arguments(config)
        if arguments.get("enforce_eager"):
            # vLLM compiles the ranking of log-probabilities even then: four seconds of a start for one comparison.
            torch.compiler.set_stance("force_eager")
        try:
            self._base = weight_shapes(config.base)
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, TypeError, OSError) as exc:
            raise UserError(f"vLLM cannot serve {config.base}: {exc}", hint="See [rollout.options] and [policy].") from exc
        self._vocabulary = self._engine.model_config.get_vocab_size()
        self._decode = batch_decoder(config.base)
        if arguments.get("pipeline_parallel_size", 1) > 1:
            self._engine.collective_rpc("echo_prepare_stage")
        self._warm_up()

    def _warm_up(self) -> None:
        from vllm.inputs import TokensPrompt

        self._engine.add_request("warm-up", TokensPrompt(prompt_token_ids=[0, 0]), sampling_params(2, Sampling(max_new_tokens=2)))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, asked: _Asked) -> None:
        from vllm.inputs import TokensPrompt

        if self._waiting and self._broken is None:
            self._held.append(asked)
            return
        if self._broken is not None or self.installed is None:
            failure = "No version is installed yet." if self._broken is None else f"vLLM has failed: {self._broken}"
            self._answer([(asked.answer, EngineError(failure))])
            return
        current = self._adapters.current
        asked.name = str(next(self._numbers))
        prompt = TokensPrompt(prompt_token_ids=list(asked.prompt))
        try:
            self._engine.add_request(
                asked.name, prompt, sampling_params(asked.n, asked.sampling), lora_request=None if current is None else current.request
            )
        except Exception as exc:  # vLLM raises anything for a request that it refuses
            self._answer([(asked.answer, EngineError(f"vLLM refuses the request: {exc}"))])
            return
        asked.ref = self.installed
        taken = self._adapters.take()
        asked.adapter = 0 if taken is None else taken.number
        self._asked[asked.name] = asked

    def _abandon(self, asked: _Asked) -> None:
        """Drop a request whose caller was cancelled."""
        if asked in self._held:
            self._held.remove(asked)
        if self._asked.pop(asked.name, None) is None:
            return
        self._engine.abort_request([asked.name])
        self._unload(self._adapters.give_back(asked.adapter))
        self._install_when_idle()

    def _install_adapter(self, snapshot: Snapshot) -> None:
        """Load an adapter under a fresh name and id: vLLM would serve a known one from its cache."""
        from vllm.lora.request import LoRARequest

        check_fit(snapshot, self._base, max_rank=max_rank(self._config))
        number = next(self._numbers)
        request = LoRARequest(f"v{snapshot.ref.version}-{number}", number, str(snapshot.folder))
        try:
            self._engine.add_lora(request)
        except Exception as exc:  # vLLM raises anything for an adapter that it cannot serve
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        self._unload(self._adapters.put(Adapter(snapshot.ref, number, request)))
        self.installed = snapshot.ref

    def _unload(self, numbers: list[int]) -> None:
        for number in numbers:
            self._engine.remove_lora(number)

    def _wait_for_idle(self, snapshot: Snapshot, done: asyncio.Future[None]) -> None:
        """Full weights: admit nothing new until what runs has finished."""
        self._waiting.append((snapshot, done))
        self._install_when_idle()

    def _install_when_idle(self) -> None:
        if not self._waiting or self._asked:
            return
        while self._waiting:
            snapshot, done = self._waiting.popleft()
            self._settle(done, lambda snapshot=snapshot: self._install_weights(snapshot))  # type: ignore[misc]
        while self._held:
            self._add(self._held.popleft())

    def _reload(self, folder: Path) -> None:
        """Load all weights and compare them with the files: vLLM's loader does not report those that it leaves out."""
        complaint = max(self._engine.collective_rpc("echo_reload", args=(str(folder),)))
        if complaint:
            raise SnapshotRejected(f"After loading, {complaint}.")
