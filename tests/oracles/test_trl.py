"""Our losses against TRL's own GRPO loss, value and gradient: `make oracles`."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from echo_core.normalisation import Normalisation
from echo_learner.losses.config import Cispo, GrpoClip, GrpoTis, Gspo, IcePop, LossConfig, ReferenceKl
from tests.oracles.table import COLUMNS, MAX_LENGTH, ROWS, SEEDS, Table

_BETA = 0.2


def _trainer(table: Table, **settings: Any) -> SimpleNamespace:
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
        "max_completion_length": MAX_LENGTH,
    }
    entropies = torch.zeros(ROWS, COLUMNS)
    return SimpleNamespace(
        args=arguments,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (table.learner, entropies, None),
        **plain | settings,
    )


_BAND = (0.8, 1.3)


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
        (IcePop(low=_BAND[0], high=_BAND[1]), Normalisation.TOKEN, "previous", {"loss_type": "dapo", "use_vllm": True}),
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
def test_a_loss_equals_trls(config: LossConfig, mode: Normalisation, anchor: str, settings: dict[str, Any], beta: float) -> None:
    for seed in SEEDS:
        table = Table(seed)
        correction = (table.previous - table.sampler).exp()
        is_inside = (correction >= _BAND[0]) & (correction <= _BAND[1])
        inputs = {
            "prompt_ids": torch.zeros(ROWS, 1),
            "prompt_mask": torch.ones(ROWS, 1),
            "completion_ids": torch.zeros(ROWS, COLUMNS),
            "completion_mask": table.mask.to(torch.float64),
            "advantages": table.advantages,
            "num_items_in_batch": table.mask.sum(),
            "old_per_token_logps": getattr(table, anchor),
            "ref_per_token_logps": table.reference,
            # As `token_mask` and `token_truncate` make them where TRL samples.
            "importance_sampling_ratio": correction * is_inside if isinstance(config, IcePop) else correction.clamp(max=1.2),
        }
        theirs = GRPOTrainer._compute_loss(_trainer(table, beta=beta, **settings), None, inputs)
        # Theirs has no cut.
        kl = ReferenceKl(coef=beta, weighted=False, log_ratio_limit=1e9)
        table.assert_equal(table.our_loss(config, mode, kl=kl), theirs)
