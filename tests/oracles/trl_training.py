"""A whole training of TRL's GRPOTrainer beside our co-located baseline: the same base, prompts, rewards, loss and optimizer.

PYTHONPATH=bench .venv-oracles/bin/python -m tests.oracles.trl_training [--steps 40] [--seeds 3] [--groups 16] [--updates 1] [--picture F]

ours   `laboratory.colocated`: our sampler, rewards, advantages, loss and DeepSpeed, in one process
fed    TRL's trainer, which gets our completions and our rewards: what it does with them is its own. Compared by weights, step by step;
       beside it the same from weights that rounding could have made, which says how far a training carries such a difference
own    TRL's trainer, which samples for itself: another stream of random numbers, so compared by curves over seeds
whole  the same with several updates a step, where TRL deals whole groups to them, as we do, and not samples by chance
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset
from laboratory.colocated import CoLocated, chosen
from laboratory.matrix import Cell, Choice, load_cells
from safetensors.numpy import load_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from echo_core.batch_choice import ChosenGroup
from echo_core.groups import Member
from echo_schemas.columns import view_tokens
from echo_schemas.entry import parse_entry
from echo_schemas.records import FinishReason, Purpose
from echo_settings import Settings
from echo_settings.rules import training_sampling
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.prompts import PromptCodec
from echo_tasks.requests import RequestBuilder
from echo_tasks.rewards import ScoredSample

_MATRIX = Path(__file__).parents[2] / "bench" / "laboratory" / "matrix.toml"
_FIRST_TEN, _LAST_TEN = slice(10), slice(-10, None)
# Of a weight: the last bit of a float32.
_NUDGE = 2.0**-23
_OURS, _TRL, _WHOLE, _BY_SAMPLES = "ours", "TRL", "TRL with whole groups", "ours by samples"

Weights = Mapping[str, npt.NDArray[np.float32]]


@dataclass(slots=True)
class Trained:
    """One training. `rewards`: the mean of each step's batch; `weights`: of version 0 and after each step; `groups`: what was trained on,
    by seq, where it is known."""

    rewards: list[float] = field(default_factory=list)
    weights: list[Weights] = field(default_factory=list)
    groups: dict[int, ChosenGroup] = field(default_factory=dict)


def settings_of(seed: int, steps: int, **learner: Any) -> Settings:
    """Of the cell `as-trl`, which says in our words what `train_trl` says in TRL's; `learner`: changes of its section."""
    choice = Choice(seeds=seed + 1, steps=steps, engine="transformers")
    cell: Cell = load_cells(_MATRIX, "trl", choice)[-1]
    return Settings.model_validate({**cell.settings, "eval": [], "learner": {**cell.settings["learner"], **learner}})


class _Observed(CoLocated):
    """The baseline, and what it trained on and published."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.trained = Trained()

    async def _group(self, seq: int) -> list[Member]:
        members = await super()._group(seq)
        self.trained.groups[seq] = chosen(seq, members, members[0].trajectory.min_version)
        return members

    async def _install(self, version: int) -> None:
        await super()._install(version)
        self.trained.weights.append(load_file(self._folder / str(version) / "model.safetensors"))


def train_ours(settings: Settings) -> Trained:
    """The co-located baseline, in a process of its own: DeepSpeed starts once in one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process, tempfile.TemporaryDirectory() as folder:
        return process.submit(_run_ours, settings, Path(folder)).result()


def _run_ours(settings: Settings, folder: Path) -> Trained:
    async def run() -> Trained:
        baseline = _Observed(settings, folder)
        try:
            baseline.trained.rewards = (await baseline.run()).curve.reward
        finally:
            await baseline.close()
        return baseline.trained

    return asyncio.run(run())


def train_trl(settings: Settings, *, fed: Trained | None = None, in_order: bool = False, is_nudged: bool = False) -> Trained:
    """TRL's trainer as `settings` say. `fed`: a training whose completions and rewards it gets, in the same order. `in_order`: its updates
    get whole groups, as ours do. `is_nudged`: it begins with weights of which each is changed in its last bit, up or down."""
    learner, size = settings.learner, settings.rollout.group_size
    found, base = Trained(), resolve_base(settings.policy.base)
    observer = _Observer(found, learner.updates_per_step)
    scorer = _Scorer(settings, found)
    with tempfile.TemporaryDirectory() as folder, _in_order(is_wanted=in_order or fed is not None):
        trainer: Any = GRPOTrainer(
            model=str(base),
            reward_funcs=scorer,
            args=GRPOConfig(
                output_dir=folder,
                model_init_kwargs={"dtype": "float32"},
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                seed=settings.run.seed,
                max_steps=learner.steps * learner.updates_per_step,
                per_device_train_batch_size=learner.groups_per_step * size // learner.updates_per_step,
                gradient_accumulation_steps=1,
                steps_per_generation=learner.updates_per_step,
                shuffle_dataset=False,
                num_generations=size,
                max_completion_length=settings.rollout.max_new_tokens,
                temperature=settings.rollout.temperature,
                learning_rate=learner.lr,
                lr_scheduler_type="constant",
                weight_decay=learner.weight_decay,
                max_grad_norm=learner.max_grad_norm,
                optim="adamw_torch",
                beta=0.0,
                epsilon=0.2,
                epsilon_high=0.28,
                loss_type="grpo",
                scale_rewards="group" if learner.scale_by_std else "none",
            ),
            train_dataset=Dataset.from_list(scorer.prompts()),
            callbacks=[observer],
            rollout_func=None if fed is None else _Feeder(fed, learner.groups_per_step),
        )
        if is_nudged:
            _nudge(trainer.model)
        observer.keep(trainer.model)
        trainer.train()
    return found


