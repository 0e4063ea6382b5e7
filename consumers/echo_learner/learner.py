"""The learner of one session: batches in, versions out.

    wait for a batch ─▶ form ─▶ train ─▶ checkpoint (durable: the step exists) ─▶ submit {reports, drops, snapshot} ─▶ next batch
      └─ drops, no batch ─▶ checkpoint of the same weights ─▶ {drops}  ▲ waits for the publication before, which ran beside the training

Threads: everything here runs on the learner's thread; the intake, the publication, the heartbeat and the views have their own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echo_bus.clock import Clock
from echo_bus.notices import Notices
from echo_bus.places import PlaceTimes
from echo_bus.process import StopSignal
from echo_bus.settings import Settings
from echo_bus.settings.rules import staleness_policy
from echo_bus.view import CompactedView
from echo_core.batch_choice import ChosenGroup
from echo_core.bottleneck import Place, Use
from echo_core.groups import AssemblyState
from echo_core.policy import StalenessPolicy
from echo_learner.agreement import Agreement, claims_in_training
from echo_learner.broadcast import BroadcastTimer
from echo_learner.commit.checkpoint import CheckpointStore, LearnerState, Outbox, checkpoint_id
from echo_learner.commit.history import VersionHistory
from echo_learner.commit.publication import Publication, PublicationThread
from echo_learner.commit.rivals import Rivals
from echo_learner.commit.snapshot import SnapshotFiles
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.fates import drops_of
from echo_learner.heartbeat import Heartbeat
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.reward_watch import RewardWatch, without
from echo_learner.sequential.asking import BatchRequests
from echo_learner.step_metrics import StepTimes, staleness_histogram, step_metrics, worker_shares
from echo_learner.training.batch import FormedBatch, SignalSource, form_batch
from echo_learner.training.config import batch_rules, meaning_of, step_policy
from echo_learner.training.ranks import Trainer
from echo_learner.training.trainer import TrainResult
from echo_learner.trust import WorkerTrust
from echo_learner.waiting import Waiting
from echo_schemas.errors import UserError
from echo_schemas.records import (
    Control,
    Position,
    Record,
    RewardTerm,
    RunState,
    SessionClaim,
    StepReport,
)
from echo_schemas.topics import DROPS, EVALS, STEPS, Topic

logger = logging.getLogger(__name__)

_WAIT_S = 0.5
# Drops wait so long for a step to travel with. A group that is dropped makes room for another one only once its drop is public.
_DROPS_WAIT_S = 1.0
# Of the time without a batch, committing drops takes a tenth at most.
_DROPS_PAUSE = 10
# Stands where the checkpoint's name will, until there is one.
_PENDING = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """What a learner works with; all opened, and closed, by whoever made it. `asking`: where batches come from in sequential mode."""

    settings: Settings
    trainer: Trainer
    task: SignalSource
    intake: Intake
    asking: BatchRequests | None
    trust: WorkerTrust
    rewards: RewardWatch
    store: CheckpointStore
    publication: PublicationThread
    heartbeat: Heartbeat
    rivals: Rivals
    broadcast: BroadcastTimer
    evaluations: Evaluations
    control: CompactedView[Control]
    places: PlaceTimes
    notices: Notices
    metrics: LearnerMetrics
    clock: Clock


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The newest version in the log, as the next manifest's parent."""

    version: int
    sha256: str


