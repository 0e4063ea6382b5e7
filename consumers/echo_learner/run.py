"""The learner's process: a look at the run, a trainer, then sessions until one ends well.

look (may it go on?) ─▶ trainer up (slow: torch, model) ─▶ session: look, fence, claim, tip, checkpoint ─▶ train ─▶ end
                                                             ▲ fenced, and the newest claim is still ours: once more
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from echo_bus import profiles
from echo_bus.blobs import BlobWriter
from echo_bus.bus import Bus
from echo_bus.errors import ProducerFenced, TransportError
from echo_bus.process import RoleProcess, without_collection
from echo_bus.reader import LogReader
from echo_bus.roster import Roster
from echo_bus.settings import Settings
from echo_bus.settings.rules import staleness_policy
from echo_bus.transactions import TransactionalWriter
from echo_core.assembly import GroupAssembler
from echo_core.policy import Admission
from echo_learner.broadcast import BroadcastTimer
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore, LearnerState, Outbox
from echo_learner.commit.placement import Placement
from echo_learner.commit.publication import Publication, PublicationThread, SnapshotWriter
from echo_learner.commit.resuming import choose_checkpoint, choose_resumption, load_trainer, look, since_it_began
from echo_learner.commit.rivals import Rivals
from echo_learner.commit.run_record import write_run
from echo_learner.commit.session import Tip
from echo_learner.commit.snapshot import file_names
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.evaluation.setup import kept_manifests, obey_orders, open_evaluations, published_manifests
from echo_learner.heartbeat import Heartbeat
from echo_learner.intake import AdmissionLimits, Intake
from echo_learner.learner import Learner, LearnerParts, Published
from echo_learner.metrics import LearnerMetrics
from echo_learner.record_check import CountedRequests, IsIssued, RecordCheck
from echo_learner.reward_watch import RewardWatch
from echo_learner.sequential.setup import open_asking
from echo_learner.training.config import assembly_limits, ignored_rewards, logprob_tolerance, meaning_of, reward_terms, trainer_config
from echo_learner.training.ranks import Trainer, follow, is_follower, open_trainer
from echo_learner.trust import WorkerTrust
from echo_schemas.columns import pack_seqs
from echo_schemas.errors import UserError
from echo_schemas.records import DropReason, Progress, SessionClaim, WeightKind, WeightManifest, WorkerStatus
from echo_schemas.topics import REQUESTS_DEAD, REWARDS, TRAJECTORIES, WORKERS
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import ChatCodec, PromptCodec, check_positions
from echo_tasks.task import reads_texts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """What a session begins with. `state.id` is empty for a run that never began; `manifests`: the snapshots in the log by version."""

    store: CheckpointStore
    writer: TransactionalWriter
    claim: SessionClaim
    state: LearnerState
    manifests: Mapping[int, WeightManifest]
    tip: Tip

    @property
    def session(self) -> str:
        """The session's name."""
        return self.claim.session

    @property
    def current(self) -> WeightManifest | None:
        """The newest snapshot in the log."""
        return self.manifests[max(self.manifests)] if self.manifests else None


def run_learner(process: RoleProcess, *, takeover: bool = False, skip: bool = False) -> None:
    """Train the run of the settings until its steps are done or `process.stop` is set. `takeover`: from a process that is alive. `skip`:
    close the seqs whose records the log has lost, and go on.

    Raises UserError where the run cannot go on as it is, with what to do; TransportError where the cluster does not let it.
    """
    settings = process.settings
    base = resolve_base(settings.policy.base)
    check_positions(base, settings.policy.max_length)
    config = trainer_config(settings, base)
    if is_follower():
        follow(config)
        return
    metrics = LearnerMetrics(process.registry)
    # Whoever may not go on learns it now, and not when the trainer is up.
    claim = look(process.bus, settings, sessions.read_tip(process.bus, settings.run.name), takeover=takeover, skip=skip).tip.claim
    with without_collection():
        trainer = open_trainer(config, settings.learner.ranks)
    with closing(trainer):
        logger.info("The trainer is up")
        silent = "" if claim is None else claim.session
        train_in_sessions(process, trainer, metrics, PromptCodec(base), takeover=takeover, skip=skip, silent=silent)


