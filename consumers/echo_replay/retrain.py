"""Training again from the log: it makes the weights of published versions again and compares them.

    version 0, or a kept checkpoint ─▶ for each report: samples from the log, rewards and plan from the report ─▶ train ─▶ compare checksums

On the same machine with the same library builds, threads and ranks every byte is the same. Elsewhere floating-point sums differ a little;
then the distance of the weights is compared with the distance that training has moved them.

Reads the log and the checkpoint folder, writes to neither; snapshots lie in a temporary folder while they are compared. The caller's thread
does everything; the trainer may have other ranks.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from echo_bus.errors import BlobCorrupt, OffsetLost
from echo_core.policy import OverBudget
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.start.resuming import load_trainer
from echo_learner.training.batch import SignalSource
from echo_learner.training.config import batch_rules, changed_meaning, meaning_of
from echo_learner.training.ranks import Trainer
from echo_replay.batches import OtherRewards, places_of, training_batch
from echo_replay.history import History
from echo_replay.selection import Selection, Steps
from echo_replay.steps import Step, read_batch
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, Run, Trajectory, WeightManifest
from echo_settings import Settings

logger = logging.getLogger(__name__)

Distance = Callable[[WeightManifest, SnapshotFiles, SnapshotFiles], float]
"""`distance(published, retrained, start)`: the distance of the first two, as a share of the distance from `start` to `published`."""


class Match(StrEnum):
    """The result of comparing a retrained version with the published one."""

    IDENTICAL = "identical"
    WITHIN = "within_tolerance"
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainedVersion:
    """One published version, trained again. `distance`: as `Distance`; 0 if the bytes are the same. `cosine`, if requested: between the
    published and the retrained direction from the start; 1 is the same direction."""

    version: int
    match: Match
    sha256: str
    published_sha256: str
    distance: float
    world_size: int
    cosine: float | None = None


class TrainingLog:
    """The steps to train again, from a run's history: reports without their batches, and manifests, by version."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._steps: dict[int, Step] = {}
        for step in history.log.steps:
            self._steps.setdefault(step.version, step)
        self.reports = {version: step.report for version, step in self._steps.items()}
        self.manifests = {manifest.version: manifest for _, is_current, manifest in history.log.manifests if not is_current}

    @property
    def run(self) -> Run | None:
        """The run's own record, if the log still holds it."""
        return next(reversed(self._history.log.runs), None)

    @property
    def forked_at(self) -> int | None:
        """The version at which the run was forked from another; None for one that began at version 0."""
        return next((manifest.version for manifest in self.manifests.values() if manifest.parent_run is not None), None)

    def refuse_gaps(self, versions: range) -> None:
        """Raise as `batch` for the first of `versions` whose batch was missing when the history was read."""
        for version in versions:
            if self._steps[version].missing:
                self.batch(version)

    def batch(self, version: int) -> Batch:
        """The batch of `version`. Raises UserError if it was removed or is unreadable; DeadlineExceeded, TransportError."""
        try:
            return read_batch(self._history.bus, self._steps[version])
        except OffsetLost as exc:
            raise UserError(
                f"Retention has removed the batch of version {version}.", hint="Begin at a later version, below which a checkpoint is kept."
            ) from exc
        except BlobCorrupt as exc:
            raise UserError(f"The batch of version {version} cannot be read: {exc.message}", hint="`echoswarm audit` says more.") from exc

    def samples(self, version: int, batch: Batch) -> list[Trajectory]:
        """The samples of `batch`, in its order. Raises UserError if the log lacks one or holds another record there; DeadlineExceeded,
        TransportError."""
        records = self._history.read(Selection(range=Steps(version, version)), rewards=False)
        found = {(each.where.partition, each.where.offset): each.trajectory for each in records}
        if self._history.missing:
            raise UserError(
                f"Some samples of version {version} are missing. {self._history.missing[0]}",
                hint="Start from a checkpoint at or above this version, with a later first --version.",
            )
        samples = []
        seqs, indices = np.frombuffer(batch.seqs, OFFSET_DTYPE).tolist(), np.frombuffer(batch.indices, TOKEN_DTYPE).tolist()
        for place, seq, index in zip(places_of(batch), seqs, indices, strict=True):
            if (trajectory := found.get(place)) is None:
                raise UserError(
                    f"Version {version} was trained on partition {place[0]}, offset {place[1]}, where the log has no record of this run.",
                    hint="`echoswarm audit` says more.",
                )
            if (trajectory.seq, trajectory.index) != (seq, index):
                raise UserError(
                    f"At partition {place[0]}, offset {place[1]} lies {trajectory.name}; version {version} was trained on seq {seq}, "
                    f"sample {index}.",
                    hint="This is not the log that the run was trained on: `echoswarm audit` says more.",
                )
            samples.append(trajectory)
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Versions `first` to `last` are compared; training begins after `start`, from the checkpoint `state` or (None) from the base model."""

    first: int
    last: int
    start: int
    state: LearnerState | None

    def last_compared(self, log: TrainingLog) -> int:
        """The newest published version among them."""
        return max(version for version in log.manifests if version <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrainParts:
    """The parts of a retraining, which the caller opens and closes. `trainer` is fresh, as before the first step. `tolerance`: up to this
    distance versions count as equal. `other`: rewards in place of the reports'. `keep`: a new folder for the snapshot of the last compared
    version."""

    settings: Settings
    store: CheckpointStore
    trainer: Trainer
    task: SignalSource
    distance: Distance
    tolerance: float
    cosine: Distance | None = None
    other: OtherRewards | None = None
    keep: Path | None = None


def plan_retraining(log: TrainingLog, store: CheckpointStore, settings: Settings, versions: range, *, from_start: bool) -> Plan:
    """The plan that trains all of `versions` again, from the newest kept checkpoint below them, or from the base model. Raises UserError if
    the log lacks records for it, or the settings are not the run's."""
    run_id, first, last = settings.run.name, versions.start, versions.stop - 1
    if not log.manifests:
        raise UserError(f"Run {run_id!r} has published nothing that could be trained again.", hint="Are [kafka] and [run] name right?")
    if not any(first <= version <= last for version in log.manifests):
        nearest = min(log.manifests, key=lambda version: abs(version - last))
        raise UserError(
            f"None of the versions {first} to {last} was published, so there is nothing to compare with.",
            hint=f"The nearest published version is {nearest}.",
        )
    if last > (newest := max(log.reports, default=0)):
        raise UserError(f"Version {last} is not in the log; the newest step is {newest}.")
    _refuse_other_settings(log.run, settings)
    begun = log.forked_at
    state = _newest_below(log, store, run_id, (begun or 0) + 1 if from_start else max(first, (begun or 0) + 1))
    if begun is not None and state is None:
        raise UserError(
            f"Run {run_id!r} is a fork that began at version {begun}, and the checkpoint that it began from is not kept.",
            hint="Bring it back, or train its parent again up to that version.",
        )
    if from_start and begun is None:
        state = None
    start = 0 if state is None else state.version
    missing = [version for version in range(start + 1, last + 1) if version not in log.reports]
    if missing:
        raise UserError(
            f"The reports of versions {missing[0]} to {missing[-1]} are not in the log any more.",
            hint="Begin at a later version, below which a checkpoint is kept.",
        )
    if state is not None and (changed := changed_meaning(state.meaning, meaning_of(settings))):
        raise _other_settings(changed)
    return Plan(first=first, last=last, start=start, state=state)