def _nudge(model: Any) -> None:
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=dice) * 2 - 1
            parameter.mul_(1 + signs * _NUDGE)


class _Observer(TrainerCallback):  # type: ignore[misc]
    """Keeps the weights after each step, which is `num_updates` of TRL's."""

    def __init__(self, found: Trained, num_updates: int) -> None:
        self._found = found
        self._num_updates = num_updates

    def keep(self, model: Any) -> None:
        """The weights of now."""
        self._found.weights.append({name: tensor.numpy(force=True).copy() for name, tensor in model.state_dict().items()})

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step % self._num_updates == 0:
            self.keep(given["model"])


class _Feeder:
    """Gives TRL the completions of another training, step after step."""

    def __init__(self, fed: Trained, groups_per_step: int) -> None:
        self._groups = iter(group for _, group in sorted(fed.groups.items()))
        self._groups_per_step = groups_per_step

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, list[Any]]:
        members = [sample.member for _ in range(self._groups_per_step) for sample in next(self._groups).samples]
        starts = [member.trajectory.generated[0].start for member in members]
        tokens = [member.trajectory.tokens.tolist() for member in members]
        assert [member.trajectory.prompt for member in members] == list(prompts)
        return {
            "prompt_ids": [ids[:start] for ids, start in zip(tokens, starts, strict=True)],
            "completion_ids": [ids[start:] for ids, start in zip(tokens, starts, strict=True)],
            "logprobs": [member.trajectory.logprob_values.tolist() for member in members],
            "given": [member.scores["exact"].value for member in members],
        }


class _Scorer:
    """The run's prompts as TRL's rows, and the run's reward as TRL's function."""

    def __init__(self, settings: Settings, found: Trained) -> None:
        self.__name__ = "exact"
        self._settings = settings
        self._found = found
        (self._reward,) = map(load_reward, settings.rewards)

    def prompts(self) -> list[dict[str, str]]:
        """In the order of seqs: those that the co-located run asks."""
        settings = self._settings
        codec, task = PromptCodec(resolve_base(settings.policy.base)), load_task(settings.task.name, settings.task.options)
        builder = RequestBuilder(run_id=settings.run.name, task=task, seed=settings.run.seed, prompts=codec)
        sampling = training_sampling(settings.rollout)
        seqs = range(settings.learner.steps * settings.learner.groups_per_step)
        asked = [builder.build(seq, Purpose.TRAIN, group_size=1, sampling=sampling) for seq in seqs]
        return [{"prompt": codec.decode(view_tokens(each.prompt_token_ids)), "entry": each.entry} for each in asked]

    def __call__(self, prompts: Sequence[str], completions: Sequence[str], entry: Sequence[str], **given: Any) -> list[float]:
        samples = [
            ScoredSample(
                prompt=prompt,
                completion=completion,
                entry=parse_entry(about),
                token_ids=np.zeros(0, np.int32),
                num_generated=0,
                turn_rewards=(),
                finish_reason=FinishReason.STOP,
                metadata={},
                task=self._settings.task.name,
            )
            for prompt, completion, about in zip(prompts, completions, entry, strict=True)
        ]
        values = [float(self._reward.call(sample)) for sample in samples]
        # What was fed says what our own reward made of the same.
        assert values == list(given.get("given", values))
        self._found.rewards.append(statistics.fmean(values))
        return values


