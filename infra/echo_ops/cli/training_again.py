"""The work of `echoswarm retrain`, from the plan to the comparison. Its imports take seconds, so the options are read before."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from echo_bus.bus import Bus
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.snapshot import file_names, read_snapshot
from echo_learner.evaluation.setup import plan_evaluations, plan_section
from echo_learner.start.fork import fetch_snapshot
from echo_learner.training.config import trainer_config
from echo_learner.training.ranks import open_trainer
from echo_ops.cli.options import RetrainOptions
from echo_ops.cli.output import out
from echo_ops.cli.retrain_output import line_of, measured_lines, other_line
from echo_ops.rewards.weights import listed
from echo_replay.batches import OtherRewards
from echo_replay.history import History
from echo_replay.retrain import Match, Plan, RetrainedVersion, RetrainParts, TrainingLog, plan_retraining, retrain
from echo_replay.weight_distance import weight_cosine, weight_distance
from echo_replay.what_if import Measured, ModelLimits, measure, read_other_rewards
from echo_rollout.engines.catalogue import open_engine
from echo_rollout.run import engine_config
from echo_schemas.errors import UserError
from echo_schemas.records import RewardTerm, WeightManifest
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings
from echo_streams.run import attach
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import BUILT_IN_REWARDS, load_task
from echo_tasks.prompts import PromptCodec, vocabulary_size

Terms = tuple[RewardTerm, ...]


def train_again(settings: Settings, bus: Bus, options: RetrainOptions, wanted: range, terms: Terms) -> bool:
    """Train the versions `wanted` again and print how each compares. Returns False if one differs under the run's own rewards.

    Raises UserError, DeadlineExceeded, TransportError.
    """
    with History(bus, settings.run.name) as history, TemporaryDirectory(prefix="echoswarm-what-if-") as scratch:
        log = TrainingLog(history)
        store = CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
        plan = plan_retraining(log, store, settings, wanted, from_start=options.from_start)
        begins = "the base model" if plan.state is None else f"the checkpoint {plan.state.id}"
        out.print(f"Training versions {plan.start + 1} to {plan.last} of {settings.run.name} again, from {begins}")
        other = _other_rewards(history, log, plan, terms) if terms else None
        kept = Path(scratch) / "kept" if other is not None and options.prompts else None
        found = _compared(settings, bus, options, (log, plan, store), other, kept)
        measured: list[tuple[Measured, Measured]] = []
        if kept is not None:
            newest = log.manifests[plan.last_compared(log)]
            measured = _evaluated(settings, bus, newest, (kept, Path(scratch) / "published"), terms, options.prompts)
            for line in measured_lines(newest.version, measured):
                out.print(line, markup=False)
    if options.json_file is not None:
        content = {
            "run": settings.run.name,
            "start": plan.start,
            "checkpoint": None if plan.state is None else plan.state.id,
            "ranks": options.ranks or settings.learner.ranks,
            "threads": torch.get_num_threads(),
            "tolerance": options.tolerance,
            "rewards": {term.name: term.weight for term in terms},
            "versions": [asdict(version) for version in found],
            "evaluation": [{"published": asdict(before), "other": asdict(after)} for before, after in measured],
        }
        options.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return other is not None or all(version.match is not Match.DIFFERS for version in found)


def _other_rewards(history: History, log: TrainingLog, plan: Plan, terms: Terms) -> OtherRewards:
    steps = range(plan.start + 1, plan.last + 1)
    if not steps:
        raise UserError("No step lies behind the start, so other rewards change nothing.", hint="Ask for later versions, or --from-start.")
    other = read_other_rewards(history, steps, terms)
    out.print(f"Under {listed(terms)}; the run was trained on {listed(log.reports[plan.last].reward_terms)}", markup=False)
    return other


def _compared(
    settings: Settings,
    bus: Bus,
    options: RetrainOptions,
    past: tuple[TrainingLog, Plan, CheckpointStore],
    other: OtherRewards | None,
    kept: Path | None,
) -> list[RetrainedVersion]:
    """Train, and print every version as soon as it is done. `kept`: the folder for the last one's snapshot."""
    log, plan, store = past
    num_ranks = options.ranks or settings.learner.ranks
    found = []
    with closing(open_trainer(trainer_config(settings, resolve_base(settings.policy.base)), num_ranks)) as trainer:
        parts = RetrainParts(
            settings=settings,
            store=store,
            trainer=trainer,
            task=load_task(settings.task.name, settings.task.options),
            distance=partial(weight_distance, bus),
            tolerance=options.tolerance,
            cosine=None if other is None else partial(weight_cosine, bus),
            other=other,
            keep=kept,
        )
        for version in retrain(parts, log, plan):
            found.append(version)
            out.print(line_of(version, num_ranks) if other is None else other_line(version), markup=other is None)
    return found


def _evaluated(
    settings: Settings,
    bus: Bus,
    manifest: WeightManifest,
    folders: tuple[Path, Path],
    terms: Terms,
    num_prompts: int,
) -> list[tuple[Measured, Measured]]:
    """Evaluate a published version and the one trained in its place on held-out prompts: each reward of both. `folders`: the files of the
    retrained version, and the folder for those of the published one.
    """
    base = resolve_base(settings.policy.base)
    planned = next(iter(plan_evaluations(settings)), None) or plan_section(settings, EvalSettings(prompts=max(2, num_prompts)))
    planned = replace(planned, spec=replace(planned.spec, prompts=min(num_prompts, planned.spec.prompts)))
    own = [term.name for term in terms if ":" in term.name or term.name in BUILT_IN_REWARDS]
    rewards = attach(tuple(dict.fromkeys([*planned.spec.rewards, *own])))
    other = read_snapshot(folders[0], manifest.version, manifest.kind, file_names(manifest.kind))
    published = fetch_snapshot(bus, manifest, folders[1])
    engine = open_engine("transformers", replace(engine_config(settings, base), options={}))
    limits = ModelLimits(
        vocabulary=vocabulary_size(base), max_length=settings.policy.max_length, max_turn_tokens=settings.rollout.max_turn_tokens
    )
    out.print(f"Both on {planned.spec.prompts} held-out prompts, {planned.spec.samples} samples each", markup=False)
    before, after = asyncio.run(measure(engine, [published, other], planned, rewards, PromptCodec(base), limits=limits))
    return list(zip(before, after, strict=True))