def retrain(parts: RetrainParts, log: TrainingLog, plan: Plan) -> Iterator[RetrainedVersion]:
    """Train the plan's steps again; yield each compared version as soon as it is trained. Raises UserError, DeadlineExceeded,
    TransportError."""
    log.refuse_gaps(range(plan.start + 1, plan.last + 1))
    if plan.state is not None:
        parts.store.verify(plan.state.id)
        load_trainer(parts.trainer, parts.store, plan.state)
    with TemporaryDirectory(prefix="echoswarm-retrain-") as scratch:
        yield from _trained_again(parts, log, plan, Path(scratch))


def _trained_again(parts: RetrainParts, log: TrainingLog, plan: Plan, scratch: Path) -> Iterator[RetrainedVersion]:
    trainer, settings = parts.trainer, parts.settings
    start = trainer.snapshot(plan.start, scratch / "start")
    if plan.first <= plan.start and plan.start in log.manifests:
        yield _compare(parts, log, start, start)
    rules, over_budget = batch_rules(settings), OverBudget(settings.staleness.over_budget)
    for version in range(plan.start + 1, plan.last + 1):
        batch = log.batch(version)
        trainer.step(
            training_batch(
                log.reports[version],
                batch,
                log.samples(version, batch),
                rules=rules,
                over_budget=over_budget,
                budget=settings.staleness.budget,
                task=parts.task,
                other=parts.other,
            )
        )
        logger.info("Version %d is trained again", version)
        if version >= plan.first and version in log.manifests:
            is_kept = parts.keep is not None and version == plan.last_compared(log)
            folder = parts.keep if is_kept and parts.keep is not None else scratch / str(version)
            yield _compare(parts, log, trainer.snapshot(version, folder), start)
            if not is_kept:
                shutil.rmtree(folder)


def _compare(parts: RetrainParts, log: TrainingLog, retrained: SnapshotFiles, start: SnapshotFiles) -> RetrainedVersion:
    version = retrained.version
    published, report = log.manifests[version], log.reports.get(version)
    match, distance, cosine = Match.IDENTICAL, 0.0, None if parts.cosine is None else 1.0
    if retrained.sha256 != published.sha256:
        distance = parts.distance(published, retrained, start)
        cosine = None if parts.cosine is None else parts.cosine(published, retrained, start)
        match = Match.WITHIN if distance <= parts.tolerance else Match.DIFFERS
    return RetrainedVersion(
        version=version,
        match=match,
        sha256=retrained.sha256,
        published_sha256=published.sha256,
        distance=distance,
        cosine=cosine,
        world_size=report.world_size if report is not None else parts.settings.learner.ranks,
    )


def _newest_below(log: TrainingLog, store: CheckpointStore, run_id: str, first: int) -> LearnerState | None:
    """The newest kept checkpoint below version `first` that belongs to the run's steps; not one whose step was never reported."""
    own = {report.checkpoint for report in log.reports.values()} | {report.parent for report in log.reports.values()}
    own |= {manifest.checkpoint for manifest in log.manifests.values()}
    found = [state for name in store.ids() if name in own and (state := store.load(name)).run_id == run_id and state.version < first]
    return max(found, key=lambda state: (state.version, state.created_ms), default=None)


def _refuse_other_settings(run: Run | None, settings: Settings) -> None:
    """Raise UserError if the settings differ from the run's record on `runs`."""
    if run is None:
        return
    config: dict[str, Any] = json.loads(run.config)
    now = meaning_of(settings)
    before = {}
    for name in now:
        section, _, key = name.partition(".")
        if key in config.get(section, {}):
            before[name] = config[section][key]
    if changed := changed_meaning(before, now):
        raise _other_settings(changed)


def _other_settings(changed: list[str]) -> UserError:
    return UserError(
        f"The run was trained with other values of {', '.join(changed)}: with these its weights would be different.",
        hint="Use the configuration that the run was started with.",
    )
