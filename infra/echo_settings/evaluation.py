"""[[eval]]: the only section that a file may hold several times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, model_validator

from echo_core.evaluation import LEAST_DISTANCE, MOST_PROMPTS, MOST_SEED, held_out_seed, name_code
from echo_settings.section import PartOfKey, Section

# As in [rollout]: engines treat smaller ones as 0, which is allowed here.
_LEAST_TEMPERATURE = 0.01


class EvalSettings(Section):
    """[[eval]]: an evaluation on held-out prompts; a file may have several. Its samples are never trained."""

    name: PartOfKey = "held-out"
    """Names its results; letters, digits, '.', '_' and '-'."""
    task: str = ""
    """A task as in [task] name; empty: the run's own, with the run's options unless `options` are given."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The task's arguments. For a task over a fixed set of records name other records here, or its prompts are not held out."""
    rewards: tuple[str, ...] = ()
    """Rewards that judge its samples; none: those of [rewards]."""
    prompts: int = Field(default=64, ge=2, le=MOST_PROMPTS)
    """Prompts; the same for every version. The standard error is over prompts, so one alone says nothing."""
    samples: int = Field(default=1, ge=1)
    """Samples of each prompt."""
    pass_at: tuple[int, ...] = (1,)
    """Every k for which pass@k is estimated, each at most `samples`; an empty list: none."""
    pass_reward: str = ""
    """The reward that says whether a sample is right; empty: the first one."""
    pass_from: float = 1.0
    """A sample is right from this value of it on."""
    temperature: float = Field(default=1.0, ge=0)
    """Softmax temperature; 0: the most likely token each time."""
    max_new_tokens: int | None = Field(default=None, ge=1)
    """Most tokens generated for one sample; none: as in [rollout]."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus mass. Nothing of this is trained, so the distribution may be cut."""
    top_k: int = Field(default=0, ge=0)
    """Most likely tokens kept; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Tokens below this fraction of the most likely one are cut."""
    stop: tuple[str, ...] | None = None
    """Texts that end an answer; none: as in [rollout]."""
    seed: int = Field(default=0, ge=0, le=MOST_SEED)
    """Another one gives other held-out prompts. They are apart from every prompt that is trained on, and the same in all runs."""
    every: int = Field(default=10, ge=0)
    """Versions between evaluations, a multiple of the publication period; 0: none between start and end."""
    at_start: bool = True
    """Evaluate version 0, before the first step."""
    at_end: bool = True
    """Evaluate the last version."""
    patience_s: float = Field(default=120.0, gt=0)
    """Seconds without a new answer after which missing prompts are asked once more, and then left out."""

    @model_validator(mode="after")
    def _numbers_agree(self) -> EvalSettings:
        too_many = [k for k in self.pass_at if not 1 <= k <= self.samples]
        if too_many:
            raise ValueError(
                f"pass_at = {list(self.pass_at)} asks for pass@{too_many[0]} of {self.samples} samples; write samples = "
                f"{max(self.pass_at)}, or k from 1 to {self.samples}"
            )
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(f"samples = {self.samples} at temperature 0 are {self.samples} times the same answer; write samples = 1")
        if 0 < self.temperature < _LEAST_TEMPERATURE:
            raise ValueError(f"temperature = {self.temperature:g} is below {_LEAST_TEMPERATURE}, which engines do not tell from 0; write 0")
        if self.pass_reward and self.rewards and self.pass_reward not in self.rewards:
            raise ValueError(f"pass_reward = {self.pass_reward!r} is not one of its rewards: {', '.join(self.rewards)}")
        return self


def check_evaluations(sections: Sequence[EvalSettings], *, run_seed: int, kappa: int, max_length: int, rewards: Sequence[str]) -> None:
    """Raise ValueError, with what to write instead, if evaluations do not fit the run or one another."""
    known: dict[int, str] = {}
    for section in sections:
        name, other = section.name, known.get(name_code(section.name))
        if other == name:
            raise ValueError(f"[[eval]] has two sections named {name!r}; give one another name")
        if other is not None:
            raise ValueError(f"[[eval]] {name!r} and {other!r} would number their requests alike; give one another name")
        known[name_code(name)] = name
        if section.every % kappa:
            raise ValueError(
                f"[[eval]] {name!r}: every = {section.every} is not a multiple of the publication period {kappa}, and only published "
                f"versions can be evaluated; write every = {-(-section.every // kappa) * kappa}"
            )
        distance = held_out_seed(section.seed) - run_seed
        if abs(distance) < LEAST_DISTANCE:
            raise ValueError(
                f"[run] seed = {run_seed} is so near the seeds of evaluations that training could meet held-out prompts; write one from 0 "
                f"to {LEAST_DISTANCE:,}"
            )
        if section.max_new_tokens is not None and section.max_new_tokens >= max_length:
            raise ValueError(
                f"[[eval]] {name!r}: max_new_tokens = {section.max_new_tokens} leaves no room for a prompt within [policy] max_length = "
                f"{max_length}"
            )
        judges = section.rewards or tuple(rewards)
        if not judges:
            raise ValueError(f"[[eval]] {name!r} has no reward to judge its samples; name one in rewards, or in [rewards]")
        if section.pass_reward and section.pass_reward not in judges:
            raise ValueError(f"[[eval]] {name!r}: pass_reward = {section.pass_reward!r} is not one of its rewards: {', '.join(judges)}")