def train_in_sessions(
    process: RoleProcess,
    trainer: Trainer,
    metrics: LearnerMetrics,
    prompts: ChatCodec,
    *,
    takeover: bool = False,
    skip: bool = False,
    silent: str = "",
) -> None:
    """Sessions until one ends well. A fatal transactional error does not prove a successor: a new claim does.

    `prompts`: the base model's text codec. `silent`: a session that was found dead a moment ago, and is not listened for again.
    """
    bus, run_id = process.bus, process.settings.run.name
    known: frozenset[str] = frozenset()
    while True:
        session, tip = sessions.new_session(process.start), sessions.read_tip(bus, run_id)
        if known and tip.claim is not None and tip.claim.session not in known:
            _refuse_successor(tip.claim, None)
        known |= {session} if tip.claim is None else {session, tip.claim.session}
        try:
            how = _How(prompts=prompts, takeover=takeover, skip=skip, silent=silent)
            _run_session(process, trainer, metrics, tip, session, how)
        except ProducerFenced as exc:
            _refuse_successor(sessions.find_successor(bus, run_id, process.stop, known=known), exc)
            logger.warning("The transactional producer died without a successor (%s); starting the session over", exc)
            takeover = True
        except TransportError as exc:
            # A process frozen for longer than something waits for the cluster hears of that before it hears of whoever came after it.
            with suppress(TransportError):
                _refuse_successor(sessions.find_successor(bus, run_id, process.stop, known=known), exc)
            raise
        else:
            return


def _refuse_successor(successor: SessionClaim | None, cause: TransportError | None) -> None:
    """Raise UserError, with what brought it to light, if another session owns the namespace now."""
    if successor is not None:
        whose = f"process {successor.pid} on {successor.host}, session {successor.session}"
        raise UserError(f"Another learner has taken this namespace over: {whose}. This one ends.") from cause


@dataclass(frozen=True, slots=True, kw_only=True)
class _How:
    """What a session was told to do in spite of what it finds, and its codec; see `train_in_sessions`."""

    prompts: ChatCodec
    takeover: bool
    skip: bool
    silent: str


def _run_session(process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, tip: Tip, session: str, how: _How) -> None:
    bus, settings = process.bus, process.settings
    run_id = settings.run.name
    seen = look(bus, settings, tip, takeover=how.takeover, skip=how.skip, silent=how.silent)
    store, identities, tip, resumption = seen.store, seen.identities, seen.tip, seen.resumption
    with ExitStack() as stack:
        writer = stack.enter_context(closing(bus.transactions("learner")))
        writer.start()
        # Fencing rolled back or completed whatever a predecessor had open.
        before, tip = tip, sessions.read_tip(bus, run_id)
        # Whoever claimed between our look and our fencing may have trained already what our folder does not hold. It finds no successor's
        # claim, and goes on in a session of its own.
        if tip.claim is not None and (before.claim is None or tip.claim.session != before.claim.session):
            _refuse_successor(tip.claim, None)
        claim = sessions.claim_namespace(writer, bus, tip, run_id=run_id, session=session, takeover=how.takeover)
        tip = sessions.read_tip(bus, run_id)
        skew_s = sessions.clock_skew_s(tip)
        metrics.clock_skew.set(skew_s)
        sessions.warn_of_clock(skew_s)
        newest = choose_checkpoint(store, tip, settings)
        if (newest and newest.id) != (resumption and resumption.state.id):
            resumption = choose_resumption(bus, store, tip, settings, identities, skip=how.skip)
        saved = None if resumption is None else resumption.state
        store.anchor()
        if saved is not None:
            load_trainer(trainer, store, saved)
        opened = _Opened(
            store=store,
            writer=writer,
            claim=claim,
            state=saved or _fresh_state(bus, settings, session, identities),
            manifests=published_manifests(bus, run_id),
            tip=tip,
        )
        parts = stack.enter_context(_open_parts(process, trainer, metrics, opened, how.prompts))
        if resumption is not None:
            parts.intake.drop_once_read(resumption.lost, DropReason.LOST, "The log lost its records before it was trained.")
        learner = Learner(parts, opened.state, claim=claim, published=_publish_rest(parts, opened), outbox=_still_unpublished(opened))
        parts.intake.start(opened.state.assembly)
        if saved is None:
            learner.begin()
        else:
            learner.resume()
            logger.info("Going on from version %d (checkpoint %s)", saved.version, saved.id)
            if ignored := ignored_rewards(saved.terms, settings):
                logger.warning("%s", ignored)
            _resume_evaluations(parts, bus)
        learner.run(process.stop)


def _resume_evaluations(parts: LearnerParts, bus: Bus) -> None:
    """What an earlier session was asked for and did not finish, of what is kept."""
    settings = parts.settings
    if settings.eval:
        kept = kept_manifests(bus, settings.run.name)
        newest = max(kept, default=0)
        parts.evaluations.resume(newest, kept, is_complete=0 < settings.learner.steps <= newest)


