"""The KL term to the reference policy, around any loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import Loss, LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class WithReferenceKl:
    """`inner` + coef · w · k(d), d = log(pi_ref/pi), k an estimator of KL(pi || pi_ref) a token.

    k3 = exp(d) - d - 1 (GRPO, arXiv 2402.03300, eq. 4) or k2 = d²/2 (J. Schulman, "Approximating KL divergence", 2020). Normalised as the
    loss is. w is the loss's own importance weight, or 1, as `config.weighted` says. The sum `reference_kl` is unweighted.
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
        estimate = torch.expm1(difference) - difference if self.config.estimator == "k3" else difference.square() / 2
        kl = torch.where(batch.mask, estimate, torch.zeros_like(difference))
        weighted = kl * outputs.weights if self.config.weighted else kl
        term = self.config.coef * (weighted * batch.token_scales).sum()
        sums = {**outputs.sums, "reference_kl": kl.detach().sum(), "kl_loss": term.detach()}
        return replace(outputs, loss=outputs.loss + term, sums=sums)
