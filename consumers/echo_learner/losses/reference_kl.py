"""The KL term to the reference policy, around any loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import Loss, LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class WithReferenceKl:
    """`inner` + coef · w · (exp(d) - d - 1), d = log(pi_ref/pi): the k3 estimator of KL(pi || pi_ref).

    GRPO (arXiv 2402.03300, eq. 4). Normalised as the loss is. w is the loss's own importance weight, or 1, as
    `config.weighted` says. The sum `reference_kl` is unweighted.
    """

    inner: Loss
    config: ReferenceKl

    def __call__(self, batch: LossInputs, /) -> LossOutputs:
        """Raises ValueError when the batch has no log-probabilities of the reference."""
        if batch.reference is None:
            raise ValueError("The KL term needs the reference's log-probabilities: compute them for every micro-batch.")
        outputs = self.inner(batch)
        limit = self.config.log_ratio_limit
        difference = (batch.reference - batch.learner).clamp(-limit, limit)
        k3 = torch.where(batch.mask, torch.expm1(difference) - difference, torch.zeros_like(difference))
        weighted = k3 * outputs.weights if self.config.weighted else k3
        term = self.config.coef * (weighted * batch.token_scales).sum()
        sums = {**outputs.sums, "reference_kl": k3.detach().sum(), "kl_loss": term.detach()}
        return replace(outputs, loss=outputs.loss + term, sums=sums)
