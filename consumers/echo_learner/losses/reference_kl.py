"""The KL term to the reference policy, around any loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echo_learner.losses.config import ReferenceKl
from echo_learner.losses.interface import Loss, LossInputs, LossOutputs


@dataclass(frozen=True, slots=True)
class WithReferenceKl:
    """`inner` and KL(pi || pi_ref), estimated a token from d = log(pi_ref/pi).

    k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1 (GRPO, arXiv 2402.03300, eq. 4; J. Schulman, "Approximating KL divergence", 2020).

    In the loss: + coef · w · k(d), normalised as the loss is; w is the loss's own importance weight, or 1, as `config.weighted` says.
    In the advantage: A - coef · k(d) at the start of the step, without gradient: an additional reward of the token, which the loss weights
    and clips with the rest. The sum `reference_kl` is unweighted in both; `kl_loss` is the term added to the loss.
    """

    inner: Loss
    config: ReferenceKl

    def __call__(self, batch: LossInputs, /) -> LossOutputs:
        """Raises ValueError when the batch has no log-probabilities of the reference."""
        if batch.reference is None:
            raise ValueError("The KL term needs the reference's log-probabilities: compute them for every micro-batch.")
        if self.config.placement == "advantage":
            kl = self._estimate(batch, batch.start_of_step)
            outputs = self.inner(replace(batch, advantages=batch.advantages - self.config.coef * kl))
            return replace(outputs, sums={**outputs.sums, "reference_kl": kl.sum(), "kl_loss": kl.new_zeros(())})
        outputs = self.inner(batch)
        kl = self._estimate(batch, batch.learner)
        weighted = kl * outputs.weights if self.config.weighted else kl
        term = self.config.coef * (weighted * batch.token_scales).sum()
        sums = {**outputs.sums, "reference_kl": kl.detach().sum(), "kl_loss": term.detach()}
        return replace(outputs, loss=outputs.loss + term, sums=sums)

    def _estimate(self, batch: LossInputs, policy: Tensor) -> Tensor:
        """k(d) of each token, [T]; 0 where it is masked."""
        assert batch.reference is not None
        limit = self.config.log_ratio_limit
        difference = (batch.reference - policy).clamp(-limit, limit)
        match self.config.estimator:
            case "k1":
                estimate = -difference
            case "k2":
                estimate = difference.square() / 2
            case "k3":
                estimate = torch.expm1(difference) - difference
        return torch.where(batch.mask, estimate, torch.zeros_like(difference))
