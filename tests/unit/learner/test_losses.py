"""Every loss against a slow twin: plain Python loops over float64 numbers, written from the formulas, sharing no code with the product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")
import torch

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss
from echo_learner.losses.config import (
    Cispo,
    DecoupledPpo,
    Divergence,
    Dppo,
    GrpoClip,
    GrpoTis,
    Gspo,
    IcePop,
    LossConfig,
    ReferenceKl,
    SequenceMask,
    TokenTis,
)
from echo_learner.losses.interface import LossInputs
from echo_schemas.errors import UserError

Row = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A batch as lists: one entry per sequence, each with arrays over its response tokens. `None` where the batch has no such row."""

    learner: list[Row]
    sampler: list[Row]
    previous: list[Row] | None
    reference: list[Row] | None
    advantages: list[Row]
    masks: list[npt.NDArray[np.bool_]]

    @property
    def start(self) -> list[Row]:
        """pi_prev, which is pi where nobody says otherwise."""
        return self.learner if self.previous is None else self.previous


def make_example(seed: int, *, spread: float = 0.4, with_previous: bool = True, masked: float = 0.2, drift: float = 0.2) -> Example:
    """Random sequences of 1 to 9 tokens; `spread` and `drift` are the standard deviations of log(pi_prev/mu) and log(pi/pi_prev)."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 10, size=6)
    sampler = [-random.exponential(1.5, size=length) - 0.05 for length in lengths]
    previous = [np.minimum(row + random.normal(0, spread, row.size), -1e-3) for row in sampler]
    learner = [np.minimum(row + random.normal(0, drift, row.size), -1e-3) for row in previous]
    return Example(
        learner=learner,
        sampler=sampler,
        previous=previous if with_previous else None,
        reference=[np.minimum(row + random.normal(0, 0.5, row.size), -1e-3) for row in learner],
        advantages=[random.normal(0, 1, row.size) for row in sampler],
        masks=[random.random(row.size) >= masked for row in sampler],
    )


def ppo(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    """The clipped surrogate of one token."""
    value = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        value = max(value, dual * advantage)
    return value


TokenTerm = tuple[float, float]
"""(term of the loss before normalisation, importance weight)."""


def grpo_tis(pi: float, mu: float, prev: float, advantage: float, *, low: float, high: float, cap: float, dual: float | None) -> TokenTerm:
    weight = min(math.exp(prev - mu), cap)
    return -weight * ppo(math.exp(pi - prev), advantage, low, high, dual), weight


def grpo_clip(pi: float, mu: float, advantage: float, *, low: float, high: float, dual: float | None) -> TokenTerm:
    ratio = math.exp(pi - mu)
    return -ppo(ratio, advantage, low, high, dual), ratio


def cispo(pi: float, mu: float, advantage: float, *, floor: float, cap: float) -> TokenTerm:
    weight = min(max(math.exp(pi - mu), floor), cap)
    return -weight * advantage * pi, weight


def icepop(pi: float, mu: float, prev: float, advantage: float, *, low: float, high: float, alpha: float, beta: float) -> TokenTerm:
    ratio = math.exp(prev - mu)
    weight = ratio if alpha <= ratio <= beta else 0.0
    return -weight * ppo(math.exp(pi - prev), advantage, low, high), weight


def decoupled(pi: float, mu: float, prev: float, advantage: float, *, low: float, high: float, limit: float) -> TokenTerm:
    ratio = math.exp(prev - mu)
    weight = 0.0 if ratio > limit else ratio
    return -weight * ppo(math.exp(pi - prev), advantage, low, high), weight


def dppo(pi: float, mu: float, advantage: float, *, kind: str, threshold: float, cap: float, penalty: float) -> TokenTerm:
    p, q = math.exp(pi), math.exp(mu)
    distance = abs(p - q) if kind == "tv" else q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
    wrong_way = p > q if advantage > 0 else p < q
    weight = 0.0 if distance > threshold and wrong_way else min(p / q, cap)
    return -weight * advantage * pi + penalty * (pi - mu) ** 2, weight


def k1(pi: float, reference: float, limit: float) -> float:
    """-d with d = log(reference/pi), cut at +-limit."""
    return -min(max(reference - pi, -limit), limit)


def k2(pi: float, reference: float, limit: float) -> float:
    """d²/2 with d = log(reference/pi), cut at +-limit."""
    return min(max(reference - pi, -limit), limit) ** 2 / 2


def k3(pi: float, reference: float, limit: float) -> float:
    """exp(d) - d - 1 with d = log(reference/pi), cut at +-limit."""
    difference = min(max(reference - pi, -limit), limit)
    return math.exp(difference) - difference - 1


SequenceTerms = Callable[[Example, int], list[TokenTerm]]
"""The terms of sequence i of an example, one per response token, masked ones included (and ignored)."""


def per_token(term: Callable[[float, float, float, float], TokenTerm]) -> SequenceTerms:
    """Terms of a loss whose tokens do not look at each other: `term(pi, mu, prev, advantage)`."""

    def terms(example: Example, i: int) -> list[TokenTerm]:
        rows = zip(example.learner[i], example.sampler[i], example.start[i], example.advantages[i], strict=True)
        return [term(*map(float, row)) for row in rows]

    return terms


def sequence_mask(example: Example, i: int, *, low: float, high: float, cap: float, alpha: float, beta: float) -> list[TokenTerm]:
    logs = [float(p - m) for p, m, on in zip(example.start[i], example.sampler[i], example.masks[i], strict=True) if on]
    geometric = math.exp(sum(logs) / len(logs)) if logs else 1.0
    if not alpha <= geometric <= beta:
        return [(0.0, 0.0)] * len(example.learner[i])
    return per_token(lambda pi, mu, prev, a: grpo_tis(pi, mu, prev, a, low=low, high=high, cap=cap, dual=None))(example, i)


def gspo(example: Example, i: int, *, low: float, high: float, cap: float) -> list[TokenTerm]:
    logs = [float(p - q) for p, q, on in zip(example.learner[i], example.start[i], example.masks[i], strict=True) if on]
    ratio = math.exp(sum(logs) / len(logs)) if logs else 1.0
    weights = [min(math.exp(float(p - m)), cap) for p, m in zip(example.start[i], example.sampler[i], strict=True)]
    return [(-w * ppo(ratio, float(a), low, high), w) for w, a in zip(weights, example.advantages[i], strict=True)]


def total_loss(example: Example, terms: SequenceTerms, mode: str, constant: float, kl: Callable[[float, float], float] | None = None,
               weighted: bool = True) -> float:  # fmt: skip
    """The whole update's loss. Divisors count masked tokens too."""
    num_sequences = len(example.learner)
    num_tokens = sum(row.size for row in example.learner)
    total = 0.0
    for i in range(num_sequences):
        subtotal = 0.0
        for t, (term, weight) in enumerate(terms(example, i)):
            if example.masks[i][t]:
                subtotal += term
                if kl is not None and example.reference is not None:
                    subtotal += kl(float(example.learner[i][t]), float(example.reference[i][t])) * (weight if weighted else 1.0)
        if mode == "sequence":
            total += subtotal / example.learner[i].size / num_sequences
        elif mode == "token":
            total += subtotal / num_tokens
        else:
            total += subtotal / (num_sequences * constant)
    return total


