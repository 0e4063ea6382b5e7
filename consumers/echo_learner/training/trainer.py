"""The trainer: DeepSpeed around the policy, one training step at a time, the same on every rank.

    batch ─▶ [previous policy's log-probabilities] ─▶ for each update: forward, loss, backward over micro-batches ─▶ optimizer ─▶ sums

Every method is a collective: `ranks` calls it on all ranks in the same order with the same arguments. One thread uses it.
"""

from __future__ import annotations

import errno
import itertools
import math
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.commit.snapshot import SnapshotFiles, file_names
from echo_learner.losses.catalogue import build_loss, parse_loss
from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import LossInputs
from echo_learner.losses.token_sums import TokenSums, measure_tokens
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.deepspeed_setup import OptimizerConfig, RankPlace, engine_settings, start_engine
from echo_learner.training.microbatches import MicroBatch, deal_to_ranks, restore_plan
from echo_learner.training.policy_model import PolicyConfig, PolicyModel, load_policy, snapshot_config, snapshot_names
from echo_learner.training.resharding import ShardLayout, universal_form
from echo_learner.training.stored_form import StoredForm, fused_tensors
from echo_learner.training.tensors import Differences, SampleTensors, TokenRows
from echo_learner.training.weight_file import Slot, in_file_order, open_tensors, write_snapshot
from echo_learner.training.zero import SPREAD_WEIGHTS, check_compile
from echo_schemas.errors import UserError
from echo_schemas.records import WeightKind

_TAG = "trainer"
_TORCH_WRITER = "inline_container"
# Most bytes of all copies of trained weights, which lie on the device beside the model: enough for adapters, not for whole models.
_MAX_COPY_BYTES = 512 << 20


class TrainingDiverged(UserError):
    """A number of the step is not finite; the weights were not updated with it. Trying again would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer's configuration. Plain data, sent to the other ranks as JSON."""

    policy: PolicyConfig
    optimizer: OptimizerConfig
    loss: str
    loss_options: Mapping[str, Any]
    kl: ReferenceKl
    normalisation: Normalisation
    normalisation_constant: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """The result of a step. `totals` for `step_metrics`; `compute_s`: seconds in forward, backward and optimizer; `lr` of the last update;
    `differences` float64 [N]: mean |learner - sampler| over each fresh sample's trained tokens, in nats, at the step's start; NaN for the
    others."""

    totals: Mapping[str, float]
    grad_norms: tuple[float, ...]
    compute_s: float
    lr: float
    differences: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))


