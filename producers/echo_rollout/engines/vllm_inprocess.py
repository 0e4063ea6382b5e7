"""vLLM in this process: its engine stepped by one thread, continuous batching over everything that was asked. Imports vllm.

On a CPU this starts in half the time of vLLM's own server processes and needs a third of their memory.

Threads: the asyncio loop hands over requests and installs; the engine thread alone touches vLLM: it takes what was handed over between two
steps, steps while anything is unfinished, and blocks on its queue otherwise. Results go back to the loop they were asked from.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echo_rollout.engines.engine import (
    EngineCapabilities,
    EngineConfig,
    EngineError,
    Generation,
    Snapshot,
    SnapshotRef,
    SnapshotRejected,
    Switch,
    check_prompt,
)
from echo_schemas.errors import UserError
from echo_schemas.records import FinishReason, Sampling, VersionSpan, WeightKind

logger = logging.getLogger(__name__)

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM serves; an adapter in between is served under the next one."""
_KV_CACHE_BYTES = 256 << 20
# Versions that may be under way at once: the old one, the new one, and two that were overtaken.
_MAX_ADAPTERS = 4
_CLOSE_S = 30.0


def prefetch() -> None:
    """Import vLLM, which takes seconds. Its environment is set before."""
    # In this process: no engine core process, no second import of everything.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm.lora.request
    import vllm.v1.engine.llm_engine  # noqa: F401  the slow part


@dataclass(slots=True)
class _Asked:
    """One `generate` under way."""

    prompt: Sequence[int]
    n: int
    sampling: Sampling
    answer: asyncio.Future[list[Generation]]
    ref: SnapshotRef | None = None
    adapter: int = 0


@dataclass(frozen=True, slots=True)
class _Adapter:
    """An adapter that vLLM has loaded; `request` names it."""

    ref: SnapshotRef
    number: int
    request: Any


