"""Our losses against TRL's own GRPO loss, value and gradient. TRL is installed by nobody but whoever wants to run this comparison."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the losses are torch code: install the extra 'learner'")

import torch
from torch import Tensor

from echo_core.normalisation import Normalisation, sequence_scales
from echo_learner.losses.catalogue import build_loss
from echo_learner.losses.config import Cispo, GrpoClip, GrpoTis, Gspo, LossConfig, ReferenceKl
from echo_learner.losses.interface import LossInputs

_ROWS, _COLUMNS, _MAX_LENGTH = 4, 6, 16
_BETA = 0.2

TrlLoss = Callable[[Any, None, dict[str, Tensor]], Tensor]


@pytest.fixture(scope="module")
def trl_loss() -> TrlLoss:
    """`GRPOTrainer._compute_loss`, which reads what it needs from its first argument."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed: no oracle", exc_type=ImportError)
    loss: TrlLoss = module.GRPOTrainer._compute_loss
    return loss


class _Table:
    """Log-probabilities as TRL holds them: rows of right-padded answers, [rows, columns]."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(_ROWS, _COLUMNS, generator=generator, dtype=torch.float64)

        self.sampler = -0.1 - normal(1.5).abs()
        self.previous = self.sampler + normal(0.4)
        self.learner = (self.previous + normal(0.3)).requires_grad_()
        self.reference = self.learner.detach() + normal(0.5)
        self.advantages = torch.randn(_ROWS, generator=generator, dtype=torch.float64)
        self.mask = torch.arange(_COLUMNS) < torch.tensor([6, 2, 4, 1]).unsqueeze(1)


def _trainer(table: _Table, **settings: Any) -> SimpleNamespace:
    """The attributes of a GRPOTrainer on one process without gradient accumulation."""
    arguments = SimpleNamespace(delta=settings.pop("delta", None), use_bias_correction_kl=False, steps_per_generation=1)
    accelerator = SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x)
    plain = {
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.28,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "_entropy_bonus_enabled": False,
        "current_gradient_accumulation_steps": 1,
        "max_completion_length": _MAX_LENGTH,
    }
    entropies = torch.zeros(_ROWS, _COLUMNS)
    return SimpleNamespace(
        args=arguments,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (table.learner, entropies, None),
        **plain | settings,
    )


def _ours(table: _Table, mode: Normalisation, config: LossConfig, kl: ReferenceKl, previous: Tensor | None) -> Tensor:
    lengths = table.mask.sum(dim=1)
    keep = table.mask
    batch = LossInputs(
        learner=table.learner[keep],
        sampler=table.sampler[keep],
        previous=None if previous is None else previous[keep],
        reference=table.reference[keep],
        advantages=table.advantages.unsqueeze(1).expand(_ROWS, _COLUMNS)[keep],
        mask=torch.ones(int(lengths.sum()), dtype=torch.bool),
        sequence_ids=torch.repeat_interleave(torch.arange(_ROWS), lengths),
        sequence_lengths=lengths,
        sequence_scales=torch.from_numpy(sequence_scales(lengths.numpy(), mode, constant=_MAX_LENGTH)),
    )
    return build_loss(config, kl)(batch).loss


@pytest.mark.parametrize("beta", [0.0, _BETA])
@pytest.mark.parametrize(
    ("config", "mode", "anchor", "settings"),
    [
        (GrpoClip(), Normalisation.TOKEN, "sampler", {"loss_type": "dapo"}),
        (GrpoClip(), Normalisation.SEQUENCE, "sampler", {"loss_type": "grpo"}),
        (GrpoClip(), Normalisation.CONSTANT, "sampler", {"loss_type": "dr_grpo"}),
        (GrpoClip(dual_clip=1.5), Normalisation.TOKEN, "sampler", {"loss_type": "dapo", "delta": 1.5}),
        (GrpoTis(cap=1.2), Normalisation.TOKEN, "previous", {"loss_type": "dapo", "use_vllm": True}),
        (GrpoTis(cap=1.2), Normalisation.SEQUENCE, "previous", {"loss_type": "grpo", "use_vllm": True}),
        (Cispo(cap=1.2), Normalisation.TOKEN, "sampler", {"loss_type": "cispo", "epsilon_high": 1.2}),
        (
            Gspo(clip_low=0.05, clip_high=0.06, cap=1.2),
            Normalisation.SEQUENCE,
            "previous",
            {"loss_type": "grpo", "use_vllm": True, "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.06},
        ),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_loss_equals_trls(
    trl_loss: TrlLoss, config: LossConfig, mode: Normalisation, anchor: str, settings: dict[str, Any], beta: float
) -> None:
    for seed in range(3):
        table = _Table(seed)
        inputs = {
            "prompt_ids": torch.zeros(_ROWS, 1),
            "prompt_mask": torch.ones(_ROWS, 1),
            "completion_ids": torch.zeros(_ROWS, _COLUMNS),
            "completion_mask": table.mask.to(torch.float64),
            "advantages": table.advantages,
            "num_items_in_batch": table.mask.sum(),
            "old_per_token_logps": getattr(table, anchor),
            "ref_per_token_logps": table.reference,
            "importance_sampling_ratio": (table.previous - table.sampler).exp().clamp(max=1.2),
        }
        theirs = trl_loss(_trainer(table, beta=beta, **settings), None, inputs)
        ours = _ours(table, mode, config, ReferenceKl(coef=beta, weighted=False), table.previous)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        gradients = [torch.autograd.grad(loss, table.learner)[0] for loss in (ours, theirs)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)
