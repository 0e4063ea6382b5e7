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
    """The optimizer's updates (`updates_per_step` in each step) over which the rate rises linearly from 0."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate goes on after that: it stays, or it falls to `min_lr`, linearly or along half a cosine."""
    decay_steps: int | None = Field(default=None, ge=1)
    """The optimizer's updates, those of the warm-up included, after which a falling rate has reached `min_lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """The rate from then on."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Padded tokens in one forward pass, at most; a longer sample goes alone."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    compile: bool = False
    """Compile the model's layers at the first step: it takes a minute longer, and the others 0.6 to 0.8 of their time on a GPU. Needs gcc
    (on a CPU g++); not under ZeRO-3, and not with replay_experts."""
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


def check_rate(learner: LearnerSettings) -> None:
    """Raise ValueError, with what to write instead, if the learning rate's schedule is incomplete, or has no rate for the last steps."""
    updates = learner.steps * learner.updates_per_step
    until = f"decay_steps = {updates}, steps times updates_per_step" if updates else "decay_steps"
    if learner.lr_schedule == "constant":
        for name in ("decay_steps", "min_lr"):
            if name in learner.model_fields_set:
                raise ValueError(f'[learner] {name} says how a falling rate ends; write lr_schedule = "linear" or "cosine" with it')
        return
    if learner.decay_steps is None:
        raise ValueError(f'[learner] lr_schedule = "{learner.lr_schedule}" has no end; write {until}')
    if learner.decay_steps <= learner.warmup_steps:
        less = f"warmup_steps below {updates}, all updates of the run" if 0 < updates <= learner.warmup_steps else until
        raise ValueError(
            f"[learner] decay_steps = {learner.decay_steps} counts the warm-up too, and is not above warmup_steps = "
            f"{learner.warmup_steps}; write {less}"
        )
    if learner.min_lr > learner.lr:
        raise ValueError(f"[learner] min_lr = {learner.min_lr:g} is above lr = {learner.lr:g}; a rate falls to min_lr")
    if learner.min_lr == 0 and not 0 < updates <= learner.decay_steps:
        raise ValueError(
            f"[learner] decay_steps = {learner.decay_steps} ends before the run ({updates or 'any number of'} updates), and the rate would "
            f"be 0 from there on; write {until if updates else 'a min_lr above 0'}"
        )


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
