"""One training step: chosen groups in, a trained policy and the draft of its report out.

groups ─▶ form ─▶ train ─▶ StepDraft ──(a checkpoint holds it)──▶ StepReport
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from echo_bus.clock import Clock
from echo_core.batch_choice import ChosenGroup
from echo_core.capacity.costs import price_of, sum_of
from echo_core.groups import AssemblyState
from echo_learner.agreement import claims_in_training
from echo_learner.step_metrics import VersionHistory, staleness_histogram, step_metrics, worker_shares
from echo_learner.training.batch import FormedBatch, SignalSource, form_batch
from echo_learner.training.config import batch_rules, step_policy
from echo_learner.training.ranks import Trainer
from echo_learner.training.trainer import TrainResult
from echo_learner.trust import Claimed
from echo_schemas.records import KindCost, Position, RewardTerm, StepReport
from echo_settings import Settings
from echo_settings.rules import staleness_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraft:
    """A step that is trained and not durable yet. `report` lacks what `seal` adds. `claims`: the workers' fresh samples and their mean
    differences (`claims_in_training`). `forming_s`: seconds from the groups to the batch.
    """

    report: StepReport
    num_groups: int
    num_samples: int
    claims: Sequence[tuple[Claimed, float]]
    forming_s: float


def seal(draft: StepReport, checkpoint: str, assembly: AssemblyState, snapshot_sha256: str | None) -> StepReport:
    """The report as the checkpoint `checkpoint` holds it. `assembly`: of the same checkpoint."""
    positions = tuple(
        Position(partition=partition, low=assembly.trajectory_lows.get(partition, read_to), read_to=read_to)
        for partition, read_to in sorted(assembly.trajectory_read_to.items())
    )
    return replace(draft, checkpoint=checkpoint, positions=positions, snapshot_sha256=snapshot_sha256)


class Stepper:
    """Trains, and measures each step. Used from the learner's thread."""

    def __init__(self, settings: Settings, trainer: Trainer, task: SignalSource, clock: Clock, *, session: str, version: int) -> None:
        """`version`: of the policy that the trainer holds."""
        self._settings = settings
        self._trainer = trainer
        self._task = task
        self._clock = clock
        self._session = session
        self._rules = batch_rules(settings)
        self._policy = staleness_policy(settings)
        self._history = VersionHistory(version, clock.time_ms())
        self._mark_s = clock.monotonic_s()
        self._idle_s = 0.0

    def begin(self) -> None:
        self._mark_s, self._idle_s = self._clock.monotonic_s(), 0.0

    def waited(self, seconds: float) -> None:
        """Add `seconds` without a batch to the step's idle time."""
        self._idle_s += seconds

    def step(
        self,
        groups: Sequence[ChosenGroup],
        version: int,
        terms: tuple[RewardTerm, ...],
        *,
        parent: str | None,
        measured: Mapping[str, float],
        costs: Sequence[KindCost],
        delivered: Mapping[str, int],
    ) -> StepDraft:
        """Train from `version` to the next. `parent`: the checkpoint that the step starts from. `measured`: metrics of work beside the
        steps, by name. `costs`, `delivered`: since the step before, of the workers by kind, and trajectories by worker.

        Raises UserError (diverged, a task's signals).
        """
        started_s = self._clock.monotonic_s()
        formed = form_batch(groups, version, terms, self._rules, self._task)
        forming_s = self._clock.monotonic_s() - started_s
        result = self._trainer.step(formed.training)
        report = self._report(formed, result, version, terms, parent=parent, measured=measured, costs=costs, delivered=delivered)
        self._history.reached(version + 1, self._clock.time_ms())
        return StepDraft(
            report=report,
            num_groups=len(groups),
            num_samples=len(formed.trajectories),
            claims=claims_in_training(formed.trajectories, version, result.differences),
            forming_s=forming_s,
        )

    def _report(
        self,
        formed: FormedBatch,
        result: TrainResult,
        version: int,
        terms: tuple[RewardTerm, ...],
        *,
        parent: str | None,
        measured: Mapping[str, float],
        costs: Sequence[KindCost],
        delivered: Mapping[str, int],
    ) -> StepReport:
        now_s = self._clock.monotonic_s()
        idle_s, train_s = self._idle_s, max(0.0, now_s - self._mark_s - self._idle_s)
        self.begin()
        stages = self._history.stages(formed.trajectories, version)
        metrics = step_metrics(
            result.totals,
            stages=stages,
            rewards=formed.rewards.tolist(),
            grad_norms=result.grad_norms,
            train_s=train_s,
            idle_s=idle_s,
        )
        metrics |= {
            "compute_s": result.compute_s,
            "outside_compute_share": max(0.0, 1 - result.compute_s / train_s) if train_s > 0 else 0.0,
            "learning_rate": result.lr,
            "groups_without_signal": float(formed.groups_without_signal),
            "recomputed_fraction": formed.training.recomputed_fraction,
            **measured,
        }
        learner_cost = price_of(self._settings.learner.price_per_hour, idle_s + train_s)
        if cost := sum_of(costs) + learner_cost:
            metrics |= {"cost": cost, "cost_per_1000": 1000 * cost / len(formed.trajectories)}
        return StepReport(
            run_id=self._settings.run.name,
            session=self._session,
            version=version + 1,
            checkpoint="",
            parent=parent,
            batch=formed.columns,
            seeds={"run": self._settings.run.seed},
            world_size=self._settings.learner.ranks,
            reward_terms=terms,
            policy=step_policy(self._policy),
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            staleness_dispatch=staleness_histogram(stages.dispatch),
            staleness_in_flight=staleness_histogram(stages.in_flight),
            staleness_in_queue=staleness_histogram(stages.in_queue),
            staleness_total=staleness_histogram(stages.total),
            reward_stats=formed.reward_stats,
            workers=worker_shares([trajectory.worker_id for trajectory in formed.trajectories], stages.total, delivered),
            idle_s=idle_s,
            training_s=train_s,
            costs=tuple(costs),
            learner_cost=learner_cost,
            time_ms=self._clock.time_ms(),
        )