def _fresh_state(bus: Bus, settings: Settings, session: str, identities: dict[str, str]) -> LearnerState:
    """Version 0, before its checkpoint."""
    assembler = GroupAssembler(settings.run.name, (), assembly_limits(settings))
    return LearnerState(
        id="",
        parent=None,
        run_id=settings.run.name,
        session=session,
        version=0,
        published=None,
        groups_trained=0,
        groups_dropped=0,
        assembly=since_it_began(bus, assembler.state()),
        terms=reward_terms(settings),
        identities=identities,
        meaning=meaning_of(settings),
        snapshot=None,
        created_ms=0,
    )


def _publish_rest(parts: LearnerParts, opened: _Opened) -> Published | None:
    """Publish what a crash kept from the log, same records and same bytes; the newest snapshot in the log afterwards, if there is one."""
    saved, current = opened.state, opened.current
    newest = None if current is None else Published(version=current.version, sha256=current.sha256)
    if not saved.id or saved.snapshot is None or (newest is not None and newest.version >= saved.version):
        return newest
    kind = WeightKind(parts.settings.policy.update)
    snapshot = opened.store.load_snapshot(saved, kind, file_names(kind))
    parts.publication.submit(
        Publication(
            version=saved.version,
            outbox=opened.store.load_outbox(saved.id),
            snapshot=snapshot,
            session=opened.session,
            checkpoint=saved.id,
            next_seq=saved.assembly.floor,
            **_parent_of(saved, newest),
        )
    )
    parts.publication.wait()
    logger.info("Published version %d, which was trained but not in the log", saved.version)
    return Published(version=saved.version, sha256=snapshot.sha256)


def _parent_of(saved: LearnerState, newest: Published | None) -> dict[str, Any]:
    """The snapshot before, in the manifest's words: of this run, or of the one that it was forked from."""
    if newest is not None:
        return {"parent": newest.version, "parent_sha256": newest.sha256}
    if saved.origin is not None:
        return {"parent": saved.origin.version, "parent_sha256": saved.origin.sha256, "parent_run": saved.origin.run_id}
    return {}


def _still_unpublished(opened: _Opened) -> Outbox:
    """Records of the checkpoint that wait for the next publication: it lies between two published versions, or was made for drops."""
    saved, tip = opened.state, opened.tip
    if not saved.id or saved.id == tip.checkpoint:
        return ()
    is_owed = saved.weights_of is not None or (saved.snapshot is None and saved.version > tip.version)
    return opened.store.load_outbox(saved.id) if is_owed else ()


