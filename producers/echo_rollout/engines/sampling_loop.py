"""A batch of prompts sampled to the end with a key-value cache, each row with its own bounds. Imports torch, transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from echo_rollout.engines.engine import Generation, SnapshotRef
from echo_schemas.records import FinishReason, Sampling, VersionSpan
from echo_tasks.experts import Routers

Ask = tuple[Sequence[int], int, Sampling]


@dataclass(eq=False, slots=True)
class _Row:
    """One completion as it grows."""

    prompt: Sequence[int]
    sampling: Sampling
    generator: torch.Generator | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    experts: list[Tensor] = field(default_factory=list)
    finished: FinishReason | None = None
    text: str | None = None


class SamplingLoop:
    """Knows the base's tokenizer and end tokens, and the model's routers where experts are to be noted."""

    def __init__(self, base: Path, routers: Routers | None = None) -> None:
        self._routers = routers
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, local_files_only=True)
        self._ends = _end_tokens(base, self._tokenizer)

    @torch.inference_mode()
    def run(self, model: Any, asks: Sequence[Ask], ref: SnapshotRef) -> list[list[Generation]]:
        """For each (prompt, n, sampling) its n generations."""
        rows = [
            _Row(prompt, sampling, None if sampling.seed is None else torch.Generator().manual_seed(sampling.seed + index))
            for prompt, n, sampling in asks
            for index in range(n)
        ]
        running = list(rows)
        ids, mask = _padded([row.prompt for row in rows], model.device)
        cache: Any = None
        while running:
            positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            outputs = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            cache = outputs.past_key_values
            self._note_experts(running, ids.shape[1])
            chosen = self._draw(outputs.logits[:, -1].float(), running)
            kept = [index for index, row in enumerate(running) if row.finished is None]
            if len(kept) < len(running):
                running = [running[index] for index in kept]
                picked = torch.tensor(kept, dtype=torch.long, device=mask.device)
                chosen, mask = chosen[picked], mask[picked]
                if running:
                    cache.batch_select_indices(picked)
            ids = chosen.unsqueeze(1)
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], 1)], dim=1)
        generations = iter(self._generation(row, ref) for row in rows)
        return [[next(generations) for _ in range(n)] for _, n, _ in asks]

    def _note_experts(self, rows: Sequence[_Row], width: int) -> None:
        """Note the experts of the last pass, over `width` tokens of each row: the prompts, padded on the left, or one token each."""
        if self._routers is None:
            return
        noted = self._routers.noted().unflatten(0, (len(rows), width)).cpu()
        for row, experts in zip(rows, noted, strict=True):
            row.experts.append(experts[-1 if row.experts else -len(row.prompt) :])

    def _draw(self, logits: Tensor, rows: Sequence[_Row]) -> Tensor:
        """Add a token to each row; ids [B]."""
        logprobs = processed(logits, [row.sampling for row in rows])
        probabilities = logprobs.exp()
        chosen = torch.multinomial(probabilities, 1).squeeze(1)
        for index, row in enumerate(rows):
            if row.sampling.temperature == 0:
                chosen[index] = logits[index].argmax()
            elif row.generator is not None:
                chosen[index] = torch.multinomial(probabilities[index].cpu(), 1, generator=row.generator)[0]
        picked = logprobs.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        for row, token, logprob in zip(rows, chosen.tolist(), picked, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            self._finish(row, token)
        return chosen

    def _finish(self, row: _Row, token: int) -> None:
        if token in self._ends:
            row.finished = FinishReason.STOP
        elif row.sampling.stop:
            text = self._tokenizer.decode(row.tokens, skip_special_tokens=True)
            found = [at for at in (text.find(stop) for stop in row.sampling.stop) if at >= 0]
            if found:
                row.text, row.finished = text[: min(found)], FinishReason.STOP
        if row.finished is None and len(row.tokens) >= row.sampling.max_new_tokens:
            row.finished = FinishReason.LENGTH

    def _generation(self, row: _Row, ref: SnapshotRef) -> Generation:
        length = len(row.tokens)
        return Generation(
            token_ids=np.array(row.tokens, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            version_spans=(VersionSpan(start=0, end=length, version=ref.version),) if length else (),
            weights_sha256=ref.sha256,
            finish_reason=row.finished or FinishReason.ABORT,
            experts=None if self._routers is None else _narrowed(torch.cat(row.experts), self._routers.shape[2]),
            text=row.text if row.text is not None else self._tokenizer.decode(row.tokens, skip_special_tokens=True),
        )


def _narrowed(experts: Tensor, num_experts: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """One byte for each number if there are at most 256 experts, else two."""
    found: npt.NDArray[np.unsignedinteger[Any]] = experts.numpy().astype(np.uint8 if num_experts <= 1 << 8 else np.uint16)
    return found


def processed(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Natural log-probabilities [B, V] after temperature, top-k, top-p and min-p, −inf outside the support. `logits` [B, V], float32.

    Temperature 0 leaves the distribution as it is: the token is the most likely one.
    """
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=logits.device)
    logits = logits / temperatures.unsqueeze(1)
    for index, sampling in enumerate(samplings):
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            logits[index] = _truncated(logits[index], sampling)
    return logits.log_softmax(dim=-1)


def _truncated(logits: Tensor, sampling: Sampling) -> Tensor:
    outside = torch.zeros_like(logits, dtype=torch.bool)
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        outside |= probabilities < sampling.min_p * probabilities.max()
    if 0 < sampling.top_k < logits.shape[0]:
        outside |= logits < logits.topk(sampling.top_k).values[-1]
    logits = logits.masked_fill(outside, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1)
        before[0] = 0
        logits = logits.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    return logits


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [B, P], padded on the left so that every row goes on at the right edge."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)


def _end_tokens(base: Path, tokenizer: Any) -> frozenset[int]:
    ends = [tokenizer.eos_token_id]
    if (base / "generation_config.json").is_file():
        found = GenerationConfig.from_pretrained(base, local_files_only=True).eos_token_id
        ends += found if isinstance(found, list) else [found]
    return frozenset(end for end in ends if end is not None)
