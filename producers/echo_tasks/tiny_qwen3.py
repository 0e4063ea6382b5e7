"""The demo's base model: a Qwen3 of 336,640 parameters that has practised a little, with a real tokenizer. Imports torch, transformers.

Reinforcement learning sharpens what a model already does sometimes. So supervised practice stops as soon as about one sampled answer in
five is right: the learning curve of practice is steep, and a fixed number of steps would be a matter of luck.

    python -m echo_tasks.tiny_qwen3 reverse|sort FOLDER
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from echo_tasks.digits import END_OF_PROMPT, NUM_DIGITS, reversed_digits, sorted_digits

ANSWERS: dict[str, Callable[[str], str]] = {"reverse": reversed_digits, "sort": sorted_digits}
VOCABULARY = 32
PADDING, END = "<pad>", "<eos>"
_TOKENS = [PADDING, END, *"0123456789", END_OF_PROMPT, *"+=:"]
_MAX_LENGTH = 256
_SEED = 0
_LEARNING_RATE = 1.5e-3
_BATCH = 64
# Measured on sampled answers, temperature 1, which is what the run will see.
_TARGET = 0.17
_MEASURED = 1024
# An answer is right with about exp(−7 · loss): above this loss it is not worth measuring.
_MEASURE_BELOW = 0.32
_MAX_STEPS = 2_000


def make(practice: str, folder: Path) -> float:
    """Write the model and its tokenizer into `folder`; the share of sampled answers that are right. The same bytes every time."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

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
        # Untied: an engine that packs the head once would keep the old one after a reload of all weights.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=_TOKENS.index(END),
        pad_token_id=_TOKENS.index(PADDING),
    )
    model = Qwen3ForCausalLM(config)
    accuracy = _practise(model, ANSWERS[practice])
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    # Engines would take sampling defaults from here; requests say how they sample.
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": _TOKENS.index(END), "pad_token_id": _TOKENS.index(PADDING)}, indent=1), encoding="utf-8"
    )
    return accuracy


def _practise(model: torch.nn.Module, answer: Callable[[str], str]) -> float:
    """Supervised steps on fresh examples until enough sampled answers are right."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    rng = random.Random(_SEED)
    for _ in range(_MAX_STEPS):
        ids = _examples(rng, _BATCH, answer)
        logits = model(input_ids=ids).logits[:, NUM_DIGITS:-1]
        loss = cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, NUM_DIGITS + 1 :].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < _MEASURE_BELOW:
            accuracy = _sampled_accuracy(model, answer)
            if accuracy >= _TARGET:
                return accuracy
    message = f"After {_MAX_STEPS} steps of practice fewer than {_TARGET:.0%} of the sampled answers are right."
    raise RuntimeError(message)


def _examples(rng: random.Random, count: int, answer: Callable[[str], str]) -> Tensor:
    """Token ids [count, 14]: six digits, `>`, the answer, the end."""
    rows = []
    for _ in range(count):
        digits = "".join(rng.choices("0123456789", k=NUM_DIGITS))
        rows.append([*(_TOKENS.index(token) for token in digits + END_OF_PROMPT + answer(digits)), _TOKENS.index(END)])
    return torch.tensor(rows)


@torch.no_grad()
def _sampled_accuracy(model: torch.nn.Module, answer: Callable[[str], str]) -> float:
    """Share of right answers to fresh prompts, sampled at temperature 1."""
    examples = _examples(random.Random(_SEED + 1), _MEASURED, answer)
    generator = torch.Generator().manual_seed(_SEED)
    ids = examples[:, : NUM_DIGITS + 1]
    for _ in range(NUM_DIGITS + 1):
        probabilities = model(input_ids=ids).logits[:, -1].softmax(dim=-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    return float((ids == examples).all(dim=1).float().mean())


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    spare = [f"<spare{number}>" for number in range(VOCABULARY - len(_TOKENS))]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate([*_TOKENS, *spare])}, unk_token=PADDING))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PADDING, model_max_length=_MAX_LENGTH, clean_up_tokenization_spaces=False
    ).save_pretrained(folder)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]))