@contextmanager
def _open_parts(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, opened: _Opened, prompts: ChatCodec
) -> Iterator[LearnerParts]:
    """The learner's threads and clients, closed in the order in which they depend on one another."""
    bus, settings, state = process.bus, process.settings, opened.state
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(bus.publisher(profiles.PRODUCER_LATENCY)))
        chunks = stack.enter_context(closing(bus.publisher(profiles.PRODUCER_BLOBS)))
        workers = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
        control = stack.enter_context(closing(bus.orders()))
        roster = Roster(heartbeat_s=settings.rollout.heartbeat_s, group_size=settings.rollout.group_size)
        roster.follow(workers, process.clock)
        broadcast = BroadcastTimer(metrics, roster, process.clock)
        workers.on_change(broadcast.on_worker)
        evaluations = stack.enter_context(closing(open_evaluations(settings, bus, metrics, process.clock)))
        trust = WorkerTrust(metrics, process.clock, tolerance=logprob_tolerance(settings))
        for manifest in opened.manifests.values():
            trust.published(manifest.version, manifest.sha256)
        task = load_task(settings.task.name, settings.task.options)
        assembler = GroupAssembler(settings.run.name, state.terms, assembly_limits(settings), state=state.assembly if state.id else None)
        check = RecordCheck(settings, task, prompts, stack.enter_context(_issued_by_others(bus, settings, assembler)))
        # Waited for: the next checkpoint counts what was read as accounted for, and this is its only account.
        on_invalid = bus.dead_letters(publisher).send
        reader = bus.reader([TRAJECTORIES, REWARDS, REQUESTS_DEAD], on_invalid=on_invalid, check=check, profile=_reading_profile(settings))
        keeps_texts = reads_texts(task)
        intake = stack.enter_context(closing(_open_intake(process, trainer, reader, assembler, trust, evaluations, metrics, keeps_texts)))
        heartbeat = Heartbeat(publisher, _first_progress(opened), process.clock, closed_from=intake.closed_from, read=intake.read_from)
        stack.enter_context(closing(heartbeat))
        asking = stack.enter_context(open_asking(bus, settings, state, intake, roster, publisher, prompts, metrics, process.clock))
        if asking is not None:
            check.is_issued = asking.is_issued

        def on_published(publication: Publication) -> None:
            if publication.snapshot is not None:
                metrics.published.set(publication.version)
                trust.published(publication.version, publication.snapshot.sha256)
                heartbeat.published(publication.version)
                evaluations.published(publication.version, is_last=0 < settings.learner.steps <= publication.version)

        writer = bus.blob_writer(chunks)
        rewards = RewardWatch(
            samples_per_step=settings.learner.groups_per_step * settings.rollout.group_size,
            deadline_s=settings.scoring.deadline_s,
            applications=settings.scoring.applications,
            notices=process.notices,
            clock=process.clock,
        )
        intake.call_on_reward(rewards.note, rewards.counts)
        publication = stack.enter_context(closing(_open_publication(process, metrics, opened.writer, writer, on_published)))
        progress = stack.enter_context(closing(sessions.watch_progress(bus)))
        rivals = Rivals(progress, opened.session, lambda: sessions.read_tip(bus, settings.run.name).claim)
        write_run(publisher, settings, created_ms=process.clock.time_ms())
        heartbeat.start()
        evaluations.start()
        control.on_change(lambda key, order: obey_orders(evaluations, settings, {key: order} if order is not None else {}))
        obey_orders(evaluations, settings, control.items())
        yield LearnerParts(
            settings=settings,
            trainer=trainer,
            task=task,
            intake=intake,
            asking=asking,
            trust=trust,
            rewards=rewards,
            store=opened.store,
            publication=publication,
            heartbeat=heartbeat,
            rivals=rivals,
            broadcast=broadcast,
            evaluations=evaluations,
            control=control,
            places=process.places,
            notices=process.notices,
            metrics=metrics,
            clock=process.clock,
        )


@contextmanager
def _issued_by_others(bus: Bus, settings: Settings, assembler: GroupAssembler) -> Iterator[IsIssued]:
    """Which seqs a feeder, or the offline producer, may have issued. In sequential mode the learner knows it of itself."""
    policy = staleness_policy(settings)
    if policy.admission is Admission.PACE or settings.offline.episodes:
        yield lambda seq: policy.may_be_issued(seq, assembler.num_closed)
        return
    with closing(CountedRequests(bus, lambda: assembler.floor)) as counted:
        yield counted


def _reading_profile(settings: Settings) -> profiles.Properties:
    """A sequential learner has nothing to do until the last reward is there; the other one has a step to compute meanwhile."""
    return profiles.READER if settings.run.mode == "sequential" else profiles.GATHERING_READER


def _open_intake(
    process: RoleProcess,
    trainer: Trainer,
    reader: LogReader,
    assembler: GroupAssembler,
    trust: WorkerTrust,
    evaluations: Evaluations,
    metrics: LearnerMetrics,
    keeps_texts: bool,
) -> Intake:
    settings = process.settings
    return Intake(
        reader,
        assembler,
        policy=staleness_policy(settings),
        limits=AdmissionLimits(vocabulary=trainer.vocabulary, max_length=settings.policy.max_length),
        trust=trust,
        evaluations=evaluations,
        places=process.places,
        metrics=metrics,
        clock=process.clock,
        max_bytes=settings.learner.buffer_mb << 20,
        keeps_texts=keeps_texts,
    )


def _open_publication(
    process: RoleProcess,
    metrics: LearnerMetrics,
    writer: TransactionalWriter,
    blobs: BlobWriter,
    on_published: Callable[[Publication], None],
) -> PublicationThread:
    settings = process.settings
    placement = Placement(process.bus, settings)
    return PublicationThread(
        writer,
        SnapshotWriter(settings.run.name, blobs=blobs, placement=placement, codec=process.bus.codec, clock=process.clock),
        places=process.places,
        metrics=metrics,
        clock=process.clock,
        on_published=on_published,
    )


def _first_progress(opened: _Opened) -> Progress:
    state, current = opened.state, opened.current
    return Progress(
        run_id=state.run_id,
        session=opened.session,
        version=state.version,
        published=0 if current is None else current.version,
        groups_trained=state.groups_trained,
        groups_dropped=state.groups_dropped,
        groups_ready=0,
        next_seq=state.assembly.floor,
        closed=pack_seqs(state.assembly.floor, state.assembly.closed),
        time_ms=0,
    )
