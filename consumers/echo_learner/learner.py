"""The learner of one session: batches in, versions out.

    orders ─▶ compare ─▶ next batch ─▶ step ─▶ commit ─┐
      ▲  └─ pause, rewards  └─ claims      └─ train    │ checkpoint (durable), then the log (public), beside the next step
      └────────────────────────────────────────────────┘

Threads: everything here runs on the learner's thread; the intake, the publication, the heartbeat and the views have their own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from echo_bus.clock import Clock
from echo_core.batch_choice import ChosenGroup
from echo_core.bottleneck import Place, Use
from echo_learner.commit.publication import Publication
from echo_learner.committer import Committer
from echo_learner.heartbeat import ProgressHeartbeat
from echo_learner.intake import Intake
from echo_learner.orders import RunOrders
from echo_learner.parts import LearnerParts
from echo_learner.start.beginning import Beginning
from echo_learner.step import StepDraft, Stepper
from echo_learner.training.trainer import TrainingDiverged
from echo_runtime.logs import logged_with
from echo_runtime.notices import STANDSTILL_S, Notices, Standstill
from echo_runtime.process import StopSignal
from echo_schemas.topics import EVALS

logger = logging.getLogger(__name__)
_WAIT_S = 0.5
# The name of the notice that no batch comes.
_PLACE = "batch"
# Trajectories without rewards named at once: the oldest, so that later calls name the others.
_MAX_NAMED = 256


class Learner:
    """Trains until its steps are done or it is told to stop."""

    def __init__(self, parts: LearnerParts, beginning: Beginning) -> None:
        state = beginning.state
        self._parts = parts
        self._orders = RunOrders(parts.process.settings, parts.control, parts.rewards, parts.intake, state.terms)
        self._stepper = Stepper(
            parts.process.settings, parts.trainer, parts.task, parts.process.clock, session=beginning.session, version=state.version
        )
        self._committer = Committer(parts, beginning, self._orders)
        self._waiting = Waiting(parts.intake, parts.heartbeat, parts.process.notices, parts.process.clock)

    @property
    def version(self) -> int:
        return self._committer.version

    def begin(self) -> None:
        """Publish the version that this session begins with, so that workers have something to serve."""
        self._committer.begin()

    def run(self, stop: StopSignal) -> None:
        """Train until the steps are done or `stop` is set, which is looked at between steps. Then everything trained is durable, and what
        was handed over is in the log.

        Raises UserError (diverged, disk), ProducerFenced, TransportError.
        """
        self._stepper.begin()
        self._waiting.begin()
        while not (stop.is_set() or self._orders.is_stopping or self._committer.is_complete):
            self._orders.obey(self.version)
            self._parts.metrics.paused.set(self._orders.is_paused)
            self._compare_claims()
            self._waiting.name_missing_rewards()
            self._publish_evaluations()
            batch = self._next_batch(stop)
            if batch is None:
                self._mind_the_wait()
            else:
                with logged_with(version=self.version + 1):
                    self._step(batch)
        self._committer.finish()
        self._conclude_evaluations(stop)
        logger.info("The learner ends at version %d", self.version)

    # Before a step

    def _compare_claims(self) -> None:
        """Compare the samples of workers' claims; a batch with a claim that was not compared waits for this."""
        for claimed, difference in self._parts.agreement.compare(self._parts.trust.take_samples()):
            self._parts.trust.judge(claimed, difference)

    def _next_batch(self, stop: StopSignal) -> tuple[ChosenGroup, ...] | None:
        parts = self._parts
        if not parts.publication.is_busy:
            # After a failed publication, or with a successor at work, no batch can come: check both before waiting for one.
            parts.publication.wait()
            parts.rivals.check()
            parts.partitions.check()
        started_s = parts.process.clock.monotonic_s()
        groups: tuple[ChosenGroup, ...] | None = None
        if self._orders.is_paused:
            stop.wait(_WAIT_S)
        else:
            groups = parts.source.next_batch(self.version, self._orders.terms, _WAIT_S)
        waited_s = parts.process.clock.monotonic_s() - started_s
        self._stepper.waited(waited_s)
        parts.metrics.idle_seconds.inc(waited_s)
        for place in (Place.BATCH, Place.TRAIN):
            parts.process.places.add(place, Use.EMPTY, waited_s)
        return groups

    def _mind_the_wait(self) -> None:
        """Without a batch: commit drops, check for a failing reward, report the wait. Raises UserError if a failing reward ends the run."""
        if self._committer.drops_are_due():
            self._committer.commit_drops()
        error = self._orders.face_failing_reward(self.version)
        if error is not None:
            self._committer.finish()
            raise error
        self._waiting.tell(self.version, is_paused=self._orders.is_paused)

    # A step

    def _step(self, groups: Sequence[ChosenGroup]) -> None:
        parts = self._parts
        started_s, started_ms = parts.process.clock.monotonic_s(), parts.process.clock.time_ms()
        try:
            draft = self._stepper.step(
                groups,
                self.version,
                self._orders.terms,
                parent=self._committer.parent,
                measured=self._measured_beside(),
                costs=parts.costs.take(),
                delivered=parts.intake.take_delivered(),
            )
        except TrainingDiverged:
            parts.metrics.diverged.set(1)
            raise
        for claimed, difference in draft.claims:
            parts.trust.judge(claimed, difference)
        for group in groups:
            name = group.samples[0].member.trajectory.group_id
            logger.debug("Group %s is trained: %d samples", name, len(group.samples), extra={"group": name})
        if parts.process.bus.tracer is not None:
            parts.process.bus.tracer.trained(groups, draft.report.version, started_ms)
        self._committer.take(draft)
        self._note(draft)
        self._waiting.begin()
        # One thread forms batches and trains, so forming the next batch is blocked during training.
        training_s = parts.process.clock.monotonic_s() - started_s - draft.forming_s
        parts.process.places.add(Place.BATCH, Use.BUSY, draft.forming_s)
        parts.process.places.add(Place.BATCH, Use.BLOCKED, training_s)
        parts.process.places.add(Place.TRAIN, Use.EMPTY, draft.forming_s)
        parts.process.places.add(Place.TRAIN, Use.BUSY, training_s)

    def _measured_beside(self) -> dict[str, float]:
        """Metrics of work beside the steps, for the next step's report."""
        parts = self._parts
        broadcast_s = parts.broadcast.last_s
        return {
            "checkpoint_s": self._committer.checkpoint_s,
            "publication_s": parts.publication.last_s,
            "probe_logprob_diff_max": parts.agreement.largest,
            "probe_samples": float(parts.agreement.num_samples),
            "broadcast_s": math.nan if broadcast_s is None else broadcast_s,
            **parts.source.take_counts(),
        }

    def _note(self, draft: StepDraft) -> None:
        metrics, report = self._parts.metrics, draft.report
        metrics.version.set(self.version)
        metrics.steps.inc()
        metrics.samples.inc(draft.num_samples)
        metrics.groups_trained.inc(draft.num_groups)
        metrics.training_seconds.inc(report.training_s)
        metrics.step_seconds.observe(report.training_s)
        for name, value in report.metrics.items():
            metrics.step.labels(name).set(value)
        metrics.cost.labels("", "learner").inc(report.learner_cost)
        for each in report.costs:
            kind = metrics.kind_label.of(each.kind)
            for use, money in (("busy", each.busy), ("idle", each.idle), ("standby", each.standby)):
                metrics.cost.labels(kind, use).inc(money)
        self._committer.tell_progress()
        logger.debug("Version %d: reward %.3f", self.version, report.metrics.get("reward_mean", math.nan))

    # Evaluations

    def _publish_evaluations(self) -> None:
        """Publish results while the publication thread is idle. No checkpoint holds them: a lost result is evaluated again."""
        publication = self._parts.publication
        if publication.is_busy or not (results := self._parts.evaluations.take()):
            return
        publication.wait()
        publication.submit(Publication(version=self.version, outbox=tuple((EVALS, result) for result in results)))

    def _conclude_evaluations(self, stop: StopSignal) -> None:
        """After the last step: wait for the evaluations that are due. If the run is stopped, the next session does them."""
        publication = self._parts.publication
        if self._committer.is_complete:
            self._parts.intake.read_on()
            while not stop.is_set() and not self._parts.evaluations.wait(_WAIT_S):
                publication.wait()
                self._publish_evaluations()
        publication.wait()
        self._publish_evaluations()
        publication.wait()