@contextmanager
def _in_order(*, is_wanted: bool) -> Iterator[None]:
    """TRL deals a step's samples to its updates by chance. In order it deals whole groups, oldest first, as we do."""
    if not is_wanted:
        yield
        return
    with mock.patch("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch):
        yield


def moved(weights: Sequence[Weights], version: int) -> float:
    """How far the weights have come from version 0: the norm of the difference."""
    return _distance(weights[version], weights[0])


def apart(ours: Sequence[Weights], theirs: Sequence[Weights], version: int) -> float:
    """How far both are apart, as a share of how far ours have come."""
    return _distance(ours[version], theirs[version]) / moved(ours, version)


def _distance(one: Weights, other: Weights) -> float:
    return float(sum(np.square(array.astype(np.float64) - other[name]).sum() for name, array in one.items()) ** 0.5)


def main() -> int:
    """Train, print tables, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=16, help="prompts a step, of 8 samples each")
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates a step")
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    # With one update a step there is nothing to deal by chance: whose sampler it was is all that differs.
    arms = (_OURS, _TRL, *((_WHOLE, _BY_SAMPLES) if arguments.updates > 1 else ()))
    curves: dict[str, list[list[float]]] = {arm: [] for arm in arms}
    distances: list[tuple[list[float], list[float]]] = []
    for seed in range(arguments.seeds):
        learner = {"groups_per_step": arguments.groups, "updates_per_step": arguments.updates}
        settings = settings_of(seed, arguments.steps, **learner)
        ours = train_ours(settings)
        fed = train_trl(settings, fed=ours)
        curves[_OURS].append(ours.rewards)
        curves[_TRL].append(train_trl(settings).rewards)
        if _WHOLE in curves:
            curves[_WHOLE].append(train_trl(settings, in_order=True).rewards)
            curves[_BY_SAMPLES].append(train_ours(settings_of(seed, arguments.steps, **learner, split="samples")).rewards)
        nudged = train_trl(settings, fed=ours, is_nudged=True)
        versions = range(1, arguments.steps + 1)
        gaps, twins = ([apart(one.weights, fed.weights, version) for version in versions] for one in (ours, nudged))
        distances.append((gaps, twins))
        sys.stdout.write(f"{table(curves, distances)}\n")
        sys.stdout.flush()
        if arguments.picture is not None:
            draw(curves, distances, arguments.picture)
    return 0


def table(curves: Mapping[str, Sequence[Sequence[float]]], distances: Sequence[tuple[Sequence[float], Sequence[float]]]) -> str:
    """What stands in docs/learning.md."""
    names = ", ".join(curves)
    rows = [
        f"| seed | first ten steps: {names} | last ten: {names} | fed the same, weights apart: after 1 step, in the end | TRL, its twin |",
        "|---|---|---|---|---|",
    ]
    for seed, ((gaps, twins), *rewards) in enumerate(zip(distances, *curves.values(), strict=True)):
        first, last = (", ".join(f"{statistics.fmean(each[part]):.3f}" for each in rewards) for part in (_FIRST_TEN, _LAST_TEN))
        rows.append(f"| {seed} | {first} | {last} | {gaps[0]:.1e}, {gaps[-1]:.1e} | {twins[0]:.1e}, {twins[-1]:.1e} |")
    for one, other in itertools.combinations(list(curves)[::-1], 2):
        for steps, part in (("all", slice(None)), ("the last ten", _LAST_TEN)):
            pairs = zip(curves[one], curves[other], strict=True)
            gaps = [statistics.fmean(mine[part]) - statistics.fmean(theirs[part]) for mine, theirs in pairs]
            error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
            rows.append(f"\n{one} less {other}, {steps} steps: {statistics.fmean(gaps):+.4f} ± {error:.4f} ({len(gaps)} pairs)")
    return "\n".join(rows) + "\n"


def draw(
    curves: Mapping[str, Sequence[Sequence[float]]], distances: Sequence[tuple[Sequence[float], Sequence[float]]], picture: Path
) -> None:
    """Reward by step, each seed a thin line and the mean a thick one; and how far the weights are apart where TRL is fed."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    page, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for colour, (name, seeds) in enumerate(curves.items()):
        steps = range(1, len(seeds[0]) + 1)
        for seed in seeds:
            left.plot(steps, seed, color=f"C{colour}", linewidth=0.6, alpha=0.5)
        left.plot(steps, np.mean(seeds, axis=0), color=f"C{colour}", linewidth=2, label=f"{name} ({len(seeds)} seeds)")
    left.set(xlabel="step", ylabel="reward of the batch")
    left.legend()
    for number, (gaps, twins) in enumerate(distances):
        right.semilogy(range(1, len(gaps) + 1), gaps, color=f"C{number}", label=f"seed {number}")
        right.semilogy(range(1, len(twins) + 1), twins, color=f"C{number}", linestyle=":", label=f"seed {number}, TRL and its twin")
    right.set(xlabel="step", ylabel="fed the same: weights apart / way they came")
    right.legend()
    for axis in (left, right):
        axis.grid(alpha=0.3)
    page.tight_layout()
    page.savefig(picture, dpi=80)
    plt.close(page)


if __name__ == "__main__":
    sys.exit(main())
