"""`echoswarm retrain`: train published versions again from the log, and say whether the same weights come out."""

from __future__ import annotations

import json
import logging
import re
import sys
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.output import ExitCode, out
from echo_schemas.errors import UserError

_VERSIONS = re.compile(r"(\d+)(?:\.\.(\d+))?")


def retrain(
    config: Path | None, versions: str, *, from_start: bool, tolerance: float, exact: bool, ranks: int | None, json_file: Path | None
) -> None:
    """Train the versions again and compare each; ends the process with an exit code that says the worst."""
    wanted = parse_versions(versions)
    settings = read_settings(config)
    # Before the imports, which take seconds.
    bus = reach_bus(settings)
    logging.basicConfig(level=logging.WARNING)
    try:
        import torch

        from echo_learner.commit.checkpoint import CheckpointStore
        from echo_learner.training.config import trainer_config
        from echo_learner.training.ranks import open_trainer
        from echo_replay.retrain import Match, RetrainParts, plan_retraining, read_training_log
        from echo_replay.retrain import retrain as train_again
        from echo_replay.weight_distance import weight_distance
        from echo_tasks.base_models import resolve_base
        from echo_tasks.catalogue import load_task
    except ModuleNotFoundError as exc:
        raise UserError(
            f"Retraining needs the library {exc.name!r}, which is not installed here.", hint="pip install 'echoswarm[learner]'"
        ) from exc
    history = read_training_log(bus, settings.run.name)
    store = CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
    plan = plan_retraining(history, store, settings, wanted, from_start=from_start)
    num_ranks = ranks or settings.learner.ranks
    begins = "the base model" if plan.state is None else f"the checkpoint {plan.state.id}"
    out.print(f"Training versions {plan.start + 1} to {plan.last} of {settings.run.name} again, from {begins}")
    found = []
    with closing(open_trainer(trainer_config(settings, resolve_base(settings.policy.base)), num_ranks)) as trainer:
        parts = RetrainParts(
            settings=settings,
            bus=bus,
            store=store,
            trainer=trainer,
            task=load_task(settings.task.name, settings.task.options),
            distance=partial(weight_distance, bus),
            tolerance=0.0 if exact else tolerance,
        )
        for version in train_again(parts, history, plan):
            found.append(version)
            out.print(line_of(version, num_ranks))
    content = {
        "run": settings.run.name,
        "start": plan.start,
        "checkpoint": None if plan.state is None else plan.state.id,
        "ranks": num_ranks,
        "threads": torch.get_num_threads(),
        "tolerance": 0.0 if exact else tolerance,
        "versions": [asdict(version) for version in found],
    }
    if json_file is not None:
        json_file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if any(version.match is Match.DIFFERS for version in found):
        sys.exit(ExitCode.BROKEN)


def parse_versions(text: str) -> range:
    """`a..b`, both included, or one version. Raises UserError."""
    match = _VERSIONS.fullmatch(text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2] or first) if match else -1
    if last < first:
        raise UserError(f"--version {text!r} names no versions.", hint="Write 3..8, from the lower to the higher, or a single one.")
    return range(first, last + 1)


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
