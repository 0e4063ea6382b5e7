"""Makes trained steps durable in checkpoints, then public in the log.

    trained step ─▶ outbox ─▶ checkpoint (durable: the step exists) ─▶ submit {reports, drops, snapshot} ─▶ the log
    drops, no batch ─▶ checkpoint of the same weights ─▶ {drops}        ▲ waits for the publication before, which ran beside the training

Used from the learner's thread; the publication has its own.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_core.groups import AssemblyState
from echo_learner.commit.learner_state import LearnerState, checkpoint_id
from echo_learner.commit.publication import Publication
from echo_learner.commit.snapshot import SnapshotFiles, file_names
from echo_learner.orders import RunOrders
from echo_learner.parts import LearnerParts
from echo_learner.start.beginning import Beginning
from echo_learner.step import StepDraft, seal
from echo_learner.training.config import meaning_of
from echo_schemas.records import Drop, Record, StepReport, WeightKind, group_id_of
from echo_schemas.topics import DROPS, EVALS, STEPS, Topic
from echo_settings.rules import staleness_policy

logger = logging.getLogger(__name__)

# Seconds that drops wait for a step to be committed with. Under pace a dropped group makes room only once its drop is public.
_DROPS_WAIT_S = 1.0
# Committing drops takes at most a tenth of the time without a batch.
_DROPS_PAUSE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """The newest version in the log, as the next manifest's parent."""

    version: int
    sha256: str


