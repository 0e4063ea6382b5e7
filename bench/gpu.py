"""What learner and engines do on a GPU, with models of real sizes and random weights, made on the spot; no broker, no data.

    python bench/gpu.py [--parts learner,engines] [--models qwen2.5-0.5b,qwen3-4b] [--tokens 1024] [--json FILE]

learner   one step of the learner's own trainer: tokens a second, share of the card's peak (MFU), most memory. MFU counts 6 operations a
          weight and token for all weights and 4 for an adapter, and attention; what is recomputed is not counted.
engines   `transformers`, and `vllm` if it is installed: tokens a second, seconds to install a version, and how far its log-probabilities
          are from the learner's for the same weights (nats a token; effective sample size of their ratio).

Each row is a process of its own. The final norm is multiplied by six, so that the logits of random weights scatter as a trained model's do.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from command import parser_of, save

from echo_schemas.records import Sampling, WeightKind

if TYPE_CHECKING:
    from echo_learner.training.batch import TrainingBatch
    from echo_learner.training.ranks import RankedTrainer
    from echo_rollout.engines.engine import Engine

# Dense bf16 operations a second of one card, by a word of its name.
_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}
_VOCABULARY = 151_936
_PROMPT, _GROUP_SIZE = 64, 8
_STEPS = 2
_RANK = 32
_NORM = 6.0

Row = tuple[Sequence[int], Sequence[int], Sequence[float]]
"""Prompt, answer and log-probabilities."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's sizes."""

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def body_weights(self) -> int:
        """Of the layers' matrices."""
        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * (2 * self.hidden * width + 2 * self.hidden * kv + 3 * self.hidden * self.inner)

    def flops(self, tokens: int, length: int, *, all_weights: bool) -> float:
        """Of forward and backward over `tokens`, in sequences of `length`; the causal half of attention."""
        matrices = self.body_weights + self.hidden * _VOCABULARY
        attention = 2 * self.layers * self.heads * self.head_dim * length
        # Without the products that give the gradients of frozen weights; attention has none.
        return tokens * ((6 if all_weights else 4) * matrices + 3 * attention)