_CONSTANT = 9

_GRPO = partial(grpo_tis, low=0.2, high=0.28)
CASES: list[tuple[LossConfig, SequenceTerms]] = [
    (GrpoTis(), per_token(partial(_GRPO, cap=2.0, dual=None))),
    (GrpoTis(cap=1.1, dual_clip=1.5), per_token(partial(_GRPO, cap=1.1, dual=1.5))),
    (GrpoClip(), per_token(lambda pi, mu, _, a: grpo_clip(pi, mu, a, low=0.2, high=0.28, dual=None))),
    (GrpoClip(dual_clip=1.6), per_token(lambda pi, mu, _, a: grpo_clip(pi, mu, a, low=0.2, high=0.28, dual=1.6))),
    (Cispo(), per_token(lambda pi, mu, _, a: cispo(pi, mu, a, floor=0.0, cap=5.0))),
    (Cispo(floor=0.8, cap=1.2), per_token(lambda pi, mu, _, a: cispo(pi, mu, a, floor=0.8, cap=1.2))),
    (TokenTis(), per_token(lambda pi, mu, _, a: cispo(pi, mu, a, floor=0.0, cap=2.0))),
    (IcePop(low=0.8, high=1.3), per_token(partial(icepop, low=0.2, high=0.28, alpha=0.8, beta=1.3))),
    (SequenceMask(low=0.9, high=1.1), partial(sequence_mask, low=0.2, high=0.28, cap=2.0, alpha=0.9, beta=1.1)),
    (DecoupledPpo(reject_above=1.4, clip_high=0.1), per_token(partial(decoupled, low=0.2, high=0.1, limit=1.4))),
    (Dppo(threshold=0.02), per_token(lambda pi, mu, _, a: dppo(pi, mu, a, kind="tv", threshold=0.02, cap=20.0, penalty=1e-3))),
    (
        Dppo(divergence=Divergence.KL, threshold=0.005, cap=1.3, log_ratio_penalty=0.0),
        per_token(lambda pi, mu, _, a: dppo(pi, mu, a, kind="kl", threshold=0.005, cap=1.3, penalty=0.0)),
    ),
    (Gspo(clip_low=0.05, clip_high=0.05), partial(gspo, low=0.05, high=0.05, cap=2.0)),
]
_IDS = [f"{type(config).__name__}-{number}" for number, (config, _) in enumerate(CASES)]


def to_batch(example: Example, mode: Normalisation) -> LossInputs:
    """The example as the product sees it: flat, float64, one id per sequence."""

    def flat(rows: list[Row]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(rows))

    lengths = [row.size for row in example.learner]
    return LossInputs(
        learner=flat(example.learner).requires_grad_(),
        sampler=flat(example.sampler),
        previous=None if example.previous is None else flat(example.previous),
        reference=None if example.reference is None else flat(example.reference),
        advantages=flat(example.advantages),
        mask=torch.from_numpy(np.concatenate(example.masks)),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        sequence_lengths=torch.tensor(lengths),
        sequence_scales=torch.from_numpy(sequence_scales(np.array(lengths), mode, constant=_CONSTANT)),
    )


