"""What tests let a trainer do, in a process of its own; arguments and results are JSON. Imports torch and all that a trainer needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2  # noqa: F401  imported before the fork, for their time
import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from echo_bus.blobs.digests import StreamDigest
from echo_core.normalisation import Normalisation
from echo_embedded.ports import free_ports
from echo_learner.losses.catalogue import parse_loss
from echo_learner.losses.config import GrpoTis, ReferenceKl
from echo_learner.step_metrics import token_metrics
from echo_learner.training import head
from echo_learner.training.batch import TrainingBatch
from echo_learner.training.deepspeed_setup import OptimizerConfig
from echo_learner.training.learning_rate import LearningRate
from echo_learner.training.microbatches import plan_micro_batches, restore_plan
from echo_learner.training.policy_model import PolicyConfig, load_policy
from echo_learner.training.ranks import RankedTrainer, follow, open_trainer
from echo_learner.training.trainer import TrainerConfig, TrainResult
from echo_schemas.records import WeightKind
from tests.contract.engines.snapshots import VOCABULARY, make_base
from tests.integration.learner.families import family_difference as family_difference
from tests.integration.learner.families import load_with_shifted_logits as load_with_shifted_logits
from tests.integration.learner.families import write_family as write_family
from tests.integration.learner.run_jobs import load_from_log as load_from_log
from tests.integration.learner.run_jobs import retrain_from_file as retrain_from_file  # jobs, too
from tests.integration.learner.run_jobs import run as run
from tests.integration.learner.run_jobs import train_to_file as train_to_file

NUM_GROUPS, GROUP_SIZE = 4, 2


def make_base_model(folder: str) -> None:
    """An untrained model."""
    make_base(Path(folder), tied=True)


def train(
    base: str,
    script: Sequence[Sequence[Any]],
    *,
    settings: Mapping[str, Any] | None = None,
    ranks: int = 1,
    launched: bool = False,
    head_rows: int | None = None,
) -> list[Any]:
    """Open a trainer and do what the script says: rows of an operation's name and its arguments, see `_OPERATIONS`. `head_rows`: of one
    piece of the head, whose usual size a tiny model never reaches."""
    config = trainer_config(base, settings or {})
    if head_rows is not None:
        # A job is a process of its own, and the ranks are its forks.
        head._LOGITS_AT_ONCE = head_rows * VOCABULARY
    if launched:
        _launch(config, ranks)
    trainer = open_trainer(config, ranks)
    try:
        return [_OPERATIONS[name](trainer, *arguments) for name, *arguments in script]
    finally:
        trainer.close()


def served_logprobs(base: str, kind: str, snapshot: str, seed: int, temperature: float) -> list[list[float]]:
    """What transformers and PEFT make of a snapshot's files: log-probabilities of the generated tokens of a batch, by sample."""
    model: Any = AutoModelForCausalLM.from_pretrained(snapshot if kind == WeightKind.FULL else base)
    if kind == WeightKind.LORA:
        model = PeftModel.from_pretrained(model, snapshot)
    with torch.inference_mode():
        return [logprobs.tolist() for logprobs in plain_logprobs(model.eval(), make_batch(seed), temperature)]


def batch_mask(seed: int) -> list[bool]:
    """Which of a batch's generated tokens are trained."""
    mask: list[bool] = make_batch(seed).mask.tolist()
    return mask