SHAPES = {
    "tiny": Shape("qwen3", 64, 128, 2, 4, 2, 32),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": Shape("qwen3", 4096, 12_288, 36, 32, 8, 128),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerRow:
    """One configuration of the learner. `profiles`: the folder for a profile of one more step."""

    model: str
    kind: str
    micro_batch_tokens: int
    tokens: int
    samples: int
    variant: str = "recomputed"
    profiles: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One configuration of an engine."""

    engine: str
    model: str
    kind: str
    sequences: int
    tokens: int
    top_p: float
    options: Mapping[str, Any]


def make_model(name: str, folder: Path) -> Path:
    """A folder with random weights in bfloat16 and a tokenizer of words; made once."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    made = folder / name
    if (made / "tokenizer.json").exists():
        return made
    shape = SHAPES[name]
    config = AutoConfig.for_model(
        shape.family,
        vocab_size=_VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape.hidden < 4096,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        architectures=["Qwen3ForCausalLM" if shape.family == "qwen3" else "Qwen2ForCausalLM"],
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.model.norm.weight.mul_(_NORM)
    model.save_pretrained(made)
    words = {f"w{number}": number for number in range(_VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}), encoding="utf-8")
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w0", chat_template=template).save_pretrained(made)
    return made


def open_trainer(folder: Path, kind: str, *, again: bool, compiled: bool = False, lr: float = 1e-6) -> RankedTrainer:
    """The learner's trainer on this machine's first card."""
    from echo_core.normalisation import Normalisation
    from echo_learner.losses.config import ReferenceKl
    from echo_learner.training import ranks
    from echo_learner.training.deepspeed_setup import OptimizerConfig
    from echo_learner.training.learning_rate import LearningRate
    from echo_learner.training.policy_model import PolicyConfig
    from echo_learner.training.trainer import TrainerConfig

    policy = PolicyConfig(
        base=str(folder),
        base_name=folder.name,
        kind=WeightKind(kind),
        lora_r=_RANK,
        lora_alpha=_RANK,
        dtype="bfloat16",
        temperature=1.0,
        gradient_checkpointing=again,
        compile=compiled,
        seed=0,
    )
    config = TrainerConfig(
        policy=policy,
        optimizer=OptimizerConfig(rate=LearningRate(lr=lr)),
        loss="grpo_tis",
        loss_options={},
        kl=ReferenceKl(),
        normalisation=Normalisation.TOKEN,
        normalisation_constant=1,
    )
    return ranks.open_trainer(config, 1)


def batch_of(rows: Sequence[Row], max_tokens: int) -> TrainingBatch:
    """One update's batch of (prompt, answer, log-probabilities), with random advantages."""
    from echo_learner.training.batch import TrainingBatch
    from echo_learner.training.microbatches import plan_micro_batches

    lengths = [len(prompt) + len(answer) for prompt, answer, _ in rows]
    plan = plan_micro_batches(lengths, [_GROUP_SIZE] * (len(rows) // _GROUP_SIZE), num_updates=1, max_tokens=max_tokens)
    counts = np.array([len(answer) for _, answer, _ in rows], np.int64)
    total = int(counts.sum())
    return TrainingBatch(
        version=0,
        tokens=np.concatenate([np.array([*prompt, *answer], np.int32) for prompt, answer, _ in rows]),
        lengths=np.array(lengths, np.int64),
        generated=np.concatenate([np.repeat([False, True], [len(prompt), len(answer)]) for prompt, answer, _ in rows]),
        num_generated=counts,
        sampler=np.concatenate([np.array(logprobs, np.float32) for *_, logprobs in rows]),
        advantages=np.repeat(np.random.default_rng(1).standard_normal(len(rows)).astype(np.float32), counts),
        mask=np.ones(total, np.bool_),
        fresh=np.ones(total, np.bool_),
        order=plan.order,
        micro_batch_sizes=plan.micro_batch_sizes,
        update_sizes=plan.update_sizes,
    )


def learner_row(row: LearnerRow, models: Path) -> dict[str, Any]:
    """One warm step and two measured ones."""
    import torch

    if row.variant == "liger":
        # Its own loss is not used: ours needs a log-probability for each token.
        patch = getattr(importlib.import_module("liger_kernel.transformers"), f"apply_liger_kernel_to_{SHAPES[row.model].family}")
        patch(cross_entropy=False, fused_linear_cross_entropy=False)
    if row.variant == "autograd":
        _let_autograd_do_the_head()
    trainer = open_trainer(make_model(row.model, models), row.kind, again=row.variant != "kept", compiled=row.variant == "compile")
    rng = np.random.default_rng(0)
    answer = row.tokens - _PROMPT
    rows = [
        (rng.integers(2, _VOCABULARY, _PROMPT).tolist(), rng.integers(2, _VOCABULARY, answer).tolist(), [-11.9] * answer)
        for _ in range(row.samples)
    ]
    batch = batch_of(rows, row.micro_batch_tokens)
    trainer.step(batch)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(trainer.step(batch).compute_s for _ in range(_STEPS))
    if row.profiles is not None:
        _profile(trainer, batch, row.profiles / f"profile-{row.model}-{row.kind}-{row.variant}.txt")
    trainer.close()
    num_tokens = row.samples * row.tokens
    flops = SHAPES[row.model].flops(num_tokens, row.tokens, all_weights=row.kind == "full")
    peak = peak_flops()
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(num_tokens / seconds),
        "mfu": round(flops / seconds / peak, 3) if peak else None,
        "most_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2) if torch.cuda.is_available() else None,
        "reserved_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if torch.cuda.is_available() else None,
    }


def _let_autograd_do_the_head() -> None:
    """The head's pieces by torch's checkpoint instead of the derivative that `echo_learner.training.head` has written out."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from echo_learner.training.head import Head

    score = Head.score

    def in_pieces(
        self: Head, hidden: torch.Tensor, targets: torch.Tensor, is_cut: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = self.pieces(len(targets))
        parts = [checkpoint(score, self, hidden[piece], targets[piece], None, use_reentrant=False) for piece in pieces]
        assert is_cut is None
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropies for _, entropies in parts])

    Head.score = in_pieces  # type: ignore[method-assign]


def _profile(trainer: RankedTrainer, batch: TrainingBatch, file: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        trainer.step(batch)
    file.write_text(profiled.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=90), encoding="utf-8")


def peak_flops() -> float | None:
    """Of this machine's card; None for one that is not in the table."""
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((peak for word, peak in _PEAK.items() if word in name), None)


def engine_row(row: EngineRow, models: Path) -> dict[str, Any]:
    """Start, first version, one warm batch and one measured; then the learner's log-probabilities of the same tokens."""
    folder = make_model(row.model, models)
    with tempfile.TemporaryDirectory() as work:
        version = Path(work) / "v0"
        sha256 = _alone(_write_version, folder, row.kind, version)
        figures, found = asyncio.run(_generate(row, folder, version, sha256))
        return {**figures, **_alone(_compare, folder, row.kind, version, found)}


def _write_version(folder: Path, kind: str, target: Path) -> str:
    """Version 0 as a learner publishes it, after one step at a rate that moves it; its SHA-256."""
    trainer = open_trainer(folder, kind, again=True, lr=1e-3 if kind == "lora" else 1e-6)
    rng = np.random.default_rng(3)
    rows = [(rng.integers(2, _VOCABULARY, 8).tolist(), rng.integers(2, _VOCABULARY, 56).tolist(), [-11.9] * 56) for _ in range(_GROUP_SIZE)]
    trainer.step(batch_of(rows, 4_096))
    sha256 = trainer.snapshot(0, target).sha256
    trainer.close()
    return sha256


async def _generate(row: EngineRow, base: Path, version: Path, sha256: str) -> tuple[dict[str, Any], list[Row]]:
    from echo_rollout.engines.catalogue import open_engine
    from echo_rollout.engines.engine import EngineConfig, Snapshot, SnapshotRef

    kind = WeightKind(row.kind)
    config = EngineConfig(
        base=base,
        kind=kind,
        dtype="bfloat16",
        max_length=_PROMPT + row.tokens,
        lora_rank=_RANK,
        concurrency=row.sequences,
        options=dict(row.options),
    )
    times = [time.perf_counter()]
    engine = open_engine(row.engine, config)
    await engine.start()
    times.append(time.perf_counter())
    await engine.install(Snapshot(ref=SnapshotRef(version=0, sha256=sha256), kind=kind, folder=version))
    times.append(time.perf_counter())
    rng = np.random.default_rng(2)
    prompts = [rng.integers(2, _VOCABULARY, _PROMPT).tolist() for _ in range(row.sequences // _GROUP_SIZE)]
    await _all(engine, prompts, Sampling(max_new_tokens=16, top_p=row.top_p))
    begun_s = time.perf_counter()
    groups = await _all(engine, prompts, Sampling(max_new_tokens=row.tokens, top_p=row.top_p))
    seconds = time.perf_counter() - begun_s
    rows = [
        (prompt, made.token_ids.tolist(), made.logprobs.tolist()) for prompt, group in zip(prompts, groups, strict=True) for made in group
    ]
    times.append(time.perf_counter())
    await engine.install(Snapshot(ref=SnapshotRef(version=1, sha256=sha256), kind=kind, folder=version))
    times.append(time.perf_counter())
    await engine.close()
    figures = {
        "tokens_per_s": round(sum(len(answer) for _, answer, _ in rows) / seconds),
        "seconds": round(seconds, 2),
        "start_s": round(times[1] - times[0], 1),
        "install_s": round(times[2] - times[1], 2),
        "install_again_s": round(times[4] - times[3], 2),
    }
    return figures, rows


async def _all(engine: Engine, prompts: Sequence[list[int]], sampling: Sampling) -> list[Any]:
    return await asyncio.gather(*(engine.generate(prompt, _GROUP_SIZE, sampling) for prompt in prompts))


def _compare(folder: Path, kind: str, version: Path, rows: Sequence[Row]) -> dict[str, Any]:
    from echo_learner.step_metrics import token_metrics

    trainer = open_trainer(folder, kind, again=True)
    trainer.load_weights(version)
    metrics = token_metrics(trainer.step(batch_of(rows, 8_192)).totals)
    trainer.close()
    wanted = ("logprob_diff_mean", "logprob_diff_max", "ess", "sampler_nll", "entropy")
    return {name: round(metrics[name], 5) for name in wanted if name in metrics}


def _alone(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work` in a process of its own, whose memory on the card goes with it."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
        return process.submit(work, *arguments).result()


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="learner,engines")
    parser.add_argument("--models", default="qwen2.5-0.5b", help="several with commas: " + ", ".join(SHAPES))
    parser.add_argument("--tokens", type=int, default=1_024, help="of a sample, prompt of 64 included; of an answer for engines")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--micro", default="16384", help="micro_batch_tokens, several with commas")
    parser.add_argument("--kinds", default="lora,full")
    parser.add_argument("--engines", default="transformers,vllm")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument(
        "--variants", default="recomputed", help="kept, recomputed, and with the latter: compile, liger, autograd (for the head)"
    )
    parser.add_argument("--options", default="{}", help="JSON for the engine")
    parser.add_argument("--folder", type=Path, help="where models and profiles lie; else temporary")
    parser.add_argument("--profile", action="store_true", help="with --folder")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name, work, row in _rows(given):
            try:
                figures[name] = _alone(work, row, given.folder or Path(temporary))
            except Exception as exc:  # one row that fails (memory) leaves the others
                figures[name] = {"failed": "".join(traceback.format_exception(exc))[-1500:]}
            sys.stdout.write(f"{name}: {json.dumps(figures[name])}\n")
            sys.stdout.flush()
            save(given.json, figures)


def _rows(given: Namespace) -> Iterator[tuple[str, Callable[..., dict[str, Any]], LearnerRow | EngineRow]]:
    """Name, work and configuration of each row that the command line asks for."""
    for model, kind in itertools.product(given.models.split(","), given.kinds.split(",")):
        for variant, micro in itertools.product(given.variants.split(","), given.micro.split(",")) if "learner" in given.parts else ():
            row = LearnerRow(
                model=model,
                kind=kind,
                variant=variant,
                micro_batch_tokens=int(micro),
                tokens=given.tokens,
                samples=given.samples,
                profiles=given.folder if given.profile else None,
            )
            yield f"learner: {model}, {kind}, {variant}, {micro} tokens a micro-batch", learner_row, row
        for engine in given.engines.split(",") if "engines" in given.parts else ():
            asked = EngineRow(
                engine=engine,
                model=model,
                kind=kind,
                sequences=given.sequences,
                tokens=given.tokens,
                top_p=given.top_p,
                options=json.loads(given.options),
            )
            yield f"{engine}: {model}, {kind}, {given.sequences} sequences", engine_row, asked


if __name__ == "__main__":
    main()
