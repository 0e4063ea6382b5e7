"""A small random Qwen3 and versions of it, made from seeds: what the engines' contract is tried on. Imports torch, transformers, peft."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    MinPLogitsWarper,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_schemas.records import Sampling, WeightKind

VOCABULARY, END = 32, 1
RANK = 8


def make_base(folder: Path, *, tied: bool = False, layers: int = 2) -> Path:
    """An untrained model with a tokenizer: it ends rarely, so answers are as long as they may be."""
    _model(0, tied=tied, layers=layers).save_pretrained(folder)
    return write_tokenizer(folder)


def write_tokenizer(folder: Path) -> Path:
    """A word for each of the 32 tokens, the end among them."""
    words = {"<pad>": 0, "<eos>": END, **{chr(ord("a") + number): number + 2 for number in range(26)}, "0": 28, "1": 29, "2": 30, "3": 31}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    chat = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>", chat_template=chat).save_pretrained(folder)
    return folder


def make_snapshot(folder: Path, base: Path, kind: WeightKind, version: int, *, rank: int = RANK) -> Snapshot:
    """Version `version`: an adapter far from zero, or all weights drawn anew."""
    if kind is WeightKind.FULL:
        like = AutoModelForCausalLM.from_pretrained(base).config
        _model(100 + version, tied=bool(like.tie_word_embeddings), layers=like.num_hidden_layers).save_pretrained(folder)
    else:
        torch.manual_seed(version)
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(str(folder))
    return Snapshot(ref=SnapshotRef(version=version, sha256=f"sha-{version}"), kind=kind, folder=folder)


def expected_logprobs(
    base: Path, snapshot: Snapshot | None, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> list[float]:
    """What one plain forward of transformers (and PEFT) says about `tokens` after `prompt`, −inf for one that `sampling` rules out.

    Without a snapshot: under the base alone. Temperature 0 leaves the distribution as it is.
    """
    model = _load(base, snapshot.folder if snapshot else None, snapshot.kind if snapshot else None)
    with torch.inference_mode():
        scores: Any = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    scores = scores / (sampling.temperature or 1.0)
    ids: Any = torch.zeros(len(tokens), 1, dtype=torch.long)
    if sampling.min_p > 0:
        scores = MinPLogitsWarper(sampling.min_p)(ids, scores)
    if sampling.top_k > 0:
        scores = TopKLogitsWarper(sampling.top_k)(ids, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(ids, scores)
    logprobs = scores.log_softmax(dim=-1)
    return [float(logprobs[index, token]) for index, token in enumerate(tokens)]


@functools.cache
def _load(base: Path, folder: Path | None, kind: WeightKind | None) -> Any:
    """The base with the snapshot of `folder`, ready for a forward pass. A snapshot's files never change."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder if kind is WeightKind.FULL else base)
    return (PeftModel.from_pretrained(model, str(folder)) if kind is WeightKind.LORA else model).eval()


def broken(snapshot: Snapshot, folder: Path) -> Snapshot:
    """The next version, cut off in the middle of its weights."""
    shutil.copytree(snapshot.folder, folder)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    ref = SnapshotRef(version=snapshot.ref.version + 1, sha256="broken")
    return Snapshot(ref=ref, kind=snapshot.kind, folder=folder)


def _model(seed: int, *, tied: bool, layers: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=tied, bos_token_id=None, eos_token_id=END,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)
