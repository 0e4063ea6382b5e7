"""`echoswarm retrain`: train published versions again from the log, and say whether the same weights come out; or others, under other
rewards.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from echo_bus.bus import Bus
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.output import ExitCode, out
from echo_ops.rewards.weights import listed, parse_weight
from echo_schemas.errors import UserError
from echo_schemas.records import RewardTerm, WeightManifest
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings

if TYPE_CHECKING:
    # Its imports take seconds.
    from echo_replay.what_if import Measured

_VERSIONS = re.compile(r"(\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainWish:
    """What the command line says. `rewards` empty: those of the reports; else `name=weight` each, and nothing but these."""

    versions: str
    from_start: bool = False
    tolerance: float = 0.0
    exact: bool = False
    ranks: int | None = None
    rewards: tuple[str, ...] = ()
    prompts: int = 64
    json_file: Path | None = None


def retrain(config: Path | None, wish: RetrainWish) -> None:
    """Train the versions again and compare each; ends the process with an exit code that says the worst, if nothing else was asked for than
    what the run did.
    """
    wanted, terms = parse_versions(wish.versions), parse_terms(wish.rewards)
    settings = read_settings(config)
    # Before the imports, which take seconds.
    bus = reach_bus(settings)
    logging.basicConfig(level=logging.WARNING)
    try:
        import torch

        from echo_learner.commit.checkpoint import CheckpointStore
        from echo_learner.training.config import trainer_config
        from echo_learner.training.ranks import open_trainer
        from echo_replay.history import open_history
        from echo_replay.retrain import Match, RetrainParts, TrainingLog, plan_retraining
        from echo_replay.retrain import retrain as train_again
        from echo_replay.weight_distance import weight_cosine, weight_distance
        from echo_replay.what_if import read_other_rewards
        from echo_tasks.base_models import resolve_base
        from echo_tasks.catalogue import load_task
    except ModuleNotFoundError as exc:
        raise UserError(
            f"Retraining needs the library {exc.name!r}, which is not installed here.", hint="pip install 'echoswarm[learner]'"
        ) from exc
    with open_history(bus, settings.run.name) as history:
        log = TrainingLog(history)
        store = CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
        plan = plan_retraining(log, store, settings, wanted, from_start=wish.from_start)
        base, num_ranks = resolve_base(settings.policy.base), wish.ranks or settings.learner.ranks
        begins = "the base model" if plan.state is None else f"the checkpoint {plan.state.id}"
        out.print(f"Training versions {plan.start + 1} to {plan.last} of {settings.run.name} again, from {begins}")
        other = None
        if terms:
            steps = range(plan.start + 1, plan.last + 1)
            if not steps:
                raise UserError(
                    "No step lies behind the start, so other rewards change nothing.", hint="Ask for later versions, or --from-start."
                )
            other = read_other_rewards(history, steps, terms)
            out.print(f"Under {listed(terms)}; the run was trained on {listed(log.reports[plan.last].reward_terms)}", markup=False)
        found: list[Any] = []
        measured: list[tuple[Measured, Measured]] = []
        tolerance = 0.0 if wish.exact else wish.tolerance
        with TemporaryDirectory(prefix="echoswarm-what-if-") as scratch:
            kept = Path(scratch) / "kept" if other is not None and wish.prompts else None
            with closing(open_trainer(trainer_config(settings, base), num_ranks)) as trainer:
                parts = RetrainParts(
                    settings=settings,
                    store=store,
                    trainer=trainer,
                    task=load_task(settings.task.name, settings.task.options),
                    distance=partial(weight_distance, bus),
                    tolerance=tolerance,
                    cosine=None if other is None else partial(weight_cosine, bus),
                    other=other,
                    keep=kept,
                )
                for version in train_again(parts, log, plan):
                    found.append(version)
                    out.print(line_of(version, num_ranks) if other is None else other_line(version), markup=other is None)
            if kept is not None:
                newest = log.manifests[plan.last_compared(log)]
                measured = evaluate(settings, bus, newest, (kept, Path(scratch) / "published"), base, terms, wish.prompts)
                for line in measured_lines(newest.version, measured):
                    out.print(line, markup=False)
    content = {
        "run": settings.run.name,
        "start": plan.start,
        "checkpoint": None if plan.state is None else plan.state.id,
        "ranks": num_ranks,
        "threads": torch.get_num_threads(),
        "tolerance": tolerance,
        "rewards": {term.name: term.weight for term in terms},
        "versions": [asdict(version) for version in found],
        "evaluation": [{"published": asdict(before), "other": asdict(after)} for before, after in measured],
    }
    if wish.json_file is not None:
        wish.json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if other is None and any(version.match is Match.DIFFERS for version in found):
        sys.exit(ExitCode.BROKEN)


def evaluate(
    settings: Settings,
    bus: Bus,
    manifest: WeightManifest,
    folders: tuple[Path, Path],
    base: Path,
    terms: tuple[RewardTerm, ...],
    num_prompts: int,
) -> list[tuple[Measured, Measured]]:
    """A published version and the one that was trained in its place, on held-out prompts: each reward of both. `folders`: where the other
    one's files lie, and where the published ones may be put.
    """
    from echo_learner.commit.fork import fetch_snapshot
    from echo_learner.commit.snapshot import file_names, read_snapshot
    from echo_learner.evaluation.setup import plan_evaluations, plan_section
    from echo_replay.what_if import ModelLimits, measure
    from echo_rollout.engines.catalogue import open_engine
    from echo_rollout.run import engine_config
    from echo_streams.run import attach
    from echo_tasks.catalogue import BUILT_IN_REWARDS
    from echo_tasks.prompts import PromptCodec, vocabulary_size

    planned = next(iter(plan_evaluations(settings)), None) or plan_section(settings, EvalSettings(prompts=max(2, num_prompts)))
    planned = replace(planned, spec=replace(planned.spec, prompts=min(num_prompts, planned.spec.prompts)))
    own = [term.name for term in terms if ":" in term.name or term.name in BUILT_IN_REWARDS]
    rewards = attach(tuple(dict.fromkeys([*planned.spec.rewards, *own])))
    other = read_snapshot(folders[0], manifest.version, manifest.kind, file_names(manifest.kind))
    published = fetch_snapshot(bus, manifest, folders[1])
    engine = open_engine("transformers", replace(engine_config(settings, base), options={}))
    limits = ModelLimits(vocabulary=vocabulary_size(base), max_length=settings.policy.max_length)
    out.print(f"Both on {planned.spec.prompts} held-out prompts, {planned.spec.samples} samples each", markup=False)
    before, after = asyncio.run(measure(engine, [published, other], planned, rewards, PromptCodec(base), limits=limits))
    return list(zip(before, after, strict=True))


def measured_lines(version: int, measured: Sequence[tuple[Measured, Measured]]) -> list[str]:
    """What is said of an evaluation."""
    width = max((len(before.name) for before, _ in measured), default=0)
    return [
        f"  {before.name.ljust(width)}  {_measured(before)} as version {version} was published, {_measured(after)} under the other rewards"
        for before, after in measured
    ]


def _measured(value: Measured) -> str:
    failed = f" ({value.num_failed} without a value)" if value.num_failed else ""
    return f"{value.mean:.4g} ± {value.stderr:.2g}{failed}"


def parse_terms(texts: Sequence[str]) -> tuple[RewardTerm, ...]:
    """`exact=1` and the like. Raises UserError for what is no weight, a name twice, or weights that are all 0."""
    pairs = [parse_weight(text) for text in texts]
    if len({name for name, _ in pairs}) < len(pairs):
        raise UserError("--rewards names a reward twice.", hint="One weight for each.")
    if pairs and not any(weight for _, weight in pairs):
        raise UserError(
            "All weights of --rewards are 0, so nothing would be trained.", hint="Such as --rewards exact=1 --rewards brevity=0.2."
        )
    return tuple(RewardTerm(name=name, weight=weight) for name, weight in pairs if weight)


def parse_versions(text: str) -> range:
    """`a..b`, both included, or one version. Raises UserError."""
    match = _VERSIONS.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else -1
    if last < first:
        raise UserError(f"--version {text!r} names no versions.", hint="Write 3..8, from the lower to the higher, or a single one.")
    return range(first, last + 1)


def other_line(version: Any) -> str:
    """What is said of one version that was trained under other rewards."""
    if version.cosine is None or version.distance == 0.0:
        return f"version {version.version}: the same weights"
    return (
        f"version {version.version}: {version.distance:.2g} of the way from the start beside what was published; cosine of the two ways "
        f"{version.cosine:.3f}"
    )


def line_of(version: Any, num_ranks: int) -> str:
    """What is said of one version."""
    from echo_replay.retrain import Match

    head = f"version {version.version}: "
    tail = "" if version.world_size == num_ranks else f" (trained on {version.world_size} ranks, now on {num_ranks})"
    match version.match:
        case Match.IDENTICAL:
            return f"{head}[green]identical[/], sha256 {version.sha256[:12]}{tail}"
        case Match.WITHIN:
            return f"{head}[yellow]within tolerance[/], off by {version.distance:.2g} of the way from the start{tail}"
        case _:
            return (
                f"{head}[bold red]DIFFERS[/] by {version.distance:.2g} of the way from the start: {version.sha256[:12]}, published "
                f"{version.published_sha256[:12]}{tail}"
            )
