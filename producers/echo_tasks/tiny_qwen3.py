"""The demo's base models: a Qwen3 of 336,640 parameters that has practised a little, with a real tokenizer. Imports torch, transformers.

Reinforcement learning needs a model that is right sometimes. So supervised practice goes on until right answers are likely enough; its
learning curve is steep, so a fixed number of steps would give models of very different quality.

    python -m echo_tasks.tiny_qwen3 reverse|sort|sokoban|knights-knaves FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from echo_tasks.practice import PRACTICES, Practice

VOCABULARY = 32
PADDING, END = "<pad>", "<eos>"
_PADDING_ID, _END_ID = 0, 1
_MAX_LENGTH = 256
_SEED = 0
_LEARNING_RATE = 1.5e-3
_BATCH = 64
# Examples that are kept apart to measure on.
_MEASURED = 512
# A batch gives a rough likelihood; from this share of the target on it is measured on held-out examples.
_MEASURE_FROM = 0.7
_MAX_STEPS = 4_000
# The target of a position that is not practised.
_IGNORED = -100


def make(name: str, folder: Path) -> float:
    """Write the model that practised `name`, and its tokenizer, into `folder`; returns its likelihood of right answers. The same bytes
    every time.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    practice = PRACTICES[name]()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    torch.manual_seed(_SEED)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=_MAX_LENGTH,
        # Untied, because an engine that packs the head once would keep the old one after a reload of all weights.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_END_ID,
        pad_token_id=_PADDING_ID,
    )
    model = Qwen3ForCausalLM(config)
    likelihood = practise(model, practice)
    model.save_pretrained(folder)
    _write_tokenizer(practice, folder)
    # Without sampling defaults, which engines would take from here: requests have their own.
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": _END_ID, "pad_token_id": _PADDING_ID}, indent=1), encoding="utf-8"
    )
    return likelihood


def practise(model: torch.nn.Module, practice: Practice) -> float:
    """Supervised steps on fresh examples until right answers have the probability `practice.target`; returns the probability."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    rng = random.Random(_SEED)
    held_out = _examples(random.Random(_SEED + 1), _MEASURED, practice)
    for _ in range(_MAX_STEPS):
        ids, targets = _examples(rng, _BATCH, practice)
        losses = _losses(model, ids, targets)
        loss = losses.sum() / (targets != _IGNORED).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if _likelihood(losses.detach()) >= _MEASURE_FROM * practice.target:
            with torch.no_grad():
                likelihood = _likelihood(_losses(model, *held_out))
            if likelihood >= practice.target:
                return likelihood
    message = f"After {_MAX_STEPS} steps of practice an answer is less likely than {practice.target:.0%}."
    raise RuntimeError(message)


def _losses(model: torch.nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Minus the log-probability of each practised token, 0 elsewhere; [B, T − 1]."""
    logits = model(input_ids=ids).logits[:, :-1]
    return cross_entropy(logits.transpose(1, 2), targets[:, 1:], ignore_index=_IGNORED, reduction="none")


def _likelihood(losses: Tensor) -> float:
    """The mean probability of a whole answer."""
    return float((-losses.sum(dim=1)).exp().mean())


def _examples(rng: random.Random, count: int, practice: Practice) -> tuple[Tensor, Tensor]:
    """Token ids [count, T] of examples, padded at the end, and the targets: the last answer's ids, `_IGNORED` elsewhere."""
    numbers = {token: index for index, token in enumerate(vocabulary(practice))}
    rows = []
    for _ in range(count):
        *before, answer = ([numbers[token] for token in practice.split(part)] for part in practice.example(rng))
        shown = [number for index, part in enumerate(before) for number in (*part, *([_END_ID] if index % 2 else []))]
        rows.append((shown, [*answer, _END_ID]))
    length = max(len(shown) + len(answer) for shown, answer in rows)
    ids = torch.full((count, length), _PADDING_ID)
    targets = torch.full((count, length), _IGNORED)
    for row, (shown, answer) in enumerate(rows):
        ids[row, : len(shown) + len(answer)] = torch.tensor(shown + answer)
        targets[row, len(shown) : len(shown) + len(answer)] = torch.tensor(answer)
    return ids, targets


def vocabulary(practice: Practice) -> list[str]:
    """Every token, by its id."""
    tokens = [PADDING, END, *practice.tokens]
    return [*tokens, *(f"<spare{number}>" for number in range(VOCABULARY - len(tokens)))]


def _write_tokenizer(practice: Practice, folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {token: index for index, token in enumerate(vocabulary(practice))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token=PADDING))
    # `m` in this dialect is Python's DOTALL: a new line is a token too.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"(?m:{practice.pattern})"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, model_max_length=_MAX_LENGTH, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