class DeepSpeedTrainer:
    """One rank of the trainer."""

    def __init__(self, config: TrainerConfig, place: RankPlace) -> None:
        """Loads the model and starts DeepSpeed. Raises UserError for a base, loss or DeepSpeed file that cannot be used."""
        self._config = config
        self._place = place
        self._loss = build_loss(parse_loss(config.loss, config.loss_options), config.kl)
        settings = engine_settings(config.optimizer, config.policy.dtype)
        self._stage = int(settings["zero_optimization"].get("stage", 0))
        check_compile(is_wanted=config.policy.compile, stage=self._stage)
        self._layout = ShardLayout(ranks=place.world_size, stage=self._stage)
        self._model: PolicyModel = load_policy(config.policy)
        self._names = snapshot_names(self._model, config.policy.kind)
        self._slots = {
            stored: Slot(stored, parameter.dtype, tuple(parameter.shape))
            for stored, parameter in ((stored, self._model.get_parameter(name)) for name, stored in self._names.items())
        }
        self._stored = None if self._is_lora else StoredForm(self._model.causal_lm, self._slots, Path(config.policy.base))
        self._shapes = {name: slot.shape for name, slot in self._slots.items()} if self._stored is None else self._stored.shapes
        self._started = start_engine(self._model, settings, config.optimizer, place)
        self._engine = self._started.deepspeed
        self._parameters = [(name, self._model.get_parameter(name)) for name in self._names]
        self._reference = self._reference_model() if config.kl.coef > 0 and config.policy.kind is WeightKind.FULL else None
        self._copies: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._num_updates = 0

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        lm: Any = self._model.causal_lm
        return int(lm.config.vocab_size)

    @property
    def experts(self) -> tuple[int, int, int] | None:
        """Layers, experts a token and experts in all, under routing replay."""
        return None if self._model.routers is None else self._model.routers.shape

    @property
    def remembered(self) -> Collection[int]:
        """The versions that `logprobs_under` knows."""
        return self._copies.keys()

    def step(self, batch: TrainingBatch) -> TrainResult:
        """Train one step. Raises TrainingDiverged before an update that holds a number that is not finite."""
        started_s = time.perf_counter()
        plan = restore_plan(batch.order.tolist(), batch.micro_batch_sizes.tolist(), batch.update_sizes.tolist())
        arrays = SampleTensors(batch, self._engine.device)
        later = [sample for update in plan.updates[1:] for micro_batch in update for sample in micro_batch]
        previous = self._previous(arrays, plan.updates[1:]) if later else {}
        totals: TokenSums | None = None
        differences = Differences(arrays.num_samples, self._engine.device)
        grad_norms, lr = [], 0.0
        for number, update in enumerate(plan.updates):
            sums = self._update(arrays, update, previous if number else None, differences)
            totals = sums if totals is None else totals.merged(sums)
            lr = self._set_rate()
            self._started.step()
            grad_norms.append(self._grad_norm())
        assert totals is not None
        return TrainResult(
            totals=totals.to_floats(),
            grad_norms=tuple(grad_norms),
            compute_s=time.perf_counter() - started_s,
            lr=lr,
            differences=differences.over_ranks(self._place.world_size),
        )

    def snapshot(self, version: int, folder: Path) -> SnapshotFiles | None:
        """The present weights as files in the new folder `folder`; only rank 0 writes. Raises OSError.

        One parameter after another is gathered and written: beside its own share a rank holds one whole parameter at a time.
        """
        names = {self._names[name]: parameter for name, parameter in self._parameters}
        slots = in_file_order(replace(self._slots[name], dtype=parameter.dtype) for name, parameter in names.items())
        tensors: Iterator[Tensor] = self._whole(names[slot.name] for slot in slots)
        if self._place.rank:
            deque(tensors, maxlen=0)
            return None
        stored, policy = self._stored, self._config.policy
        if stored is not None and stored.is_fused:
            parts = zip(slots, tensors, strict=True)
            tensors = (part for slot, whole in parts for part in stored.tensors(slot.name, whole))
            slots = [replace(part, dtype=slot.dtype) for slot in slots for part in stored.slots(slot.name)]
        return write_snapshot(folder, version, policy.kind, snapshot_config(self._model, policy), slots, tensors)

    def remember(self, version: int, at_most: int) -> None:
        """Keep a copy of the trained weights as those of `version`: the newest `at_most`, or as many as fit beside the model; none if
        parameters are spread over ranks."""
        num_bytes = sum(parameter.numel() * parameter.element_size() for _, parameter in self._parameters)
        fitting = min(at_most, _MAX_COPY_BYTES // num_bytes) if self._stage < SPREAD_WEIGHTS else 0
        while len(self._copies) > max(0, fitting - (version not in self._copies)):
            self._copies.popitem(last=False)
        if fitting:
            self._copies[version] = {name: parameter.detach().clone() for name, parameter in self._parameters}

    def logprobs_under(self, version: int, batch: TrainingBatch) -> list[npt.NDArray[np.float32]]:
        """The log-probabilities of each sample's generated tokens under a remembered version; each rank computes its part of them."""
        arrays = SampleTensors(batch, self._engine.device)
        plan = restore_plan(batch.order.tolist(), batch.micro_batch_sizes.tolist(), batch.update_sizes.tolist())
        found = torch.zeros(int(batch.num_generated.sum()), dtype=torch.float32, device=self._engine.device)
        with torch.no_grad():
            for update in plan.updates:
                for samples in filter(None, deal_to_ranks(update, self._place.world_size)[self._place.rank]):
                    logprobs, _ = torch.func.functional_call(self._model, self._copies[version], arrays.inputs(samples))
                    found[torch.from_numpy(arrays.row_indices(samples)).to(found.device)] = logprobs.float()
        if self._place.world_size > 1:
            dist.all_reduce(found)
        return np.split(found.cpu().numpy(), np.cumsum(batch.num_generated)[:-1])

    def save(self, folder: Path) -> None:
        """Write model, optimizer and random state below `folder`. The checkpoint store makes them durable. Raises OSError."""
        state = {"num_updates": self._num_updates, "rng": torch.random.get_rng_state().numpy().tobytes()}
        try:
            self._engine.save_checkpoint(
                str(folder), tag=_TAG, client_state=state, save_latest=False, exclude_frozen_parameters=self._is_lora
            )  # fmt: skip
        except RuntimeError as exc:
            # torch's file writer raises no OSError when the disk refuses, and gives no reason.
            if _TORCH_WRITER not in str(exc):
                raise
            raise OSError(errno.EIO, f"a file of the trainer could not be written whole (is the disk full?): {exc}") from exc
        if not self._place.rank:
            self._layout.write(folder)

    def load(self, folder: Path) -> None:
        """Load the state that `save` wrote, on any number of ranks. Raises UserError if it cannot be read."""
        if not (folder / _TAG).is_dir():
            raise UserError(f"There is no trainer state in {folder}.", hint="The checkpoint is not whole: bring its folder back as it was.")
        if not ShardLayout.read(folder).needs_converting(self._layout):
            self._load(folder)
            return
        with universal_form(folder, _TAG, self._place, self._engine.device) as converted:
            self._engine._config.load_universal_checkpoint = True  # noqa: SLF001  DeepSpeed decides at initialisation, before we know
            try:
                self._load(converted)
            finally:
                self._engine._config.load_universal_checkpoint = False  # noqa: SLF001  as above

    def load_weights(self, folder: Path) -> None:
        """Load the weights of a snapshot's files in `folder`, with a fresh optimizer. Raises UserError if they do not fit."""
        with open_tensors(folder / file_names(self._config.policy.kind)[0], self._shapes) as in_file, torch.no_grad():
            stored = fused_tensors(folder) if self._stored is not None and self._stored.is_fused else in_file
            tensors = self._whole((parameter for _, parameter in self._parameters), is_written=True)
            for (name, _), parameter in zip(self._parameters, tensors, strict=True):
                parameter.copy_(stored(self._names[name]))
        # The optimizers of ZeRO and bfloat16 keep float32 copies; torch's does not.
        refresh = getattr(self._engine.optimizer, "refresh_fp32_params", None)
        if refresh is not None:
            refresh()

    def _load(self, folder: Path) -> None:
        try:
            _, state = self._engine.load_checkpoint(str(folder), tag=_TAG, load_module_strict=not self._is_lora)
        except Exception as exc:  # DeepSpeed raises any error, also assertions without a message
            raise UserError(
                f"The trainer state in {folder} cannot be read: {str(exc) or repr(exc)}", hint="Bring the folder back as it was."
            ) from exc
        self._num_updates = int(state["num_updates"])
        torch.random.set_rng_state(torch.from_numpy(np.frombuffer(state["rng"], np.uint8).copy()))

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _is_lora(self) -> bool:
        return self._config.policy.kind is WeightKind.LORA

    def _whole(self, parameters: Iterable[nn.Parameter], *, is_written: bool = False) -> Iterator[nn.Parameter]:
        """Each parameter in turn, gathered until the next one if ZeRO-3 spreads it; `is_written`: the changes of rank 0 are kept.

        A collective: all ranks iterate to the end.
        """
        if self._stage < SPREAD_WEIGHTS:
            yield from parameters
            return
        import deepspeed

        for parameter in parameters:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if is_written else None):
                yield parameter

    def _reference_model(self) -> PolicyModel:
        """A frozen second copy of the base: with full weights nothing else keeps the starting policy."""
        model = load_policy(self._config.policy).to(self._engine.device)
        return model.requires_grad_(requires_grad=False).eval()

    def _previous(self, arrays: SampleTensors, updates: Sequence[tuple[MicroBatch, ...]]) -> dict[MicroBatch, Tensor]:
        """Log-probabilities at the step's start of the later updates' samples, by micro-batch, on the rank that will train it."""
        found = {}
        with torch.no_grad():
            for update in updates:
                for micro_batch in deal_to_ranks(update, self._place.world_size)[self._place.rank]:
                    logprobs, _ = self._engine(*arrays.inputs(micro_batch))
                    found[micro_batch] = logprobs
        return found

    def _update(
        self,
        arrays: SampleTensors,
        update: tuple[MicroBatch, ...],
        previous: Mapping[MicroBatch, Tensor] | None,
        differences: Differences,
    ) -> TokenSums:
        """Forward and backward over one update's micro-batches, this rank's share; the sums of all ranks."""
        samples = list(itertools.chain.from_iterable(update))
        scales = sequence_scales(arrays.num_generated[samples], self._config.normalisation, constant=self._config.normalisation_constant)
        scale_of = dict(zip(samples, scales.tolist(), strict=True))
        totals: TokenSums | None = None
        for micro_batch in deal_to_ranks(update, self._place.world_size)[self._place.rank]:
            sums = self._micro_step(arrays, micro_batch, scale_of, previous, differences)
            totals = sums if totals is None else totals.merged(sums)
        assert totals is not None
        totals = self._over_ranks(totals)
        if num_bad := int(totals.sums["num_not_finite"]):
            raise TrainingDiverged(
                f"{num_bad} tokens of this step have a log-probability that is not finite; the weights were left as they are.",
                hint="The policy has diverged: lower [learner] lr, and start a new run.",
            )
        return totals

    def _micro_step(
        self,
        arrays: SampleTensors,
        samples: MicroBatch,
        scale_of: Mapping[int, float],
        previous: Mapping[MicroBatch, Tensor] | None,
        differences: Differences,
    ) -> TokenSums:
        inputs = arrays.inputs(samples)
        logprobs, entropies = self._engine(*inputs)
        kept = slice(None) if samples else slice(0, 0)
        rows = arrays.rows(samples)
        batch = LossInputs(
            learner=logprobs[kept],
            sampler=self._sampler(rows, logprobs[kept], previous[samples] if previous is not None and samples else None),
            advantages=rows.advantages,
            mask=rows.mask,
            sequence_ids=rows.sequence_ids,
            sequence_lengths=rows.sequence_lengths,
            sequence_scales=torch.tensor([scale_of[sample] for sample in samples], dtype=torch.float64, device=logprobs.device),
            previous=previous[samples] if previous is not None and samples else None,
            reference=self._under_reference(inputs)[kept] if self._config.kl.coef > 0 else None,
        )
        outputs = self._loss(batch)
        # DeepSpeed averages gradients over ranks; the loss is already divided by the counts of the whole update.
        loss = outputs.loss * self._place.world_size
        if not samples:
            loss = loss + 0.0 * logprobs.sum()
        self._engine.backward(loss, scale_wrt_gas=False)
        differences.add(samples, batch, rows.fresh)
        return measure_tokens(batch, outputs, entropies=entropies[kept], fresh=rows.fresh)

    @staticmethod
    def _sampler(rows: TokenRows, learner: Tensor, previous: Tensor | None) -> Tensor:
        """Log-probabilities under the sampler; where it gave none, under the policy at the step's start, which is the learner until the
        first update."""
        if rows.recomputed is None:
            return rows.sampler
        return torch.where(rows.recomputed, learner.detach() if previous is None else previous, rows.sampler)

    def _under_reference(self, inputs: tuple[Tensor | None, ...]) -> Tensor:
        logprobs: Tensor
        with torch.no_grad():
            if self._reference is not None:
                logprobs, _ = self._reference(*inputs)
            else:
                with self._model.as_reference():
                    logprobs, _ = self._engine(*inputs)
        return logprobs

    def _over_ranks(self, totals: TokenSums) -> TokenSums:
        if self._place.world_size == 1:
            return totals
        mine = totals.to_vector()
        vectors = [torch.empty_like(mine) for _ in range(self._place.world_size)]
        dist.all_gather(vectors, mine)
        merged = totals.with_vector(vectors[0])
        for vector in vectors[1:]:
            merged = merged.merged(totals.with_vector(vector))
        return merged

    def _set_rate(self) -> float:
        """The learning rate of the coming update, from now on the optimizer's."""
        self._num_updates += 1
        rate = self._config.optimizer.rate.at(self._num_updates)
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _grad_norm(self) -> float:
        value = self._started.grad_norm
        if not math.isfinite(value):
            raise TrainingDiverged(
                f"The gradient norm is {value}.", hint="The policy has diverged: lower [learner] lr, and start a new run."
            )
        return value
