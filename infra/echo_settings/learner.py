"""[learner], [staleness], [checkpoint]: how the policy is updated, on which samples, and where its steps are saved."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from echo_settings.section import Section


class LearnerSettings(Section):
    """[learner]: how the policy is updated."""

    groups_per_step: int = Field(default=32, ge=1)
    """Prompts per training step."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates per training step; the step's samples are split among them."""
    split: Literal["groups", "samples"] = "groups"
    """What an update gets: whole groups, as in ECHO-2, or some samples of every group, which helps where an update has few groups."""
    loss: str = "grpo_tis"
    """A built-in loss, or `package.module:attribute`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """The loss's own numbers, as [learner.loss_options]."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the KL term to the starting policy."""
    kl_in: Literal["loss", "advantage"] = "loss"
    """Where the KL term stands: a term of the loss, or taken off each token's advantage, which the loss then weights and clips."""
    kl_estimator: Literal["k3", "k2", "k1"] = "k3"
    """A token's KL term, with d = log(pi_ref / pi): k3 = exp(d) - d - 1, as GRPO has it; k2 = d² / 2, whose gradient is the KL's own where
    the policy trains on its own samples; k1 = -d, in the advantage alone: as a loss its gradient is zero in the mean."""
    kl_weighted: bool = True
    """In the loss: weigh a token's KL term as the loss weighs the token (ECHO-2, eq. 24 and 25); false: the plain term of GRPO."""
    kl_log_ratio_limit: float = Field(default=5.0, gt=0)
    """d is cut at plus and minus so many nats: one token that the policy gave up does not outweigh all others."""
    normalisation: Literal["sequence", "token", "constant"] = "token"
    """What a token's loss is divided by: its sequence's length, all tokens of the update, or `max_new_tokens`."""
    scale_by_std: bool = True
    """Divide advantages by the group's standard deviation."""
    std: Literal["population", "sample"] = "population"
    """The standard deviation of the group's rewards: divided by n, or by n - 1 as in TRL and verl (advantages 6.5 % smaller at 8
    samples)."""
    lr: float = Field(default=1.5e-3, gt=0)
    """Learning rate."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the rate rises linearly from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens in one forward pass, at most; a longer sample goes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    logprob_tolerance: float | None = Field(default=None, gt=0)
    """Mean difference of log-probabilities a token, in nats, up to which a worker is believed to serve the version that it claims; none:
    0.002 in float32, 0.1 in bfloat16."""
    ranks: int = Field(default=1, ge=1)
    """Processes that train together on this machine."""
    deepspeed: str = ""
    """A DeepSpeed JSON file that is merged over the project's own settings (ZeRO stage, offload, precision)."""
    buffer_mb: int = Field(default=2048, ge=1)
    """Most MiB of samples in memory that wait to be trained; the others stay in the log. One whole batch is always read."""
    steps: int = Field(default=100, ge=0)
    """Training steps; 0: until stopped."""
    price_per_hour: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """What the learner's machines cost together, in the currency of the workers' prices."""


class StalenessSettings(Section):
    """[staleness]: how old a sample may be, and what happens to older ones."""

    budget: int = Field(default=3, ge=0)
    """S: a sample is trained only if 0 ≤ learner version − its oldest version ≤ S."""
    publication_period: int | None = Field(default=None, ge=1)
    """kappa: a snapshot is published every kappa steps; none: max(1, S − 1), and 1 in sequential mode."""
    admission: Literal["free", "pace"] = "pace"
    """`pace` issues no more prompts than the budget can absorb; `free` issues as fast as workers take them."""
    lead: int | None = Field(default=None, ge=0)
    """Under `pace`: how many steps' prompts are under way beyond the current one; none: the budget. Less keeps the samples of fast workers
    younger, and the budget then only covers what comes late; at least publication_period - 1."""
    over_budget: Literal["drop", "withhold", "downweight"] = "drop"
    """The treatment of a sample above the budget."""
    min_group_size: int = Field(default=2, ge=1)
    """A group that keeps fewer samples than this is dropped whole."""


class CheckpointSettings(Section):
    """[checkpoint]: where the learner saves its steps."""

    folder: str = "runs/demo"
    """A folder on a disk that survives the process."""
    every: int = Field(default=1, ge=1)
    """Steps between checkpoints; divides the publication period."""
    keep: int = Field(default=3, ge=2)
    """Checkpoints kept besides those that the log still needs."""
