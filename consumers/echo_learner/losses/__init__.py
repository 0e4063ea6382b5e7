"""Policy losses: small pure functions over flat token tensors, chosen by name.

    config.py       the options: one frozen dataclass per loss, its defaults and their sources (no torch)
    catalogue.py    name -> checked config -> Loss (torch is imported with the loss, not before)
    interface.py    LossInputs, LossOutputs, the Loss protocol
    ratios.py       functions that the losses share: bounded ratios, the clipped surrogate, sequence means
    functions.py    the losses, a function each
    reference_kl.py the KL term to the reference, around any loss
    custom.py       a user's own loss, by import path
    token_sums.py   measurements of every micro-batch, the same for all losses

pi is the learner now, pi_prev the learner at the start of the step, mu the sampler, A the advantage; sg() stops the gradient. Every token's
term is scaled by `echo_core.normalisation`, from *unfiltered* counts: a loss that rejects tokens does not make the others louder.
"""
