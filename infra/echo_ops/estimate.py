"""What a run's file will need: puts its settings into the formulas of `echo_core.needs`. `estimate_lines` prints the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_core.capacity.overlap import Demand
from echo_core.needs.disk import DiskNeed, checkpoint_bytes, disk_need
from echo_core.needs.memory import LearnerLoad, LearnerMemory, WorkerLoad, WorkerMemory, learner_memory, worker_memory
from echo_core.needs.model_shape import ModelShape, published_shape, shape_of_config
from echo_core.needs.renting import generation_s, holds_both
from echo_core.needs.speed import Gpu, Workload, rollouts_per_s, train_s
from echo_ops.supervisor.broker import given_bootstrap
from echo_schemas.errors import UserError
from echo_schemas.topic_files import load_topic_specs
from echo_settings import Settings
from echo_settings.rules import store_from_bytes, training_sampling
from echo_settings.sections import KafkaSettings
from echo_tasks.base_models import is_made, resolve_base

_MODEL_CONFIG = "config.json"
ZERO = "zero_optimization"
# A typical prompt; without the model it cannot be measured.
_PROMPT_TOKENS = 256
_ANSWER_SHARE = 0.5
# Speed of loading arrived weights into the engine: that of a disk or of memory.
_LOAD_BYTES_PER_S = 2e9
_SHARE = "gpu_memory_utilization"
# vLLM's default of it.
_VLLM_SHARE = 0.9
_EMBEDDED = "embedded"
_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers that no file has. None: answers of half of max_new_tokens, prompts of 256 tokens."""

    answer_tokens: float | None = None
    prompt_tokens: float | None = None
    mbit_s: float = 1000.0
    """Of each worker's line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The inputs of the formulas, and their results."""

    settings: Settings
    shape: ModelShape
    work: Workload
    learner: LearnerLoad
    worker: WorkerLoad
    snapshot_bytes: int
    broadcast_s: float
    mbit_s: float
    disk: DiskNeed
    replicas: int
    """Copies of each topic."""

    @property
    def through_log(self) -> bool:
        """Whether the log takes the weights, not a store."""
        return self.snapshot_bytes < store_from_bytes(self.settings)

    @property
    def load_s(self) -> float:
        """The part of T_bcast in which a worker loads what has arrived."""
        return _load_s(self.snapshot_bytes)

    @property
    def learner_memory(self) -> LearnerMemory:
        """Of each rank."""
        return learner_memory(self.shape, self.learner)

    @property
    def worker_memory(self) -> WorkerMemory:
        """Of each GPU of a worker."""
        return worker_memory(self.shape, self.worker)

    def train_s(self, gpu: Gpu) -> float:
        """T_train on the ranks of the file."""
        return train_s(self.shape, self.work, gpu, self.learner.ranks)

    def demand(self, gpu: Gpu) -> Demand:
        """The demand of a learner on such GPUs."""
        return Demand(train_s=self.train_s(gpu), broadcast_s=self.broadcast_s, rollouts=self.work.rollouts)

    def rate(self, gpu: Gpu) -> float:
        """Rollouts per second of a worker on such GPUs."""
        return rollouts_per_s(self.shape, self.work, gpu, self.worker)

    def generation_s(self, gpu: Gpu, workers: int) -> float:
        """T_gen of so many workers on such GPUs."""
        groups = self.settings.learner.groups_per_step
        return generation_s(self.shape, self.work, gpu, self.worker, groups=groups, workers=workers)

    def is_shared(self, gpu: Gpu) -> bool:
        """Whether the file's learner and its only worker share one such GPU: it gives the worker a share that leaves the learner room."""
        rollout = self.settings.rollout
        one_each = not rollout.pool and rollout.workers == self.learner.ranks == self.worker.gpus == 1
        return one_each and _SHARE in rollout.options and holds_both(self.learner_memory, self.worker_memory, gpu.memory, self.worker.share)


def estimate(settings: Settings, assumed: Assumptions) -> Needs:
    """Raises UserError for a model of unknown shape, and for a DeepSpeed file that cannot be read."""
    shape, rollout, learner, policy = _shape(settings), settings.rollout, settings.learner, settings.policy
    adapter_rank = policy.lora.r if policy.update == "lora" else 0
    answer = rollout.max_new_tokens * _ANSWER_SHARE if assumed.answer_tokens is None else assumed.answer_tokens
    prompt = min(_PROMPT_TOKENS, policy.max_length - rollout.max_new_tokens) if assumed.prompt_tokens is None else assumed.prompt_tokens
    zero = _zero(learner.deepspeed)
    disk = disk_of(settings, _trained(settings, shape))
    snapshot_bytes = disk.one.snapshot
    options = rollout.options
    return Needs(
        settings=settings,
        shape=shape,
        work=Workload(
            rollouts=learner.groups_per_step * rollout.group_size,
            prompt_tokens=prompt,
            answer_tokens=answer,
            updates=learner.updates_per_step,
            trains_adapter=bool(adapter_rank),
            recomputes=learner.gradient_checkpointing,
            has_reference=learner.kl > 0,
            compiles=learner.compile,
            dtype=policy.dtype,
        ),
        learner=LearnerLoad(
            dtype=policy.dtype,
            adapter_rank=adapter_rank,
            tokens=max(learner.micro_batch_tokens, policy.max_length),
            ranks=learner.ranks,
            stage=_stage_of(learner.deepspeed, zero),
            recomputes=learner.gradient_checkpointing,
            has_reference=learner.kl > 0,
            copies=settings.budget + 2,
            cuts=training_sampling(rollout).cuts,
            offloads=dict(zero.get("offload_optimizer") or {}).get("device", "none") != "none",
        ),
        worker=WorkerLoad(
            dtype=policy.dtype,
            adapter_rank=adapter_rank,
            sequences=int(_number(options, "max_num_seqs", rollout.groups_in_flight * rollout.group_size)),
            length=policy.max_length,
            gpus=len(rollout.devices) or int(_number(options, "tensor_parallel_size", 1) * _number(options, "pipeline_parallel_size", 1)),
            share=_number(options, _SHARE, _VLLM_SHARE),
        ),
        snapshot_bytes=snapshot_bytes,
        broadcast_s=snapshot_bytes * 8 / (assumed.mbit_s * 1e6) + _load_s(snapshot_bytes),
        mbit_s=assumed.mbit_s,
        disk=disk,
        replicas=copies_of_topics(settings.kafka),
    )