def train_plainly(base: str, script: Sequence[Sequence[Any]], *, settings: Mapping[str, Any], folder: str) -> list[dict[str, float]]:
    """The `step`s of a script without any of ours but the loss: transformers, PEFT and torch. Loss and gradient norms of each step."""
    config = trainer_config(base, settings)
    model = plain_model(config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=config.optimizer.rate.lr, weight_decay=config.optimizer.weight_decay)
    answers = []
    for _, seed, num_updates in script:
        batch = make_batch(seed, num_updates=num_updates)
        updates = restore_plan(batch.order.tolist(), batch.micro_batch_sizes.tolist(), batch.update_sizes.tolist()).updates
        with torch.no_grad():
            previous = plain_logprobs(model, batch)
        answer = {"policy_loss": 0.0}
        for number, update in enumerate(updates):
            samples = [sample for micro_batch in update for sample in micro_batch]
            loss = plain_loss(config, batch, samples, plain_logprobs(model, batch), previous)
            loss.backward()
            answer[f"grad_norm_{number}"] = float(torch.nn.utils.clip_grad_norm_(trained, config.optimizer.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad()
            answer["policy_loss"] += loss.item()
        answers.append(answer)
    model.save_pretrained(folder)
    return answers


def plain_model(config: TrainerConfig) -> Any:
    """The base model, with a fresh adapter if that is what is trained."""
    model: Any = AutoModelForCausalLM.from_pretrained(config.policy.base)
    if config.policy.kind is WeightKind.FULL:
        return model
    torch.manual_seed(config.policy.seed)
    return get_peft_model(model, LoraConfig(r=config.policy.lora_r, lora_alpha=config.policy.lora_alpha, target_modules="all-linear"))


def plain_logprobs(model: Any, batch: TrainingBatch, temperature: float = 1.0) -> list[torch.Tensor]:
    """Log-probabilities of each sample's generated tokens, one sample at a time."""
    found = []
    for start, length, generated in zip(np.cumsum(batch.lengths) - batch.lengths, batch.lengths, batch.num_generated, strict=True):
        tokens = torch.from_numpy(batch.tokens[start : start + length]).long()
        logprobs = (model(input_ids=tokens[None]).logits[0].float() / temperature).log_softmax(-1)
        found.append(logprobs[length - generated - 1 : -1].gather(1, tokens[length - generated :, None])[:, 0])
    return found


def plain_loss(
    config: TrainerConfig, batch: TrainingBatch, samples: Sequence[int], learner: Sequence[torch.Tensor], previous: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Truncated importance sampling and the clipped surrogate, written out (ECHO-2 equations 23 to 25, over all tokens of the update)."""
    loss_config = parse_loss(config.loss)
    assert isinstance(loss_config, GrpoTis)
    rows = np.cumsum(batch.num_generated) - batch.num_generated
    total, num_tokens = torch.zeros(()), 0
    for sample in samples:
        pick = slice(int(rows[sample]), int(rows[sample] + batch.num_generated[sample]))
        sampler, advantages, mask = (torch.from_numpy(array[pick].copy()) for array in (batch.sampler, batch.advantages, batch.mask))
        weight = (previous[sample] - sampler).exp().clamp(max=loss_config.cap)
        ratio = (learner[sample] - previous[sample]).exp()
        clipped = ratio.clamp(1 - loss_config.clip_low, 1 + loss_config.clip_high)
        total = total - (weight * torch.minimum(ratio * advantages, clipped * advantages) * mask).sum()
        num_tokens += len(sampler)
    return total / num_tokens


def trainer_config(base: str, settings: Mapping[str, Any]) -> TrainerConfig:
    """Float32, LoRA of rank 8, plain GRPO; `settings` on top, by field name; `kl` is the KL term's coefficient."""
    policy = PolicyConfig(
        base=base,
        base_name="test",
        kind=WeightKind.LORA,
        lora_r=8,
        lora_alpha=16,
        dtype="float32",
        temperature=1.0,
        gradient_checkpointing=False,
        seed=7,
    )
    optimizer = OptimizerConfig(rate=LearningRate(lr=1e-3))
    config = TrainerConfig(
        policy=policy,
        optimizer=optimizer,
        loss="grpo_tis",
        loss_options={},
        kl=ReferenceKl(coef=settings.get("kl", 0.0)),
        normalisation=Normalisation.TOKEN,
        normalisation_constant=8,
    )
    changes: dict[str, Any] = {**settings, "kind": WeightKind(settings.get("kind", WeightKind.LORA))}
    changes.pop("kl", None)
    for_policy = {name: changes.pop(name) for name in list(changes) if hasattr(policy, name)}
    for_rate = {name: changes.pop(name) for name in list(changes) if hasattr(optimizer.rate, name)}
    optimizer = replace(optimizer, rate=replace(optimizer.rate, **for_rate))
    for_optimizer = {name: changes.pop(name) for name in list(changes) if hasattr(optimizer, name)}
    return replace(config, policy=replace(policy, **for_policy), optimizer=replace(optimizer, **for_optimizer), **changes)


def make_batch(seed: int, *, num_updates: int = 1, max_tokens: int = 40, version: int = 0) -> TrainingBatch:
    """Four groups of two random samples, of 4 to 10 tokens; micro-batches of about four."""
    random = np.random.default_rng(seed)
    num_samples = NUM_GROUPS * GROUP_SIZE
    num_prompt, num_generated = random.integers(2, 5, num_samples), random.integers(2, 7, num_samples)
    lengths = num_prompt + num_generated
    rows = int(num_generated.sum())
    plan = plan_micro_batches(lengths.tolist(), [GROUP_SIZE] * NUM_GROUPS, num_updates=num_updates, max_tokens=max_tokens)
    return TrainingBatch(
        version=version,
        tokens=random.integers(2, VOCABULARY, int(lengths.sum())).astype(np.int32),
        lengths=lengths,
        generated=np.concatenate([np.arange(length) >= prompt for length, prompt in zip(lengths, num_prompt, strict=True)]),
        num_generated=num_generated,
        sampler=(-2.5 - 2 * random.random(rows)).astype(np.float32),
        advantages=np.repeat(random.normal(size=num_samples), num_generated).astype(np.float32),
        mask=random.random(rows) < 0.9,
        fresh=np.ones(rows, np.bool_),
        order=plan.order,
        micro_batch_sizes=plan.micro_batch_sizes,
        update_sizes=plan.update_sizes,
    )


def _launch(config: TrainerConfig, ranks: int) -> None:
    """What torchrun does: every rank finds its place in the environment."""
    os.environ.update(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_ports(1)[0]))
    for rank in range(1, ranks):
        if not os.fork():
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
            follow(config)
            os._exit(0)
    os.environ.update(RANK="0", LOCAL_RANK="0")


def _step(trainer: RankedTrainer, seed: int, num_updates: int = 1, max_tokens: int = 40) -> dict[str, float]:
    return _numbers(trainer.step(make_batch(seed, num_updates=num_updates, max_tokens=max_tokens)))


def _bad_step(trainer: RankedTrainer, seed: int) -> dict[str, float]:
    """One token's log-probability is no number."""
    batch = make_batch(seed)
    sampler = batch.sampler.copy()
    sampler[int(batch.mask.argmax())] = np.nan
    return _numbers(trainer.step(replace(batch, sampler=sampler)))


def _unsaid_step(trainer: RankedTrainer, seed: int, num_updates: int, *, by_hand: bool) -> dict[str, float]:
    """Nobody said the log-probabilities of half of the samples; `by_hand`: the test computes them before, under the weights as they are."""
    batch = make_batch(seed, num_updates=num_updates)
    unsaid = np.repeat(np.arange(len(batch.lengths)) % 2 == 0, batch.num_generated)
    trainer.remember(0, 1)
    ours = np.concatenate(trainer.logprobs_under(0, batch))
    fresh = batch.fresh & ~unsaid
    if by_hand:
        return _numbers(trainer.step(replace(batch, fresh=fresh, sampler=np.where(unsaid, ours, batch.sampler).astype(np.float32))))
    zeros = np.where(unsaid, 0.0, batch.sampler).astype(np.float32)
    return _numbers(trainer.step(replace(batch, fresh=fresh, sampler=zeros, recomputed=unsaid)))


def _compared_step(trainer: RankedTrainer, seed: int, num_updates: int) -> list[list[float]]:
    """Each sample's difference as the step says it, and by hand from the version remembered before the step, which is the same after it."""
    batch = make_batch(seed, num_updates=num_updates)
    fresh = np.repeat(np.arange(len(batch.lengths)) % 2 == 0, batch.num_generated)
    trainer.remember(seed, 2)
    found = trainer.step(replace(batch, fresh=fresh)).differences
    cuts = np.cumsum(batch.num_generated)[:-1]
    by_hand = [
        float(np.abs(ours - said)[chosen].mean()) if chosen.any() else float("nan")
        for ours, said, chosen in zip(
            trainer.logprobs_under(seed, batch), np.split(batch.sampler, cuts), np.split(fresh & batch.mask, cuts), strict=True
        )
    ]
    return [found.tolist(), by_hand]


def _remembered(trainer: RankedTrainer, at_most: int) -> list[int]:
    """What is known after four versions, the last one told twice."""
    for version in (0, 1, 2, 3, 3):
        trainer.remember(version, at_most)
    return list(trainer.remembered)


def _repeated_step(trainer: RankedTrainer, advantages: Sequence[float]) -> dict[str, float]:
    """One sample with each of the advantages, each in a micro-batch of its own: their gradients differ by a factor only."""
    times = len(advantages)
    one = make_batch(5)
    length, generated = int(one.lengths[0]), int(one.num_generated[0])
    batch = TrainingBatch(
        version=0,
        tokens=np.tile(one.tokens[:length], times),
        lengths=np.full(times, length),
        generated=np.tile(one.generated[:length], times),
        num_generated=np.full(times, generated),
        sampler=np.tile(one.sampler[:generated], times),
        advantages=np.repeat(np.array(advantages, np.float32), generated),
        mask=np.ones(times * generated, np.bool_),
        fresh=np.ones(times * generated, np.bool_),
        order=np.arange(times, dtype=np.int32),
        micro_batch_sizes=np.ones(times, np.int32),
        update_sizes=np.array([times], np.int32),
    )
    return _numbers(trainer.step(batch))


def _snapshot_watched(trainer: RankedTrainer, folder: str) -> list[int]:
    """Bytes of parameters that are whole at once while a snapshot is taken, at most; of the largest; of the snapshot."""
    parameters = [parameter for _, parameter in trainer._local._parameters]
    update, whole = StreamDigest.update, []

    def watch(digest: StreamDigest, data: bytes | memoryview) -> None:
        whole.append(sum(parameter.numel() * parameter.element_size() for parameter in parameters))
        update(digest, data)

    with patch.object(StreamDigest, "update", watch):
        snapshot = trainer.snapshot(0, Path(folder))
    largest = max(torch.Size(shape).numel() for shape in trainer._local._shapes.values())
    return [max(whole), largest * parameters[0].element_size(), snapshot.num_bytes]


def _numbers(result: TrainResult) -> dict[str, float]:
    norms = {f"grad_norm_{number}": norm for number, norm in enumerate(result.grad_norms)}
    return {"lr": result.lr, **norms, **token_metrics(result.totals)}


def _snapshot(trainer: RankedTrainer, folder: str, version: int = 0) -> str:
    return trainer.snapshot(version, Path(folder)).sha256


def _save(trainer: RankedTrainer, folder: str) -> None:
    trainer.save(Path(folder))


def _load(trainer: RankedTrainer, folder: str) -> None:
    trainer.load(Path(folder))


def _load_weights(trainer: RankedTrainer, folder: str) -> None:
    trainer.load_weights(Path(folder))


def _logprobs(trainer: RankedTrainer, seed: int) -> list[list[float]]:
    trainer.remember(seed, 2)
    return [logprobs.tolist() for logprobs in trainer.logprobs_under(seed, make_batch(seed))]


def most_logits(base: str, settings: Mapping[str, Any], head_rows: int) -> list[float]:
    """The most rows of any tensor [rows, vocabulary] in a forward and a backward pass of 30 tokens, head in pieces of `head_rows`; the
    largest difference of the gradients from those of a whole head, and the largest gradient."""
    config = trainer_config(base, {**settings, "kind": "full"})
    rows, columns = torch.arange(30) % 3, torch.arange(30) // 3 + 1
    ids = torch.randint(2, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))
    gradients: list[torch.Tensor] = []
    most: list[int] = []
    for at_once in (10_000, head_rows):
        model: Any = load_policy(config.policy)
        model._head.num_rows_at_once = at_once
        with _LogitRows(model.causal_lm.get_output_embeddings().weight) as seen:
            logprobs, _ = model(ids, rows, columns, torch.ones(30, dtype=torch.bool))
            (logprobs * torch.linspace(-1, 1, 30)).sum().backward()
        most.append(seen.most)
        gradients.append(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]))
    assert most[0] == 30, f"the watch saw {most[0]} rows of the whole head"
    return [most[1], float((gradients[0] - gradients[1]).abs().max()), float(gradients[0].abs().max())]


class _LogitRows(TorchDispatchMode):
    """Watches every operation for logits, which are all that is as wide as the vocabulary but the head's turned weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._turned = weight.T.shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor) and each.dim() == 2 and each.shape[1] == VOCABULARY and each.shape != self._turned:
                self.most = max(self.most, each.shape[0])
        return found


def _kill_rank(trainer: RankedTrainer, rank: int) -> None:
    child = trainer._children[rank - 1]
    child.kill()
    child.wait()


_OPERATIONS: Mapping[str, Any] = {
    "step": _step,
    "bad_step": _bad_step,
    "unsaid_step": lambda trainer, seed, num_updates: _unsaid_step(trainer, seed, num_updates, by_hand=False),
    "by_hand_step": lambda trainer, seed, num_updates: _unsaid_step(trainer, seed, num_updates, by_hand=True),
    "snapshot": _snapshot,
    "snapshot_watched": _snapshot_watched,
    "compared_step": _compared_step,
    "remembered": _remembered,
    "repeated_step": _repeated_step,
    "save": _save,
    "load": _load,
    "load_weights": _load_weights,
    "logprobs": _logprobs,
    "kill_rank": _kill_rank,
}
