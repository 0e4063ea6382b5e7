"""The baseline: one process in which the pipeline's sampler and learner take turns. No Kafka.

    python -m laboratory.colocated RUN_FILE RESULT_FILE [PARTS OF PARAMETERS' NAMES]

    sample all groups of the step ─▶ score ─▶ the learner's step ─▶ install the new weights ─▶ sample …

Engine, sampler, rewards, batch, loss, optimizer and held-out prompts are those of `echoswarm up` for the same file; only the order and the
transport differ. In sequential mode each step's samples are of the newest version. In asynchronous mode they are exactly as old as in a
pipeline whose workers are never late: at each publication the groups of all steps up to the lead are sampled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from echo_bus.clock import SystemClock
from echo_core.batch_choice import ChosenGroup, ChosenSample
from echo_core.evaluation import evaluation_seq, is_due, reward_stats
from echo_core.groups import Member, Score
from echo_learner.evaluation.requests import Planned
from echo_learner.evaluation.setup import plan_evaluations
from echo_learner.step import Stepper
from echo_learner.training.config import reward_terms, trainer_config
from echo_rollout.engines.catalogue import open_engine
from echo_rollout.engines.engine import Snapshot, SnapshotRef
from echo_rollout.generation import GroupPrompt, GroupSampler
from echo_rollout.publishing import FinishedGroup, trajectories_of
from echo_rollout.run import engine_config
from echo_rollout.snapshot_folders import snapshot_folder
from echo_schemas.columns import view_tokens
from echo_schemas.entry import parse_entry
from echo_schemas.records import Coordinates, Purpose, RolloutRequest, Trajectory, WeightKind
from echo_settings import Settings, load_settings
from echo_settings.rules import training_sampling
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.prompts import PromptCodec, vocabulary_size
from echo_tasks.requests import RequestBuilder
from echo_tasks.rewards import RewardFunction, RewardKind, sample_of
from echo_tasks.task import Task
from laboratory.matrix import Cell, as_toml
from laboratory.results import Curve, Evaluated, Result, read_result, write_result

if TYPE_CHECKING:
    from echo_learner.training.policy_model import PolicyConfig, PolicyModel

_NAME = "co-located"
_SHOWN = 3_000
# For the snapshots in use.
_ROOM_BYTES = 1 << 28
_BENCH = Path(__file__).resolve().parent.parent


def run_colocated(cell: Cell, folder: Path, patience_s: float) -> Result:
    """Run `cell` in `folder`, in a new process that has all cores. Raises RuntimeError, with the end of the output."""
    config, file = folder / "run.toml", folder / "result.json"
    config.write_text(as_toml(cell.settings), encoding="utf-8")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    path = os.pathsep.join(filter(None, (str(_BENCH), os.environ.get("PYTHONPATH", ""))))
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": str(len(cores)),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
    }
    command = [sys.executable, "-m", "laboratory.colocated", config.name, file.name, *cell.held]
    started_s = time.monotonic()
    try:
        found = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired as exc:
        message = f"{cell.name} has not ended within {patience_s:.0f} s"
        raise RuntimeError(message) from exc
    (folder / "colocated.log").write_text(found.stdout + found.stderr, encoding="utf-8")
    if found.returncode != 0:
        message = f"{cell.name} ended with {found.returncode}:\n{(found.stdout + found.stderr)[-_SHOWN:]}"
        raise RuntimeError(message)
    return replace(read_result(file), wall_s=time.monotonic() - started_s)


class CoLocated:
    """The learner and the sampler of one run. Used from one asyncio loop."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """`folder`: for snapshots."""
        from echo_learner.training.ranks import open_trainer

        base = resolve_base(settings.policy.base)
        self._settings, self._folder, self._clock = settings, folder, SystemClock()
        self._task = load_task(settings.task.name, settings.task.options)
        self._codec = PromptCodec(base)
        self._terms = reward_terms(settings)
        self._planned = plan_evaluations(settings)
        self._trainer = open_trainer(trainer_config(settings, base), settings.learner.ranks)
        self._engine = open_engine(settings.rollout.engine, engine_config(settings, base))
        self._vocabulary = vocabulary_size(base)
        self._stepper = Stepper(settings, self._trainer, self._task, self._clock, session=_NAME, version=0)
        self._slots = asyncio.Semaphore(settings.rollout.groups_in_flight)
        self._sampler = self._sampler_of(self._task)
        self._builder = self._builder_of(self._task, settings.run.seed)

    async def run(self) -> Result:
        """All steps and evaluations."""
        steps, size = self._settings.learner.steps, self._settings.learner.groups_per_step
        period, lead = self._settings.publication_period, self._settings.lead
        started_s, curve, evaluated = self._clock.monotonic_s(), Curve(), []
        sampled: deque[list[list[Member]]] = deque()
        oldest = 0
        await self._engine.start()
        await self._install(0)
        evaluated += await self._evaluations(0)
        for version in range(steps):
            self._stepper.begin()
            for step in steps_to_sample(version, len(sampled), lead=lead, period=period, last=steps):
                sampled.append(await asyncio.gather(*(self._group(step * size + index) for index in range(size))))
            groups = [chosen(version * size + index, members, version) for index, members in enumerate(sampled.popleft())]
            ages = [sample.staleness for group in groups for sample in group.samples]
            oldest = max(oldest, *ages)
            draft = self._stepper.step(groups, version, self._terms, parent=None, measured={}, costs=(), delivered={})
            if (version + 1) % period == 0 or self._due(version + 1):
                await self._install(version + 1)
            report = draft.report
            # As in the pipeline's curves: `exact`, else the weighted sum, which is the last.
            reward = next((each.mean for each in report.reward_stats if each.name == "exact"), report.reward_stats[-1].mean)
            curve.add(version + 1, self._clock.monotonic_s(), draft.num_samples, reward, fmean(ages))
            evaluated += await self._evaluations(version + 1)
        wall_s = self._clock.monotonic_s() - started_s
        facts = {"max_staleness": oldest, "dropped": 0, "bubble": None}
        return Result(outcome="finished", wall_s=wall_s, curve=curve, evaluated=evaluated, facts=facts)

    async def close(self) -> None:
        """End both."""
        self._sampler.close()
        await self._engine.close()
        self._trainer.close()

    async def _install(self, version: int) -> None:
        """Install the learner's current weights in the engine."""
        snapshot = self._trainer.snapshot(version, self._folder / str(version))
        ref = SnapshotRef(version=version, sha256=snapshot.sha256)
        await self._engine.install(Snapshot(ref=ref, kind=WeightKind(self._settings.policy.update), folder=snapshot.folder))
        for folder in self._folder.iterdir():
            if int(folder.name) not in self._engine.in_use:
                shutil.rmtree(folder)

    async def _group(self, seq: int) -> list[Member]:
        """A scored group of the run's task."""
        size, sampling = self._settings.rollout.group_size, training_sampling(self._settings.rollout)
        request = self._builder.build(seq, Purpose.TRAIN, group_size=size, sampling=sampling)
        trajectories = await self._trajectories(self._sampler, request)
        members = []
        columns = {name: await _values(function, trajectories) for name, function in _functions(tuple(self._settings.rewards))}
        for index, trajectory in enumerate(trajectories):
            scores = {name: Score(value=column[index]) for name, column in columns.items()}
            where = Coordinates(partition=0, offset=seq * len(trajectories) + index)
            members.append(Member(where=where, trajectory=trajectory, scores=scores))
        return members

    async def _evaluations(self, version: int) -> list[Evaluated]:
        return [await self._evaluation(planned, version) for planned in self._due(version)]

    def _due(self, version: int) -> list[Planned]:
        is_last = version == self._settings.learner.steps
        return [planned for planned in self._planned if is_due(planned.spec, version, is_last=is_last)]

    async def _evaluation(self, planned: Planned, version: int) -> Evaluated:
        spec, builder = planned.spec, self._builder_of(planned.task, planned.spec.seed)
        ((_, function),) = _functions((spec.pass_reward,))
        with closing(self._sampler_of(planned.task)) as sampler:

            async def answer(index: int) -> list[float]:
                request = builder.build(index, Purpose.EVAL, group_size=spec.samples, sampling=spec.sampling)
                request = replace(request, seq=evaluation_seq(version, spec.name, index), evaluation=spec.name)
                return await _values(function, await self._trajectories(sampler, request))

            by_prompt = await asyncio.gather(*map(answer, range(spec.prompts)))
        stats = reward_stats(spec.pass_reward, by_prompt)
        return Evaluated(name=spec.name, version=version, mean=stats.mean, stderr=stats.stderr)

    async def _trajectories(self, sampler: GroupSampler, request: RolloutRequest) -> list[Trajectory]:
        async with self._slots:
            started_ms = self._clock.time_ms()
            text = self._codec.render(request.messages) if request.messages else ""
            tokens = self._codec.encode(text) if request.messages else view_tokens(request.prompt_token_ids)
            prompt = GroupPrompt(
                token_ids=tokens,
                entry=parse_entry(request.entry),
                sampling=request.sampling,
                group_size=request.group_size,
                max_length=self._settings.policy.max_length,
                messages=request.messages,
            )
            samples = await sampler.sample(prompt)
        text = text or self._codec.decode(tokens)
        group = FinishedGroup(request=request, prompt=text, samples=samples, started_ms=started_ms, finished_ms=self._clock.time_ms())
        return trajectories_of(group, worker_id=_NAME, engine=self._settings.rollout.engine)

    def _sampler_of(self, task: Task) -> GroupSampler:
        return GroupSampler(
            self._engine,
            task,
            self._codec,
            vocabulary=self._vocabulary,
            on_empty=lambda: None,
            max_turn_tokens=self._settings.rollout.max_turn_tokens,
        )

    def _builder_of(self, task: Task, seed: int) -> RequestBuilder:
        return RequestBuilder(run_id=self._settings.run.name, task=task, seed=seed, prompts=self._codec)