class VllmInProcess:
    """See `Engine`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._asked: dict[str, _Asked] = {}
        self._held: deque[_Asked] = deque()
        self._numbers = itertools.count(1)
        self._adapters: dict[int, _Adapter] = {}
        self._using: Counter[int] = Counter()
        self._current: _Adapter | None = None
        self._folder: Path | None = None
        self._installed: SnapshotRef | None = None
        self._waiting_install: tuple[Snapshot, asyncio.Future[None]] | None = None
        self._closed = False
        self._broken: Exception | None = None
        self._decode: Callable[[list[list[int]]], list[str]] = lambda rows: [""] * len(rows)
        self._vocabulary = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        """LoRA switches while old generations finish; full weights are loaded when nothing runs."""
        is_lora = self._config.kind is WeightKind.LORA
        switch = Switch.KEEPS if is_lora else Switch.DRAINS
        return EngineCapabilities(name="vllm", lora=is_lora, full=not is_lora, switch=switch, max_tokens=self._config.max_length)

    @property
    def installed(self) -> SnapshotRef | None:
        """What new generations run under."""
        return self._installed

    @property
    def in_use(self) -> frozenset[int]:
        """Versions whose adapters are loaded, and the one in force."""
        versions = [adapter.ref.version for adapter in list(self._adapters.values())]
        return frozenset([*versions, *([] if self._installed is None else [self._installed.version])])

    async def start(self) -> None:
        """Load the model and generate once, so that the first real generation is as fast as the others."""
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        self._order(lambda: self._settle(ready, self._load))
        await ready

    async def install(self, snapshot: Snapshot) -> None:
        """An adapter is loaded between two steps; full weights when everything under way has finished."""
        done: asyncio.Future[None] = self._running_loop().create_future()
        if snapshot.kind is not self._config.kind:
            raise SnapshotRejected(
                f"This engine serves {self._config.kind} weights, and version {snapshot.ref.version} is {snapshot.kind}."
            )
        if snapshot.kind is WeightKind.LORA:
            self._order(lambda: self._settle(done, lambda: self._install_adapter(snapshot)))
        else:
            self._order(lambda: self._wait_for_idle(snapshot, done))
        await done

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Join the batch."""
        check_prompt(prompt, sampling, vocabulary=self._vocabulary, max_length=self._config.max_length)
        if self._broken is not None:
            raise EngineError(f"vLLM has failed: {self._broken}") from self._broken
        asked = _Asked(prompt, n, sampling, self._running_loop().create_future())
        self._order(lambda: self._add(asked))
        return await asked.answer

    async def close(self) -> None:
        """End the thread after the step under way."""
        if self._closed or not self._thread.is_alive():
            self._closed = True
            return
        self._closed = True
        self._orders.put(None)
        await asyncio.to_thread(self._thread.join, _CLOSE_S)

    # The loop's side

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineError("The engine was not started.")
        return self._loop

    def _order(self, order: Callable[[], None]) -> None:
        if self._closed:
            raise EngineError("The engine was closed.")
        self._orders.put(order)

    # The engine thread

    def _run(self) -> None:
        while True:
            if not self._obey():
                break
            if self._engine is not None and self._asked:
                self._step()
        for asked in [*self._asked.values(), *self._held]:
            self._answer(asked.answer, EngineError("The engine was closed."))
        if self._engine is not None:
            self._engine.engine_core.shutdown()

    def _obey(self) -> bool:
        """Do what was handed over; blocks only when there is nothing to step. False: end."""
        is_idle = not self._asked
        while True:
            try:
                order = self._orders.get(block=is_idle)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            is_idle = False

    def _step(self) -> None:
        try:
            finished = [output for output in self._engine.step() if output.finished]
        except Exception as exc:  # vLLM raises anything; every generation under way fails with it and the worker decides
            logger.exception("vLLM has failed")
            self._broken = exc
            for asked in self._asked.values():
                self._answer(asked.answer, EngineError(f"vLLM has failed: {exc}"))
            self._asked.clear()
            return
        for output in finished:
            asked = self._asked.pop(output.request_id)
            self._release(asked.adapter)
            self._answer(asked.answer, self._generations(output, asked))
        if self._waiting_install is not None and not self._asked:
            snapshot, done = self._waiting_install
            self._waiting_install = None
            self._settle(done, lambda: self._install_weights(snapshot))
            while self._held:
                self._add(self._held.popleft())

    def _load(self) -> None:
        prefetch()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        config = self._config
        arguments: dict[str, Any] = {
            "model": str(config.base),
            "dtype": config.dtype,
            "enforce_eager": True,
            "kv_cache_memory_bytes": _KV_CACHE_BYTES,
            "max_model_len": config.max_length,
            "max_num_seqs": config.concurrency,
            "max_num_batched_tokens": max(2048, config.max_length),
            "enable_prefix_caching": False,
            # After temperature: what the learner computes.
            "logprobs_mode": "processed_logprobs",
            # Nothing from generation_config.json: requests say how they sample.
            "generation_config": "vllm",
            "disable_log_stats": True,
        }
        if config.kind is WeightKind.LORA:
            rank = next((rank for rank in _RANKS if rank >= config.lora_rank), None)
            if rank is None:
                raise UserError(f"vLLM serves adapters of rank {_RANKS[-1]} at most; [policy.lora] r = {config.lora_rank}.")
            arguments |= {"enable_lora": True, "max_loras": _MAX_ADAPTERS, "max_cpu_loras": _MAX_ADAPTERS, "max_lora_rank": rank}
            if not _has_gpu():
                arguments["worker_extension_cls"] = "echo_rollout.engines.lora_cpu.CpuLora"
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**{**arguments, **config.options}))
        except (ValueError, TypeError, OSError) as exc:
            raise UserError(f"vLLM cannot serve {config.base}: {exc}", hint="See [rollout.options] and [policy].") from exc
        model_config = self._engine.model_config
        if config.kind is WeightKind.FULL and getattr(model_config.hf_config, "tie_word_embeddings", False) and not _has_gpu():
            raise UserError(
                "vLLM on the CPU keeps the old output layer when a model with tied embeddings is reloaded.",
                hint='Use a base without tied embeddings, or [policy] update = "lora".',
            )
        self._vocabulary = model_config.get_vocab_size()
        self._decode = _decoder(config.base)
        self._warm_up()

    def _warm_up(self) -> None:
        params = self._params(2, Sampling(max_new_tokens=2))
        from vllm.inputs import TokensPrompt

        self._engine.add_request("warm-up", TokensPrompt(prompt_token_ids=[0, 0]), params)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, asked: _Asked) -> None:
        from vllm.inputs import TokensPrompt

        if self._waiting_install is not None:
            self._held.append(asked)
            return
        if self._installed is None:
            self._answer(asked.answer, EngineError("No version is installed yet."))
            return
        number = next(self._numbers)
        asked.ref = self._installed
        request = None
        if self._current is not None:
            asked.ref, asked.adapter, request = self._current.ref, self._current.number, self._current.request
        try:
            params = self._params(asked.n, asked.sampling)
            name = self._engine.add_request(
                str(number), TokensPrompt(prompt_token_ids=list(asked.prompt)), params, lora_request=request
            )  # fmt: skip
        except (ValueError, TypeError) as exc:
            self._answer(asked.answer, EngineError(f"vLLM refuses the request: {exc}"))
            return
        del name
        self._using[asked.adapter] += 1
        self._asked[str(number)] = asked

    def _params(self, n: int, sampling: Sampling) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop=list(sampling.stop) or None,
            max_tokens=sampling.max_new_tokens,
            # The sampled token's own, and no other.
            logprobs=0,
            flat_logprobs=True,
            # Only stop texts need vLLM's own detokenizer; ours decodes a group at once.
            detokenize=bool(sampling.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _generations(self, output: Any, asked: _Asked) -> list[Generation] | EngineError:
        assert asked.ref is not None
        rows = [list(completion.token_ids) for completion in output.outputs]
        texts = self._decode(rows)
        found = []
        for completion, tokens, text in zip(output.outputs, rows, texts, strict=True):
            length = len(tokens)
            found.append(
                Generation(
                    token_ids=np.array(tokens, np.int32),
                    logprobs=np.array(completion.logprobs.logprobs[:length] if completion.logprobs is not None else [], np.float32),
                    version_spans=(VersionSpan(start=0, end=length, version=asked.ref.version),) if length else (),
                    weights_sha256=asked.ref.sha256,
                    finish_reason=_FINISHED.get(completion.finish_reason, FinishReason.ABORT),
                    text=text,
                )
            )
        return found

    def _install_adapter(self, snapshot: Snapshot) -> None:
        """A fresh name, id and path for each version: vLLM would serve a known one from its cache."""
        from vllm.lora.request import LoRARequest

        number = next(self._numbers)
        request = LoRARequest(f"v{snapshot.ref.version}-{number}", number, str(snapshot.folder))
        try:
            self._engine.add_lora(request)
        except Exception as exc:  # vLLM raises anything for an adapter that does not fit
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        before, self._current = self._current, _Adapter(snapshot.ref, number, request)
        self._adapters[number] = self._current
        self._installed = snapshot.ref
        if before is not None:
            self._release(before.number, 0)

    def _release(self, number: int, count: int = 1) -> None:
        """A generation is done with its adapter; the last one takes it away, unless it is in force."""
        self._using[number] -= count
        if self._using[number] > 0 or (self._current is not None and self._current.number == number):
            return
        del self._using[number]
        if self._adapters.pop(number, None) is not None:
            self._engine.remove_lora(number)

    def _wait_for_idle(self, snapshot: Snapshot, done: asyncio.Future[None]) -> None:
        """Full weights: admit nothing new until what runs has finished."""
        if not self._asked:
            self._settle(done, lambda: self._install_weights(snapshot))
        else:
            self._waiting_install = (snapshot, done)

    def _install_weights(self, snapshot: Snapshot) -> None:
        try:
            self._reload(snapshot.folder)
        except Exception as exc:  # vLLM raises anything for weights that do not fit
            if self._folder is not None:
                self._reload(self._folder)
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        self._folder = snapshot.folder
        self._installed = snapshot.ref

    def _reload(self, folder: Path) -> None:
        """Load all weights and look whether they are there: a loader that leaves some out does not say so."""
        self._engine.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        self._engine.collective_rpc(_check_weights, args=(str(folder),))

    def _settle(self, future: asyncio.Future[None], work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as exc:  # whoever waits gets it
            self._answer(future, exc)
        else:
            self._answer(future, None)

    def _answer(self, future: asyncio.Future[Any], result: Any) -> None:
        """Resolve a future of the loop. A loop that is gone wants nothing."""
        loop = self._loop

        def resolve() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(resolve)


_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _decoder(base: Path) -> Callable[[list[list[int]]], list[str]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    decode: Callable[[list[list[int]]], list[str]] = lambda rows: tokenizer.batch_decode(rows, skip_special_tokens=True)  # noqa: E731
    return decode


def _check_weights(worker: Any, folder: str) -> None:
    """Compare the parameters that keep names and shapes (embeddings, norms) with the file. Raises ValueError at the first that differs."""
    import safetensors.torch
    import torch

    parameters = dict(worker.model_runner.model.named_parameters())
    weights = safetensors.torch.load_file(Path(folder) / "model.safetensors")
    compared = 0
    for name, tensor in weights.items():
        loaded = parameters.get(name)
        if loaded is None or loaded.shape != tensor.shape:
            continue
        compared += 1
        if not torch.equal(loaded.detach().cpu(), tensor.to(loaded.dtype)):
            message = f"{name} is not what the file holds"
            raise ValueError(message)
    if not compared:
        message = "no weight of the file is in the model"
        raise ValueError(message)