@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize("with_previous", [True, False])
@pytest.mark.parametrize(("config", "terms"), CASES, ids=_IDS)
def test_a_loss_equals_its_slow_twin(config: LossConfig, terms: SequenceTerms, with_previous: bool, mode: Normalisation) -> None:
    for seed in range(5):
        example = make_example(seed, with_previous=with_previous)
        outputs = build_loss(config)(to_batch(example, mode))
        assert outputs.loss.item() == pytest.approx(total_loss(example, terms, mode, _CONSTANT), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("config", "terms"), CASES, ids=_IDS)
def test_a_loss_reports_the_weight_it_gave_each_token(config: LossConfig, terms: SequenceTerms) -> None:
    example = make_example(7)
    outputs = build_loss(config)(to_batch(example, Normalisation.TOKEN))
    expected = [w if on else 0.0 for i in range(6) for (_, w), on in zip(terms(example, i), example.masks[i], strict=True)]
    assert outputs.weights.tolist() == pytest.approx(expected)
    assert outputs.sums["weight"].item() == pytest.approx(sum(expected))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("estimator", ["k3", "k2"])
@pytest.mark.parametrize("mode", Normalisation)
@pytest.mark.parametrize(("config", "terms"), CASES, ids=_IDS)
def test_the_kl_term_joins_any_loss(
    config: LossConfig, terms: SequenceTerms, mode: Normalisation, estimator: Literal["k2", "k3"], weighted: bool
) -> None:
    example = make_example(11)
    kl = ReferenceKl(coef=0.3, estimator=estimator, weighted=weighted, log_ratio_limit=0.8)
    of = {"k2": k2, "k3": k3}[estimator]
    outputs = build_loss(config, kl)(to_batch(example, mode))
    penalty: Callable[[float, float], float] = lambda pi, reference: 0.3 * of(pi, reference, 0.8)  # noqa: E731 - one expression
    assert outputs.loss.item() == pytest.approx(total_loss(example, terms, mode, _CONSTANT, penalty, weighted), rel=1e-10)
    plain = total_loss(example, terms, mode, _CONSTANT)
    assert outputs.sums["policy_loss"].item() == pytest.approx(plain)
    assert outputs.sums["kl_loss"].item() == pytest.approx(outputs.loss.item() - plain)
    rows = zip(np.concatenate(example.learner), np.concatenate(example.reference or []), np.concatenate(example.masks), strict=True)
    assert outputs.sums["reference_kl"].item() == pytest.approx(sum(of(pi, reference, 0.8) for pi, reference, on in rows if on))


@pytest.mark.parametrize("estimator", ["k3", "k2", "k1"])
@pytest.mark.parametrize(("config", "terms"), CASES, ids=_IDS)
def test_the_kl_may_be_taken_off_each_tokens_advantage(
    config: LossConfig, terms: SequenceTerms, estimator: Literal["k3", "k2", "k1"]
) -> None:
    example = make_example(11)
    kl = ReferenceKl(coef=0.3, estimator=estimator, placement="advantage", log_ratio_limit=0.8)
    of = {"k3": k3, "k2": k2, "k1": k1}[estimator]
    outputs = build_loss(config, kl)(to_batch(example, Normalisation.TOKEN))
    assert example.reference is not None
    estimates = [
        np.array([of(pi, reference, 0.8) for pi, reference in zip(*row, strict=True)])
        for row in zip(example.start, example.reference, strict=True)
    ]
    shaped = [row - 0.3 * estimate for row, estimate in zip(example.advantages, estimates, strict=True)]
    expected = total_loss(replace(example, advantages=shaped), terms, Normalisation.TOKEN, _CONSTANT)
    assert outputs.loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    assert outputs.sums["kl_loss"].item() == 0
    total = sum(float(estimate[mask].sum()) for estimate, mask in zip(estimates, example.masks, strict=True))
    assert outputs.sums["reference_kl"].item() == pytest.approx(total)


def test_k1_as_a_term_of_the_loss_is_refused() -> None:
    with pytest.raises(UserError, match="gradient of zero in the mean"):
        ReferenceKl(coef=0.1, estimator="k1")


def test_a_kl_term_without_a_reference_is_refused() -> None:
    example = make_example(1)
    batch = to_batch(replace(example, reference=None), Normalisation.TOKEN)
    with pytest.raises(ValueError, match="needs the reference's log-probabilities"):
        build_loss(GrpoTis(), ReferenceKl(coef=0.1))(batch)


def test_a_kl_coefficient_of_zero_needs_no_reference() -> None:
    example = make_example(1)
    batch = to_batch(replace(example, reference=None), Normalisation.TOKEN)
    assert build_loss(GrpoTis(), ReferenceKl())(batch).loss.item() == build_loss(GrpoTis())(batch).loss.item()
