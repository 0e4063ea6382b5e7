"""What sampling left to draw from, as the learner finds it, is what an engine leaves; and which gradient follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's model is torch code: install the extra 'learner'")

import torch

from echo_learner.training.batch import cut_tokens
from echo_learner.training.cut import Cut
from echo_schemas.records import LogprobDistribution, Sampling, Trajectory
from echo_schemas.topics import TRAJECTORIES
from tests.examples import load_examples

CUTS: tuple[dict[str, Any], ...] = (
    {"top_p": 0.6},
    {"top_k": 3},
    {"min_p": 0.2},
    {"top_k": 8, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 1},
    {"top_k": 1_000},
    {"top_p": 1e-6},
)


def logits_of(rows: int = 64, vocabulary: int = 40) -> torch.Tensor:
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_it_leaves_what_the_engine_leaves(cut: dict[str, Any]) -> None:
    from echo_rollout.engines.sampling_loop import processed  # takes two seconds, which only the process that runs this test pays

    logits = logits_of()
    wanted = processed(logits.clone(), [Sampling(max_new_tokens=1, **cut)] * len(logits))
    drawn = torch.multinomial(wanted.exp(), 1, generator=torch.Generator().manual_seed(1)).squeeze(1)
    torch.testing.assert_close(Cut(**cut)(logits, drawn).log_softmax(1), wanted)


def test_nothing_is_cut_unless_it_is_asked_for() -> None:
    logits = logits_of()
    assert torch.equal(Cut()(logits, torch.zeros(len(logits), dtype=torch.int64)), logits)


def test_the_example() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    kept = Cut(top_p=0.6)(logits, torch.tensor([0])).softmax(1)
    torch.testing.assert_close(kept, torch.tensor([[0.5 / 0.8, 0.3 / 0.8, 0.0]]))


def test_what_was_drawn_was_kept_whatever_newer_weights_say() -> None:
    logits = logits_of()
    least = logits.argmin(dim=1)
    kept = Cut(top_p=0.6)(logits, least)
    assert torch.isfinite(kept.gather(1, least.unsqueeze(1))).all()
    assert (torch.isfinite(kept).sum(1) > 1).all()


def test_the_gradient_is_that_of_the_policy_that_is_sampled() -> None:
    """The expected score-function gradient under the cut distribution, exact over all tokens, against autograd on the expected reward."""
    logits = logits_of(rows=1, vocabulary=12).double().requires_grad_()
    rewards = torch.arange(12.0, dtype=torch.float64)
    cut = Cut(top_p=0.7)
    every = torch.arange(12)
    drawn_from = cut(logits.detach(), logits.detach().argmax(1)).softmax(1)[0]
    kept = drawn_from > 0
    logprobs = torch.stack([cut(logits, token.reshape(1)).log_softmax(1)[0, token] for token in every[kept]])
    (found,) = torch.autograd.grad((drawn_from[kept] * rewards[kept] * logprobs).sum(), logits)
    within = logits[0, kept].softmax(0)
    (wanted,) = torch.autograd.grad((within * rewards[kept]).sum(), logits)
    torch.testing.assert_close(found, wanted)


def test_only_tokens_whose_log_probabilities_are_of_a_cut_distribution_are_cut() -> None:
    whole = load_examples(TRAJECTORIES)["single_turn.json"]
    assert isinstance(whole, Trajectory)
    drawn = replace(whole, sampling=replace(whole.sampling, top_p=0.9))
    full = replace(drawn, logprob_distribution=LogprobDistribution.FULL)
    assert cut_tokens([whole, full]).size == 0, "nothing is cut, and nothing travels to the ranks"
    num = whole.num_generated
    assert cut_tokens([whole, drawn, full]).tolist() == [False] * num + [True] * num + [False] * num