class Committer:
    """Owns the state that checkpoints hold."""

    def __init__(self, parts: LearnerParts, beginning: Beginning, orders: RunOrders) -> None:
        """The trainer holds the checkpoint that `beginning.state` is, or a fresh policy."""
        self._parts = parts
        self._settings = parts.process.settings
        self._orders = orders
        self._period = staleness_policy(parts.process.settings).publication_period
        self._state = beginning.state
        self._beginning = beginning
        self._claim = beginning.claim
        self._session = beginning.session
        self._published: _Published | None = None
        self._outbox: list[tuple[Topic, Record]] = list(beginning.still_owed)
        # Trained since the last checkpoint.
        self._drafts: list[StepDraft] = []
        self._num_drop_checkpoints = 0
        self._drops_since_s: float | None = None
        self._drops_took_s = 0.0
        self._has_published = self._has_swept = False
        self.checkpoint_s = 0.0
        """Seconds until the last checkpoint was durable."""

    @property
    def version(self) -> int:
        """Training steps completed."""
        return self._state.version

    @property
    def parent(self) -> str | None:
        """The checkpoint that the next step starts from."""
        return self._state.step_checkpoint or None

    @property
    def is_published(self) -> bool:
        """Whether the snapshot of this version is in the log, or on its way."""
        return self._published is not None and self._published.version == self.version

    @property
    def is_complete(self) -> bool:
        return 0 < self._settings.learner.steps <= self.version

    def begin(self) -> None:
        """Publish a version for workers to serve: the first one of a fresh run; of a resumed run, what a crash kept from the log."""
        parts = self._parts
        parts.metrics.version.set(self.version)
        parts.metrics.staleness_budget.set(self._settings.staleness.budget)
        self._published = self._publish_rest()
        if self._beginning.is_fresh:
            self._commit(publish=True)
            parts.publication.wait()
            return
        if self._published is not None:
            parts.metrics.published.set(self._published.version)
        if self._published is not None and self.is_published:
            parts.agreement.remember(self.version)
            parts.source.begin(self.version, self._published.sha256)
        elif parts.source.needs_newest:
            # The run was asynchronous before, and need not have published this version.
            self._commit(publish=True)

    def take(self, draft: StepDraft) -> None:
        """Take a trained step: the version is one higher. Save and publish it if the settings say so for this version."""
        self._drafts.append(draft)
        self._state = replace(self._state, version=self.version + 1, groups_trained=self._state.groups_trained + draft.num_groups)
        publish = self.version % self._period == 0 or self.version == self._settings.learner.steps
        if publish or self.version % self._settings.checkpoint.every == 0:
            self._commit(publish=publish)

    def finish(self) -> None:
        """Make the steps since the last checkpoint durable, and wait for the publication under way.

        Publishes the last version if it was not known to be the last when it was trained (the settings want fewer steps now).
        """
        if self._drafts or (self.is_complete and not self.is_published):
            self._commit(publish=self.is_complete)
        self._parts.publication.wait()

    def drops_are_due(self) -> bool:
        """Whether drops have waited long enough for a step."""
        parts = self._parts
        if parts.publication.is_busy or not (parts.intake.has_drops or any(topic is DROPS for topic, _ in self._outbox)):
            return False
        now_s = parts.process.clock.monotonic_s()
        if self._drops_since_s is None:
            self._drops_since_s = now_s
        return now_s - self._drops_since_s >= max(_DROPS_WAIT_S, _DROPS_PAUSE * self._drops_took_s)

    def commit_drops(self) -> None:
        """Make drops public while no step comes: a checkpoint of the same weights, then one transaction {drops, the checkpoint's name}.

        Without the checkpoint a restarted learner would open the dropped groups again. Reports that wait for a snapshot are included.
        """
        parts = self._parts
        parts.publication.wait()
        started_s = parts.process.clock.monotonic_s()
        before = self._state
        if self._drafts:
            self._commit(publish=False)
        else:
            self._settle()
            self._num_drop_checkpoints += 1
            self._state = replace(
                self._state,
                id=checkpoint_id(self.version, self._session, self._num_drop_checkpoints),
                parent=before.id,
                session=self._session,
                terms=self._orders.terms,
                meaning=meaning_of(self._settings),
                created_ms=parts.process.clock.time_ms(),
                weights_of=before.step_checkpoint,
                weights_ms=before.weights_ms or before.created_ms,
            )
            parts.store.save_beside(self._state, tuple(self._outbox), before.id)
        named = replace(self._claim, tip_version=self.version, tip_checkpoint=self._state.id, time_ms=parts.process.clock.time_ms())
        parts.publication.submit(Publication(version=self.version, outbox=(*self._outbox, (STEPS, named))))
        parts.publication.wait()
        num_drops, self._outbox = sum(topic is DROPS for topic, _ in self._outbox), []
        if before.weights_of is not None and before.session == self._session:
            # Neither the log nor a checkpoint names it any more.
            parts.store.remove(before.id)
        self._drops_took_s = parts.process.clock.monotonic_s() - started_s
        self.tell_progress()
        logger.info("%d drops are public without a step, in the checkpoint %s", num_drops, self._state.id)

    def tell_progress(self) -> None:
        state = self._state
        self._parts.heartbeat.update(
            version=self.version,
            groups_trained=state.groups_trained,
            groups_dropped=state.groups_dropped,
            groups_ready=self._parts.intake.num_ready,
            next_seq=state.assembly.floor,
        )

    # A checkpoint

    def _commit(self, *, publish: bool) -> None:
        """Make the steps so far durable, and if `publish`, hand them and a snapshot to the publication thread."""
        parts = self._parts
        parts.publication.wait()
        started_s = parts.process.clock.monotonic_s()
        assembly = self._settle()
        name = checkpoint_id(self.version, self._session)

        def take(folder: Path) -> SnapshotFiles:
            taken = parts.trainer.snapshot(self.version, folder)
            # A snapshot that cannot be published must not become durable: every start would try to publish it, and fail.
            parts.publication.check(taken.num_bytes)
            return taken

        snapshot = parts.store.take_snapshot(name, take) if publish else None
        self._seal(name, assembly, snapshot)
        self._state = replace(
            self._state,
            id=name,
            parent=self._state.id or None,
            session=self._session,
            published=None if self._published is None else self._published.version,
            terms=self._orders.terms,
            meaning=meaning_of(self._settings),
            snapshot=None if snapshot is None else snapshot.sha256,
            created_ms=parts.process.clock.time_ms(),
            weights_of=None,
            weights_ms=0,
        )
        parts.store.save(self._state, tuple(self._outbox), snapshot, parts.trainer.save)
        self.checkpoint_s = parts.process.clock.monotonic_s() - started_s
        parts.metrics.checkpoint_seconds.observe(self.checkpoint_s)
        parts.metrics.checkpoint_bytes.set(parts.store.num_bytes(name))
        with suppress(OSError):
            # Only a metric: the checkpoint itself was written, and the next one fails with the reason.
            parts.metrics.checkpoint_free_bytes.set(parts.store.free_bytes())
        if snapshot is not None:
            self._publish(snapshot, assembly)

    def _settle(self) -> AssemblyState:
        """The intake's state for the next checkpoint; its drops are added to the outbox."""
        parts = self._parts
        assembly, decisions = parts.intake.settle()
        run_id, now_ms = self._settings.run.name, parts.process.clock.time_ms()
        for decision in decisions:
            drop = Drop(
                run_id=run_id,
                group_id=group_id_of(run_id, decision.seq),
                seq=decision.seq,
                what=decision.where,
                attempt=decision.attempt,
                why=decision.why,
                version=decision.version,
                learner_version=self.version,
                num_tokens=decision.num_tokens,
                detail=decision.detail,
                worker_id=decision.worker_id,
                time_ms=now_ms,
            )
            self._outbox.append((DROPS, drop))
            what = "Group" if drop.what is None else f"The sample at {drop.what.partition}[{drop.what.offset}] of group"
            logger.debug("%s %s is dropped (%s) %s", what, drop.group_id, drop.why.value, drop.detail, extra={"group": drop.group_id})
            parts.metrics.dropped.labels(decision.why.value, "group" if decision.where is None else "trajectory").inc()
        dropped = sum(decision.where is None for decision in decisions)
        self._state = replace(self._state, groups_dropped=self._state.groups_dropped + dropped, assembly=assembly)
        self._drops_since_s = None
        return assembly

    def _seal(self, name: str, assembly: AssemblyState, snapshot: SnapshotFiles | None) -> None:
        """Turn each draft into the report that the checkpoint `name` holds. The report of this version, if an earlier checkpoint without a
        snapshot holds it, is sealed again: the next step starts from the new checkpoint."""
        reports = [draft.report for draft in self._drafts]
        kept: list[tuple[Topic, Record]] = []
        for topic, record in self._outbox:
            if isinstance(record, StepReport) and record.version == self.version:
                reports.append(record)
            else:
                kept.append((topic, record))
        for report in reports:
            sha256 = snapshot.sha256 if snapshot is not None and report.version == self.version else None
            kept.append((STEPS, seal(report, name, assembly, sha256)))
        self._outbox, self._drafts = kept, []

    # A publication

    def _publish(self, snapshot: SnapshotFiles, assembly: AssemblyState) -> None:
        parts = self._parts
        parts.agreement.remember(self.version)
        parts.broadcast.ready(self.version)
        before = self._published
        # A learner that is never idle publishes evaluation results only here.
        results = tuple((EVALS, result) for result in parts.evaluations.take())
        parts.publication.submit(
            Publication(
                version=self.version,
                outbox=(*self._outbox, *results),
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
                # This session's steps are in the log, so no learner can go on from another session's branch.
                parts.store.prune_branches(self._settings.run.name, self._state.parent)
                self._has_swept = True
        self._published = _Published(version=self.version, sha256=snapshot.sha256)
        self._has_published = True
        self._outbox = []
        parts.source.begin(self.version, snapshot.sha256)

    def _publish_rest(self) -> _Published | None:
        """Publish what a crash kept from the log, with the same bytes. Returns the newest snapshot in the log afterwards, if any."""
        beginning, saved, current = self._beginning, self._beginning.state, self._beginning.current
        newest = None if current is None else _Published(version=current.version, sha256=current.sha256)
        if beginning.is_fresh or saved.snapshot is None or (newest is not None and newest.version >= saved.version):
            return newest
        kind = WeightKind(self._settings.policy.update)
        snapshot = beginning.store.load_snapshot(saved, kind, file_names(kind))
        self._parts.publication.submit(
            Publication(
                version=saved.version,
                outbox=beginning.store.load_outbox(saved.id),
                snapshot=snapshot,
                session=self._session,
                checkpoint=saved.id,
                next_seq=saved.assembly.floor,
                **_parent_of(saved, newest),
            )
        )
        self._parts.publication.wait()
        logger.info("Published version %d, which was trained but not in the log", saved.version)
        return _Published(version=saved.version, sha256=snapshot.sha256)


def _parent_of(saved: LearnerState, newest: _Published | None) -> dict[str, Any]:
    """The snapshot before, as fields of a Publication: of this run, or of the run that it was forked from."""
    if newest is not None:
        return {"parent": newest.version, "parent_sha256": newest.sha256}
    if saved.origin is not None:
        return {"parent": saved.origin.version, "parent_sha256": saved.origin.sha256, "parent_run": saved.origin.run_id}
    return {}
