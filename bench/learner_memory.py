"""What keeps a learner's step small: the head in pieces, layers computed twice, and samples in order of length.

    python bench/learner_memory.py [--tokens N] [--json FILE]

One forward and backward pass of a random Qwen3 in float32, each in a process of its own: processor seconds, and how far the process grew
above the loaded model.

    whole       all logits at once                 pieces      at most 256 MiB of logits, computed again in the backward pass
    kept        the layers' activations are kept   again       `gradient_checkpointing`: computed again in the backward pass

"Padding" needs no model: the share of a step's tokens that are padding, where samples lie in micro-batches in order of length (as the
learner's do) or as they come. Packing, several samples in one row, would save what the first of both says, and no more.
"""

from __future__ import annotations

import multiprocessing as mp
import resource
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from command import parser_of, save

from echo_learner.training.microbatches import plan_micro_batches

# Of Qwen's models; the layers are small, so that two cores need seconds.
_VOCABULARY = 151_936
_GROUPS, _GROUP_SIZE, _UPDATES, _MAX_TOKENS, _LONGEST = 128, 16, 2, 16_384, 8_192
# Median and spread (of the logarithm) of a sample's tokens: short answers, long chains of thought, and games of many turns.
_LENGTHS = {"short answers": (300, 0.5), "long thoughts": (2_500, 0.8), "games": (1_200, 1.0)}


def one_pass(head: str, layers: str, num_tokens: int) -> dict[str, float]:
    """Processor seconds of one forward and backward pass, and the MiB that the process grew by."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from echo_learner.training.cut import Cut
    from echo_learner.training.logits import LogitTransform
    from echo_learner.training.policy_model import PolicyModel

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=_VOCABULARY if head != "none" else 64,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=1 if head != "none" else 12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    causal_lm = Qwen3ForCausalLM(config)
    if layers == "again":
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = PolicyModel(causal_lm.train(), LogitTransform(), 1.0, Cut())
    ids = torch.randint(0, config.vocab_size, (4, num_tokens // 4))
    if head == "whole":
        policy._head.num_rows_at_once = num_tokens  # noqa: SLF001  the limit is no setting
    rows, columns = (index.reshape(-1) for index in torch.meshgrid(torch.arange(4), torch.arange(1, ids.shape[1]), indexing="ij"))
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before_mib, started_s = _most_mib(), time.process_time()
    logprobs, _ = policy(ids, rows, columns)
    logprobs.sum().backward()
    return {"cpu_s": round(time.process_time() - started_s, 2), "mib": round(_most_mib() - before_mib)}


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def padding(lengths: Sequence[int], *, in_order: bool) -> float:
    """The share of a step's tokens that is padding."""
    if in_order:
        plan = plan_micro_batches(lengths, [_GROUP_SIZE] * _GROUPS, num_updates=_UPDATES, max_tokens=_MAX_TOKENS)
        batches = [samples for update in plan.updates for samples in update]
    else:
        batches = []
        for sample in range(len(lengths)):
            if batches and (len(batches[-1]) + 1) * max(lengths[other] for other in (*batches[-1], sample)) <= _MAX_TOKENS:
                batches[-1] = (*batches[-1], sample)
            else:
                batches.append((sample,))
    return 1 - sum(lengths) / sum(len(samples) * max(lengths[sample] for sample in samples) for samples in batches)


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=int, default=4_096, help="of the micro-batch")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"tokens": arguments.tokens}
    for name, head, layers in (
        ("whole", "whole", "kept"),
        ("pieces", "pieces", "kept"),
        ("kept", "none", "kept"),
        ("again", "none", "again"),
    ):
        with ProcessPoolExecutor(1, mp.get_context("spawn")) as process:
            figures[name] = process.submit(one_pass, head, layers, arguments.tokens).result()
        sys.stdout.write(f"{name}: {figures[name]}\n")
        sys.stdout.flush()
    dice = np.random.default_rng(0)
    shares = {}
    for name, (median, spread) in _LENGTHS.items():
        drawn = np.exp(np.log(median) + spread * dice.standard_normal(_GROUPS * _GROUP_SIZE))
        lengths = np.clip(drawn, 16, _LONGEST).astype(int).tolist()
        shares[name] = {order: round(padding(lengths, in_order=order == "in order"), 4) for order in ("in order", "as they come")}
        sys.stdout.write(f"padding, {name}: {shares[name]}\n")
    figures["padding"] = shares
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