def with_adapter(needs: Needs) -> Needs:
    """The same run, under the same assumptions, with an adapter of [policy] lora in place of all weights."""
    policy = needs.settings.policy.model_copy(update={"update": "lora"})
    assumed = Assumptions(answer_tokens=needs.work.answer_tokens, prompt_tokens=needs.work.prompt_tokens, mbit_s=needs.mbit_s)
    return estimate(needs.settings.model_copy(update={"policy": policy}), assumed)


def trained_weights(settings: Settings) -> int:
    """The number of weights that the learner trains. Raises UserError for a model of unknown shape."""
    return _trained(settings, _shape(settings))


def disk_of(settings: Settings, trained: int) -> DiskNeed:
    """The disk of [checkpoint] folder if `trained` weights are trained. Raises UserError for a DeepSpeed file that cannot be read."""
    checkpoint, store, dtype = settings.checkpoint, settings.store, settings.policy.dtype
    one = checkpoint_bytes(trained, dtype, zero_stage(settings.learner.deepspeed))
    is_beside = one.snapshot >= store_from_bytes(settings) and not store.uri
    return disk_need(
        one,
        keep=checkpoint.keep,
        every=checkpoint.every,
        period=settings.publication_period,
        steps=settings.learner.steps,
        stored=(store.keep or checkpoint.keep) if is_beside else 0,
    )


def copies_of_topics(kafka: KafkaSettings) -> int:
    """Copies of each topic of a new namespace: [kafka] replicas, else as many as the topics' files want, or as an embedded Kafka has
    brokers: one unless more run. A cluster elsewhere is not asked here; with one broker it makes one copy (`choose_replicas`)."""
    wanted = max(spec.replication_factor for spec in load_topic_specs())
    if kafka.replicas is not None:
        return kafka.replicas
    if kafka.bootstrap != _EMBEDDED:
        return wanted
    running = given_bootstrap(kafka.bootstrap)
    return min(wanted, 1 if running is None else len(running.split(",")))


def _load_s(num_bytes: int) -> float:
    return num_bytes / _LOAD_BYTES_PER_S


def _trained(settings: Settings, shape: ModelShape) -> int:
    policy = settings.policy
    return shape.adapter_parameters(policy.lora.r) if policy.update == "lora" else shape.parameters


def _shape(settings: Settings) -> ModelShape:
    base = settings.policy.base
    if (found := _config_in(base)) is not None:
        return shape_of_config(found)
    shape = published_shape(base)
    if shape is None:
        raise UserError(
            f"The shape of the model {base} is unknown, so its needs cannot be estimated.",
            hint="Put at least its config.json into that folder, or name one of docs/capacity.md.",
        )
    return shape


def _config_in(base: str) -> dict[str, object] | None:
    folder = resolve_base(base) if is_made(base) and base.startswith("demo:") else Path(base)
    try:
        content: dict[str, object] = json.loads((folder / _MODEL_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise UserError(f"{folder / _MODEL_CONFIG} cannot be read: {exc}.", hint="Fetch the model's folder again.") from exc
    return content


def zero_stage(path: str) -> int:
    """ZeRO's stage in DeepSpeed's file at `path`; 0 without a file. Raises UserError for one that cannot be read."""
    return _stage_of(path, _zero(path))


def _zero(path: str) -> dict[str, Any]:
    if not path:
        return {}
    try:
        return dict(json.loads(Path(path).read_text(encoding="utf-8")).get(ZERO) or {})
    except (OSError, ValueError, AttributeError, TypeError) as exc:
        raise UserError(f"[learner] deepspeed names {path}, which cannot be read: {exc}.", hint="Name a JSON file of DeepSpeed's.") from exc


def _stage_of(path: str, zero: Mapping[str, Any]) -> int:
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in _STAGES:
        raise UserError(f"{path}: the stage in {ZERO} is {stage!r}.", hint="Write 0, 1, 2 or 3.")
    return int(stage)


def _number(options: Mapping[str, object], name: str, default: float) -> float:
    """An option of vLLM. Raises UserError unless it is a number above 0."""
    value = options.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise UserError(f"[rollout.options] {name} is {value!r}.", hint="Write a number above 0.")
    return value