def steps_to_sample(version: int, num_sampled: int, *, lead: int, period: int, last: int) -> range:
    """The steps whose groups are sampled before the step from `version`, for which `num_sampled` steps are ready: after a publication up to
    the lead, as `may_issue` of `echo_core.dispatch` allows it."""
    return range(version + num_sampled, min(version + lead + 1, last)) if version % period == 0 else range(0)


def chosen(seq: int, members: Sequence[Member], version: int) -> ChosenGroup:
    """A group that the step from `version` trains, whole."""
    samples = tuple(ChosenSample(member=member, staleness=version - member.trajectory.min_version) for member in members)
    return ChosenGroup(seq=seq, samples=samples, dropped={})


def _functions(names: tuple[str, ...]) -> Sequence[tuple[str, RewardFunction]]:
    return tuple((name, load_reward(name)) for name in names)


async def _values(function: RewardFunction, trajectories: Sequence[Trajectory]) -> list[float]:
    """One reward's value for each sample."""
    samples = [sample_of(trajectory) for trajectory in trajectories]
    if function.kind is RewardKind.BATCH:
        return [_plain(value) for value in function.call(samples)]
    if function.kind is RewardKind.ASYNC:
        return [_plain(value) for value in await asyncio.gather(*map(function.call, samples))]
    return [_plain(function.call(sample)) for sample in samples]


def _plain(value: Any) -> float:
    return float(getattr(value, "value", value))


def holding(load: Callable[[PolicyConfig], PolicyModel], parts: Sequence[str]) -> Callable[[PolicyConfig], PolicyModel]:
    """`load`, with a gradient of 0 for each parameter whose name has one of `parts` in it: it stays as it is."""
    import torch

    def load_and_hold(config: PolicyConfig) -> PolicyModel:
        policy = load(config)
        for name, parameter in policy.named_parameters():
            if any(part in name for part in parts):
                parameter.register_hook(torch.zeros_like)
        return policy

    return load_and_hold


async def _main(config: Path, file: Path, held: Sequence[str]) -> None:
    from echo_learner.training import policy_model, trainer

    with patch.object(trainer, "load_policy", holding(policy_model.load_policy, held)), snapshot_folder(_ROOM_BYTES) as folder:
        run = CoLocated(load_settings(config, {}), folder)
        try:
            write_result(file, await run.run(), {})
        finally:
            await run.close()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
