"""The bias of top-p: expected policy gradients, exact over all answers of a small policy, against the gradient of the sampled policy.

    python bench/cut_sampling.py [--json FILE]

A policy of 6 tokens and answers of 4 has a table of logits for each prefix; rewards are random. The sampler draws under `top_p`, and the
gradient is the learner's expectation over infinitely many samples: advantage = reward - mean, token weights pi / pi_sampler, not truncated.
The truth is the gradient of the mean reward of the policy as it is sampled (with its own cut). "stale": the sampler's logits differ by
normal noise of 0.3. Three ways to combine the two log-probabilities:

    drawn / drawn   both of the cut distribution           engines with processed log-probabilities
    full / full     both of the whole distribution         engines with raw log-probabilities
    full / drawn    only the sampler's of the cut one      a learner that ignores the cut
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
from command import parser_of, save
from torch import Tensor

from echo_learner.training.cut import Cut

VOCABULARY, LENGTH, SEEDS, NOISE = 6, 4, 20, 0.3
WAYS = {"drawn / drawn": (True, True), "full / full": (False, False), "full / drawn": (False, True)}
ANSWERS = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
# The table's first row for prefixes of t tokens: it has one row of logits for each prefix.
_STARTS = [sum(VOCABULARY**length for length in range(position)) for position in range(LENGTH + 1)]


def rows_of_answers() -> Tensor:
    """Row of the table for each answer and position, [A, T]."""
    rows = torch.zeros_like(ANSWERS)
    for position in range(1, LENGTH):
        digits = ANSWERS[:, :position]
        powers = torch.tensor([VOCABULARY**power for power in reversed(range(position))])
        rows[:, position] = _STARTS[position] + (digits * powers).sum(1)
    return rows


ROWS = rows_of_answers()


def logprobs(table: Tensor, cut: Cut | None) -> Tensor:
    """Of each answer's tokens, [A, T]; -inf for a token that is never drawn."""
    logits = table if cut is None else cut(table, table.detach().argmax(dim=1))
    return logits.log_softmax(dim=1)[ROWS, ANSWERS]


def gradient(table: Tensor, sampler: Tensor, rewards: Tensor, cut: Cut, way: tuple[bool, bool]) -> Tensor:
    """The learner's expected gradient over infinitely many samples."""
    learner_is_cut, sampler_is_cut = way
    drawn = logprobs(sampler, cut).sum(1).exp()
    is_drawn = drawn > 0
    advantages = (rewards - (drawn * rewards).sum())[is_drawn]
    # A drawn token is kept under newer weights too.
    kept = table if not learner_is_cut else torch.where(_drawable(sampler, cut) | _drawable(table, cut), table, -torch.inf)
    ours = kept.log_softmax(dim=1)[ROWS, ANSWERS][is_drawn]
    theirs = logprobs(sampler, cut if sampler_is_cut else None)[is_drawn]
    weights = (ours - theirs).exp().detach()
    surrogate = (drawn[is_drawn].unsqueeze(1) * advantages.unsqueeze(1) * weights * ours).sum()
    (found,) = torch.autograd.grad(surrogate, table)
    return found


def _drawable(table: Tensor, cut: Cut) -> Tensor:
    return torch.isfinite(cut(table.detach(), table.detach().argmax(dim=1)))


def truth(table: Tensor, rewards: Tensor, cut: Cut) -> Tensor:
    """The gradient of the mean reward of the policy as it is sampled."""
    (found,) = torch.autograd.grad((logprobs(table, cut).sum(1).exp() * rewards).sum(), table)
    return found


def measure(top_p: float, noise: float) -> dict[str, dict[str, float]]:
    """For each way the relative error and the cosine, means over the seeds."""
    cut = Cut(top_p=top_p)
    found: dict[str, dict[str, list[float]]] = {way: {"error": [], "cosine": []} for way in WAYS}
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        table = (1.5 * torch.randn(_STARTS[LENGTH], VOCABULARY, generator=generator, dtype=torch.float64)).requires_grad_()
        sampler = table.detach() + noise * torch.randn(table.shape, generator=generator, dtype=torch.float64)
        rewards = torch.randn(len(ANSWERS), generator=generator, dtype=torch.float64)
        wanted = truth(table, rewards, cut)
        for way, parts in WAYS.items():
            got = gradient(table, sampler, rewards, cut, parts)
            found[way]["error"].append(float((got - wanted).norm() / wanted.norm()))
            found[way]["cosine"].append(float(torch.cosine_similarity(got.flatten(), wanted.flatten(), dim=0)))
    return {way: {name: statistics.fmean(values) for name, values in numbers.items()} for way, numbers in found.items()}


def main() -> None:
    """Print the table."""
    arguments = parser_of(__doc__).parse_args()
    results: list[dict[str, Any]] = []
    for top_p, noise in itertools.product((1.0, 0.95, 0.8), (0.0, NOISE)):
        measured = measure(top_p, noise)
        results.append({"top_p": top_p, "noise": noise, **measured})
        cells = "  ".join(f"{way}: error {numbers['error']:.3f} cosine {numbers['cosine']:.3f}" for way, numbers in measured.items())
        print(f"top_p {top_p:<5} {'stale' if noise else 'fresh'}  {cells}")
    save(arguments.json, results)


if __name__ == "__main__":
    main()