class Learner:
    """Trains until its steps are done or it is told to stop."""

    def __init__(
        self, parts: LearnerParts, state: LearnerState, *, claim: SessionClaim, published: Published | None, outbox: Outbox = ()
    ) -> None:
        """`state`: the checkpoint that the trainer holds, or a fresh one, not saved yet. `claim`: of this session. `outbox`: what the
        checkpoint still owes the log."""
        self._parts = parts
        self._settings = parts.settings
        self._policy: StalenessPolicy = staleness_policy(parts.settings)
        self._rules = batch_rules(parts.settings)
        self._state = state
        self._claim = claim
        self._session = claim.session
        self._published = published
        self._saved_version = state.version
        self._num_drop_checkpoints = 0
        self._drops_since_s: float | None = None
        self._drops_took_s = 0.0
        self._has_published = self._has_swept = False
        self._terms: tuple[RewardTerm, ...] = state.terms
        self._given_up: frozenset[str] = frozenset()
        self._outbox: list[tuple[Topic, Record]] = list(outbox)
        self._history = VersionHistory(state.version, parts.clock.time_ms())
        self._agreement = Agreement(
            parts.trainer, parts.metrics, versions=self._policy.budget + 2, max_tokens=self._settings.learner.micro_batch_tokens
        )
        parts.intake.call_before_choice(self._check_claims)
        self._mark_s = parts.clock.monotonic_s()
        self._waiting = Waiting(parts.intake, parts.heartbeat, parts.notices, parts.clock)
        self._checkpoint_s = 0.0
        self._idle_s = 0.0

    @property
    def version(self) -> int:
        """Training steps completed."""
        return self._state.version

    def begin(self) -> None:
        """Version 0 of a fresh run: save it and publish its snapshot, so that workers have something to serve."""
        self._commit(0, publish=True)
        self._parts.publication.wait()

    def resume(self) -> None:
        """Say where this begins, and remember the weights that were loaded, if they are the newest published ones."""
        self._parts.metrics.version.set(self.version)
        if self._published is not None:
            self._parts.metrics.published.set(self._published.version)
            if self._published.version == self.version:
                self._agreement.remember(self.version)
        if self._parts.asking is not None:
            if self._published is not None and self._published.version == self.version:
                self._parts.asking.begin(self.version, self._published.sha256)
            else:
                # The other mode need not publish each version; this one asks for exactly the newest.
                self._commit(self.version, publish=True)

    def run(self, stop: StopSignal) -> None:
        """Train until the steps are done or `stop` is set, which is looked at between steps. Then everything trained is durable, and what
        was handed over is in the log.

        Raises UserError (diverged, disk), ProducerFenced, TransportError.
        """
        total = self._settings.learner.steps
        self._mark_s = self._parts.clock.monotonic_s()
        self._waiting.begin()
        while not stop.is_set() and not (total and self.version >= total):
            self._obey_control()
            self._waiting.name_missing_rewards()
            self._publish_evaluations()
            batch = self._next_batch(stop)
            if batch is not None:
                self._step(batch, is_last=self.version + 1 == total)
            else:
                if self._drops_are_due():
                    self._commit_drops()
                self._face_failing_reward()
                self._waiting.tell(self.version, is_paused=self._is_paused())
        self._finish()
        self._conclude_evaluations(stop)
        logger.info("The learner ends at version %d", self.version)

    # One step

    def _check_claims(self) -> None:
        """Compare what has come of each worker's versions; a batch that holds a claim nobody has looked at waits for this."""
        for claimed, difference in self._agreement.compare(self._parts.intake.take_probes()):
            self._parts.trust.judge(claimed, difference)

    def _next_batch(self, stop: StopSignal) -> tuple[ChosenGroup, ...] | None:
        parts = self._parts
        if not parts.publication.is_busy:
            # Nobody samples a version that did not get out, or that somebody else has followed: no batch would ever come.
            parts.publication.wait()
            parts.rivals.check()
        started_s = parts.clock.monotonic_s()
        groups: tuple[ChosenGroup, ...] | None = None
        if self._is_paused():
            stop.wait(_WAIT_S)
        else:
            groups = (parts.asking or parts.intake).wait_for_batch(self.version, self._terms, _WAIT_S)
        waited_s = parts.clock.monotonic_s() - started_s
        self._idle_s += waited_s
        parts.metrics.idle_seconds.inc(waited_s)
        for place in (Place.BATCH, Place.TRAIN):
            parts.places.add(place, Use.EMPTY, waited_s)
        return groups

    def _step(self, groups: Sequence[ChosenGroup], *, is_last: bool) -> None:
        parts = self._parts
        started_s = parts.clock.monotonic_s()
        formed = form_batch(groups, self.version, self._terms, self._rules, parts.task)
        formed_s = parts.clock.monotonic_s()
        result = parts.trainer.step(formed.training)
        for claimed, difference in claims_in_training(formed.trajectories, self.version, result.differences):
            parts.trust.judge(claimed, difference)
        report = self._report(formed, result)
        version = self.version + 1
        self._outbox.append((STEPS, report))
        self._state = replace(self._state, version=version, groups_trained=self._state.groups_trained + len(groups))
        self._history.reached(version, parts.clock.time_ms())
        publish = version % self._policy.publication_period == 0 or is_last
        if publish or version % self._settings.checkpoint.every == 0:
            self._commit(version, publish=publish)
        self._note(formed, report)
        ended_s = parts.clock.monotonic_s()
        self._waiting.begin()
        # One thread does both: while it trains, the next batch has nowhere to go.
        parts.places.add(Place.BATCH, Use.BUSY, formed_s - started_s)
        parts.places.add(Place.BATCH, Use.BLOCKED, ended_s - formed_s)
        parts.places.add(Place.TRAIN, Use.EMPTY, formed_s - started_s)
        parts.places.add(Place.TRAIN, Use.BUSY, ended_s - formed_s)

    def _report(self, formed: FormedBatch, result: TrainResult) -> StepReport:
        """The step's report; which checkpoint holds it is filled in when there is one."""
        parts = self._parts
        now_s = parts.clock.monotonic_s()
        idle_s, train_s = self._idle_s, max(0.0, now_s - self._mark_s - self._idle_s)
        self._mark_s, self._idle_s = now_s, 0.0
        stages = self._history.stages(formed.trajectories, self.version)
        times = StepTimes(train_s=train_s, idle_s=idle_s, broadcast_s=parts.broadcast.last_s)
        metrics = step_metrics(
            result.totals, stages=stages, rewards=formed.rewards.tolist(), grad_norms=result.grad_norms, times=times
        )  # fmt: skip
        metrics |= {
            "compute_s": result.compute_s,
            "outside_compute_share": max(0.0, 1 - result.compute_s / train_s) if train_s > 0 else 0.0,
            "checkpoint_s": self._checkpoint_s,
            "publication_s": parts.publication.last_s,
            "learning_rate": result.lr,
            "groups_without_signal": float(formed.groups_without_signal),
            "probe_logprob_diff_max": self._agreement.largest,
            "probe_samples": float(self._agreement.num_samples),
            "recomputed_fraction": formed.training.recomputed_fraction,
        }
        if parts.asking is not None:
            metrics |= parts.asking.take_counts()
        seed = self._settings.run.seed
        return StepReport(
            run_id=self._settings.run.name,
            session=self._session,
            version=self.version + 1,
            checkpoint=_PENDING,
            parent=self._state.step_checkpoint or None,
            batch=formed.columns,
            seeds={"run": seed},
            world_size=self._settings.learner.ranks,
            reward_terms=self._terms,
            policy=step_policy(self._policy),
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            staleness_dispatch=staleness_histogram(stages.dispatch),
            staleness_in_flight=staleness_histogram(stages.in_flight),
            staleness_in_queue=staleness_histogram(stages.in_queue),
            staleness_total=staleness_histogram(stages.total),
            reward_stats=formed.reward_stats,
            workers=worker_shares([trajectory.worker_id for trajectory in formed.trajectories], stages.total),
            idle_s=idle_s,
            training_s=train_s,
            time_ms=parts.clock.time_ms(),
        )

    def _note(self, formed: FormedBatch, report: StepReport) -> None:
        """Tell the outside how far the learner is."""
        metrics = self._parts.metrics
        metrics.version.set(self.version)
        metrics.steps.inc()
        metrics.samples.inc(len(formed.trajectories))
        metrics.groups_trained.inc(len(formed.columns.attempts))
        metrics.training_seconds.inc(report.training_s)
        metrics.step_seconds.observe(report.training_s)
        for name, value in report.metrics.items():
            metrics.step.labels(name).set(value)
        self._tell_progress()
        logger.debug("Version %d: reward %.3f", self.version, report.metrics.get("reward_mean", math.nan))

    def _tell_progress(self) -> None:
        state = self._state
        self._parts.heartbeat.update(
            version=self.version,
            groups_trained=state.groups_trained,
            groups_dropped=state.groups_dropped,
            groups_ready=self._parts.intake.num_ready,
            next_seq=state.assembly.floor,
        )

    # Commit

    def _commit(self, version: int, *, publish: bool) -> None:
        """Make the steps so far durable, and if `publish`, hand them and a snapshot to the publication thread."""
        parts = self._parts
        parts.publication.wait()
        started_s = parts.clock.monotonic_s()
        assembly = self._settle()
        name = checkpoint_id(version, self._session)

        def take(folder: Path) -> SnapshotFiles:
            taken = parts.trainer.snapshot(version, folder)
            # What cannot be published must not become durable: each start would try to publish it, and fail.
            parts.publication.check(taken.num_bytes)
            return taken

        snapshot = parts.store.take_snapshot(name, take) if publish else None
        self._outbox = [(topic, self._placed(record, name, assembly, snapshot)) for topic, record in self._outbox]
        outbox: Outbox = tuple(self._outbox)
        self._state = replace(
            self._state,
            id=name,
            parent=self._state.id or None,
            session=self._session,
            version=version,
            published=None if self._published is None else self._published.version,
            terms=self._terms,
            meaning=meaning_of(self._settings),
            snapshot=None if snapshot is None else snapshot.sha256,
            created_ms=parts.clock.time_ms(),
            weights_of=None,
            weights_ms=0,
        )
        parts.store.save(self._state, outbox, snapshot, parts.trainer.save)
        self._saved_version = version
        self._checkpoint_s = parts.clock.monotonic_s() - started_s
        parts.metrics.checkpoint_seconds.observe(self._checkpoint_s)
        if publish:
            self._publish(version, outbox, snapshot, assembly)

    def _settle(self) -> AssemblyState:
        """What the next checkpoint keeps of the intake; the drops decided since the last one are owed to the log from now on."""
        parts = self._parts
        assembly, decisions = parts.intake.settle()
        for decision in decisions:
            parts.metrics.dropped.labels(decision.why.value, "group" if decision.where is None else "trajectory").inc()
        run_id, now_ms = self._settings.run.name, parts.clock.time_ms()
        self._outbox.extend((DROPS, drop) for drop in drops_of(decisions, run_id=run_id, learner_version=self.version, time_ms=now_ms))
        dropped = sum(decision.where is None for decision in decisions)
        self._state = replace(self._state, groups_dropped=self._state.groups_dropped + dropped, assembly=assembly)
        self._drops_since_s = None
        return assembly

    def _drops_are_due(self) -> bool:
        """Whether drops have waited long enough for a step that takes them along."""
        parts = self._parts
        if parts.publication.is_busy or not (parts.intake.has_drops or any(topic is DROPS for topic, _ in self._outbox)):
            return False
        now_s = parts.clock.monotonic_s()
        if self._drops_since_s is None:
            self._drops_since_s = now_s
        return now_s - self._drops_since_s >= max(_DROPS_WAIT_S, _DROPS_PAUSE * self._drops_took_s)

    def _commit_drops(self) -> None:
        """Make public what is dropped while no step comes: a checkpoint of the same weights, then one transaction {drops, its name}.

        Without the checkpoint a restarted learner would open the dropped groups again. Reports that wait for a snapshot go along.
        """
        parts = self._parts
        parts.publication.wait()
        started_s = parts.clock.monotonic_s()
        before = self._state
        if self._saved_version != self.version:
            self._commit(self.version, publish=False)
        else:
            self._settle()
            self._num_drop_checkpoints += 1
            self._state = replace(
                self._state,
                id=checkpoint_id(self.version, self._session, self._num_drop_checkpoints),
                parent=before.id,
                session=self._session,
                terms=self._terms,
                meaning=meaning_of(self._settings),
                created_ms=parts.clock.time_ms(),
                weights_of=before.step_checkpoint,
                weights_ms=before.weights_ms or before.created_ms,
            )
            parts.store.save_beside(self._state, tuple(self._outbox), before.id)
        named = replace(self._claim, tip_version=self.version, tip_checkpoint=self._state.id, time_ms=parts.clock.time_ms())
        parts.publication.submit(Publication(version=self.version, outbox=(*self._outbox, (STEPS, named))))
        parts.publication.wait()
        num_drops, self._outbox = sum(topic is DROPS for topic, _ in self._outbox), []
        if before.weights_of is not None and before.session == self._session:
            # Nothing names it any more.
            parts.store.remove(before.id)
        self._drops_took_s = parts.clock.monotonic_s() - started_s
        self._tell_progress()
        logger.info("%d drops are public without a step, in the checkpoint %s", num_drops, self._state.id)

    def _publish(self, version: int, outbox: Outbox, snapshot: SnapshotFiles | None, assembly: AssemblyState) -> None:
        parts = self._parts
        if snapshot is not None:
            self._agreement.remember(version)
            parts.broadcast.ready(version)
        before = self._published
        parts.publication.submit(
            Publication(
                version=version,
                # A learner that is never idle leaves the publication thread no other moment for results.
                outbox=(*outbox, *((EVALS, result) for result in parts.evaluations.take())),
                snapshot=snapshot,
                session=self._session,
                checkpoint=self._state.id,
                next_seq=assembly.floor,
                parent=None if before is None else before.version,
                parent_sha256=None if before is None else before.sha256,
            )
        )
        if before is not None:
            parts.store.prune(self._session, self._settings.checkpoint.keep, before.version)
            if self._has_published and not self._has_swept and self._state.parent is not None:
                # What this session trained is in the log, so nobody can go on from where another one had left its line.
                parts.store.prune_branches(self._settings.run.name, self._state.parent)
                self._has_swept = True
        if snapshot is not None:
            self._published = Published(version=version, sha256=snapshot.sha256)
            self._has_published = True
            if parts.asking is not None:
                parts.asking.begin(version, snapshot.sha256)
        self._outbox = []

    def _placed(self, record: Record, name: str, assembly: AssemblyState, snapshot: SnapshotFiles | None) -> Record:
        """A report that waited for its checkpoint names it now; the newest one names it anew, for what is trained next comes from there."""
        if not isinstance(record, StepReport):
            return record
        if snapshot is not None and record.version == snapshot.version:
            record = replace(record, snapshot_sha256=snapshot.sha256)
        if record.checkpoint != _PENDING and record.version != self.version:
            return record
        positions = tuple(
            Position(partition=partition, low=assembly.trajectory_lows.get(partition, read_to), read_to=read_to)
            for partition, read_to in sorted(assembly.trajectory_read_to.items())
        )
        return replace(record, checkpoint=name, positions=positions)

    def _finish(self) -> None:
        """What was trained since the last checkpoint becomes durable; what was handed over is committed.

        A version that became the last one only after it was trained (fewer steps are wanted now) is published here.
        """
        is_saved = self._saved_version == self.version
        is_published = self._published is not None and self._published.version == self.version
        is_complete = 0 < self._settings.learner.steps <= self.version
        if not is_saved or (is_complete and not is_published):
            self._commit(self.version, publish=is_complete)
        self._parts.publication.wait()

    def _publish_evaluations(self) -> None:
        """Hand results over while the publication thread has nothing to do. They are in no checkpoint: what is lost is evaluated again."""
        publication = self._parts.publication
        if publication.is_busy or not (results := self._parts.evaluations.take()):
            return
        publication.wait()
        publication.submit(Publication(version=self.version, outbox=tuple((EVALS, result) for result in results)))

    def _conclude_evaluations(self, stop: StopSignal) -> None:
        """After the last step: wait for what is due, whoever generates it. Told to stop, leave it to the next session."""
        if 0 < self._settings.learner.steps <= self.version:
            self._parts.intake.read_on()
            while not stop.is_set() and not self._parts.evaluations.wait(_WAIT_S):
                self._parts.publication.wait()
                self._publish_evaluations()
        self._parts.publication.wait()
        self._publish_evaluations()
        self._parts.publication.wait()

    # Orders

    @property
    def _control_key(self) -> str:
        return f"{self._settings.run.name}/run"

    def _is_paused(self) -> bool:
        order = self._parts.control.get(self._control_key)
        return order is not None and order.run is not None and order.run.state is RunState.PAUSED

    def _obey_control(self) -> None:
        """A new reward specification takes effect at max(version asked, learner version + 1)."""
        order = self._parts.control.get(f"{self._settings.run.name}/rewards")
        if order is None or order.rewards is None or order.rewards.from_version > self.version + 1:
            return
        terms = without(order.rewards.terms, self._given_up)
        if terms != self._terms:
            self._set_terms(terms)

    def _face_failing_reward(self) -> None:
        """A reward that only fails: no batch comes while it is waited for. Raises UserError if the run is to end for it."""
        failing = self._parts.rewards.hopeless(self._terms)
        if failing is None:
            return
        terms = without(self._terms, self._given_up | {failing.name})
        others = any(term.is_awaited for term in terms)
        if self._settings.scoring.when_failing == "stop" or not others:
            self._finish()
            on = ' [scoring] when_failing = "go_on" trains on without it.' if others else ""
            raise UserError(
                f"{failing} Without it no batch comes, so the run ends at version {self.version}.",
                hint=f"Mend the reward and start again with the same command: the run goes on where it is.{on}",
            )
        self._given_up |= {failing.name}
        logger.warning("%s The run goes on without it ([scoring] when_failing).", failing)
        self._set_terms(terms)

    def _set_terms(self, terms: tuple[RewardTerm, ...]) -> None:
        self._terms = terms
        self._parts.intake.set_terms(self._terms)
        logger.info("From version %d on the reward is %s", self.version + 1, ", ".join(f"{t.weight:g} {t.name}" for t in self._terms))