class Waiting:
    """The learner's wait for its next batch: reports its cause, and trajectories without rewards. Used from the learner's thread."""

    def __init__(self, intake: Intake, heartbeat: ProgressHeartbeat, notices: Notices, clock: Clock) -> None:
        self._intake = intake
        self._heartbeat = heartbeat
        self._clock = clock
        self._standstill = Standstill(notices, _PLACE, clock)
        self._name_at_s = 0.0
        self._has_named = False

    def begin(self) -> None:
        """Note that the wait begins now: at the start, or after a step."""
        self._standstill.moves()

    def tell(self, version: int, *, is_paused: bool) -> None:
        """Write a notice with the cause, if the wait is long."""

        def why() -> str:
            cause = "The run is paused by an order." if is_paused else self._intake.describe_wait()
            return f"The learner is at version {version}. {cause}"

        self._standstill.stands("No batch", why)

    def name_missing_rewards(self) -> None:
        """Tell the reward applications which trajectories lack a reward, so that they score these again. Raises TransportError."""
        now_s = self._clock.monotonic_s()
        if now_s < self._name_at_s:
            return
        self._name_at_s = now_s + STANDSTILL_S
        missing = self._intake.missing_rewards()
        where = list(dict.fromkeys(place for places in missing.values() for place in places))[:_MAX_NAMED]
        if where or self._has_named:
            self._heartbeat.miss(sorted(missing), where)
        self._has_named = bool(where)
