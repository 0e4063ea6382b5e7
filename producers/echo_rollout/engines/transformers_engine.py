"""Plain transformers and PEFT, for machines without vLLM: slower, and any model that transformers loads. Imports torch, peft.

Threads: the asyncio loop hands over; one engine thread computes. It takes all generations that wait (up to the concurrency) and samples
them as one batch to the end, again and again. An install comes between two batches, so every generation has one version.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo_rollout.engines.engine import (
    EngineCapabilities,
    EngineConfig,
    EngineError,
    Generation,
    Snapshot,
    SnapshotRef,
    SnapshotRejected,
    Switch,
)
from echo_rollout.engines.fitting import check_fit, weight_shapes
from echo_rollout.engines.serving import Asked, ThreadEngine
from echo_schemas.errors import UserError
from echo_schemas.records import Sampling, WeightKind
from echo_tasks.prompts import attention_of

logger = logging.getLogger(__name__)

AUTO = "auto"
_DEVICE = "device"
_DEVICES = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


class TransformersEngine(ThreadEngine):
    """See `Engine`. Uses a CUDA or Apple device if there is one, unless `device` in [rollout.options] says otherwise."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UserError for options that cannot be meant."""
        self._device = parse_device(config.options)
        super().__init__(config, "transformers")
        is_lora = config.kind is WeightKind.LORA
        self.capabilities = EngineCapabilities(
            name="transformers", lora=is_lora, full=not is_lora, switch=Switch.DRAINS, max_tokens=config.max_length, experts=True
        )
        self._model: Any = None
        self._sample: Callable[[list[Asked], SnapshotRef], list[list[Generation]]] | None = None
        self._adapter_config: bytes = b""

    async def install(self, snapshot: Snapshot) -> None:
        """Between two batches."""
        self._check_kind(snapshot)
        install = self._install_adapter if snapshot.kind is WeightKind.LORA else self._install_weights
        await self._done_in_turn(lambda: install(snapshot))

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Join the next batch. Cancelled before it begins, it is left out."""
        loop = self._running_loop()
        self._check_prompt(prompt, sampling)
        asked = Asked(prompt, n, sampling, loop.create_future())
        self._order(asked)
        return await asked.answer

    # The engine thread

    def _run(self) -> None:
        is_open = True
        while is_open:
            batch: list[Asked] = []
            for order in self._taken():
                if isinstance(order, Asked) and self._has_room(batch, order):
                    batch.append(order)
                    continue
                self._generate(batch)
                batch = [order] if isinstance(order, Asked) else []
                if callable(order):
                    order()
                is_open = is_open and order is not None
            self._generate(batch)

    def _taken(self) -> list[Any]:
        """All orders that were handed over; blocks for the first."""
        orders = [self._orders.get()]
        while not self._orders.empty():
            orders.append(self._orders.get())
        return orders

    def _has_room(self, batch: list[Asked], asked: Asked) -> bool:
        return not batch or sum(each.n for each in batch) + asked.n <= self._config.concurrency

    def _generate(self, batch: list[Asked]) -> None:
        batch = [asked for asked in batch if not asked.answer.cancelled()]
        if not batch:
            return
        if self._closed or self.installed is None or self._sample is None:
            error = EngineError("The engine was closed." if self._closed else "No version is installed yet.")
            self._answer([(asked.answer, error) for asked in batch])
            return
        try:
            groups = self._sample(batch, self.installed)
        except Exception as exc:  # torch raises anything (memory, kernels); this batch fails with it, and the worker decides
            logger.exception("A batch of %s prompts has failed", len(batch))
            self._answer([(asked.answer, EngineError(f"transformers has failed: {exc}")) for asked in batch])
            return
        self._answer([(asked.answer, group) for asked, group in zip(batch, groups, strict=True)])

    def _load(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        from echo_rollout.engines.sampling_loop import SamplingLoop
        from echo_tasks.experts import Routers

        config = self._config
        try:
            self._base = weight_shapes(config.base)
            model: Any = AutoModelForCausalLM.from_pretrained(
                config.base, dtype=getattr(torch, config.dtype), local_files_only=True, attn_implementation=attention_of(config.base)
            )
            device = choose_device(
                self._device, num_cuda=torch.cuda.device_count() if torch.cuda.is_available() else 0, has_mps=_has_mps(torch)
            )
            logger.info("transformers computes on %s", device)
            self._model = model.to(device).eval()
            loop = SamplingLoop(config.base, Routers(model) if config.notes_experts else None)
        except (ValueError, OSError) as exc:
            raise UserError(f"transformers cannot serve {config.base}: {exc}", hint="See [policy] base.") from exc
        self._vocabulary = int(model.config.vocab_size)
        self._sample = lambda batch, ref: loop.run(self._model, [(each.prompt, each.n, each.sampling) for each in batch], ref)

    def _install_adapter(self, snapshot: Snapshot) -> None:
        import safetensors.torch
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        check_fit(snapshot, self._base, max_rank=self._config.lora_rank)
        written = (snapshot.folder / "adapter_config.json").read_bytes()
        # Not `load_file`, which keeps some 60 bytes of each tensor for ever (safetensors 0.8).
        state = safetensors.torch.load((snapshot.folder / "adapter_model.safetensors").read_bytes())
        try:
            if written != self._adapter_config:
                bare = self._model.unload() if self._adapter_config else self._model
                self._adapter_config = b""
                self._model = bare
                self._model = get_peft_model(bare, LoraConfig.from_pretrained(str(snapshot.folder))).eval()
                self._adapter_config = written
            outcome: Any = set_peft_model_state_dict(self._model, state)
        except (ValueError, RuntimeError, TypeError) as exc:
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        if outcome.unexpected_keys:
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: it has {outcome.unexpected_keys[0]}.")
        self.installed = snapshot.ref

    def _reload(self, folder: Path) -> None:
        import safetensors.torch

        state: dict[str, Any] = {}
        for file in sorted(folder.glob("model*.safetensors")):
            state |= safetensors.torch.load_file(file)
        if not state.keys() <= self._model.state_dict().keys() | {"lm_head.weight"}:
            # transformers fuses the tensors of a mixture of experts as it loads them.
            from transformers import AutoModelForCausalLM

            state = AutoModelForCausalLM.from_pretrained(folder, dtype=self._model.dtype, local_files_only=True).state_dict()
        outcome = self._model.load_state_dict(state, strict=False)
        missing = [name for name in outcome.missing_keys if name != "lm_head.weight"]
        if missing or outcome.unexpected_keys:
            message = f"tensors differ from the model's, {[*missing, *outcome.unexpected_keys][0]} for one"
            raise ValueError(message)


def parse_device(options: Mapping[str, Any]) -> str:
    """The only option: `auto`, `cpu`, `mps`, `cuda` or `cuda:<number>`. Raises UserError for anything else."""
    if unknown := sorted(set(options) - {_DEVICE}):
        raise UserError(
            f"The engine 'transformers' has no option {unknown[0]!r}.", hint=f"It takes {_DEVICE!r}; arguments of vLLM are for vllm."
        )
    value = options.get(_DEVICE, AUTO)
    if not isinstance(value, str) or not _DEVICES.fullmatch(value):
        raise UserError(f"[rollout.options] device is {value!r}.", hint="Write auto, cpu, mps, cuda or cuda:<number>.")
    return value


def choose_device(wanted: str, *, num_cuda: int, has_mps: bool) -> str:
    """The device to compute on: the wanted one, or, for `auto`, CUDA, else Apple's, else the processor.

    Raises UserError for one that this machine does not have.
    """
    if wanted == AUTO:
        return "cuda" if num_cuda else "mps" if has_mps else "cpu"
    kind, _, number = wanted.partition(":")
    if (kind == "cuda" and int(number or 0) >= num_cuda) or (kind == "mps" and not has_mps):
        found = [*(f"cuda:{index}" for index in range(num_cuda)), *(["mps"] if has_mps else []), "cpu"]
        raise UserError(
            f"This machine has no device {wanted!r}.", hint=f'It has {", ".join(found)}; [rollout.options] device = "auto" takes the first.'
        )
    return wanted


def _has_mps(torch: Any) -> bool:
    """Metal on an Apple processor; older builds of torch have no such attribute."""
    mps: Any = getattr(torch.backends, "mps", None)
    return mps is not None and bool(mps.is_available())
