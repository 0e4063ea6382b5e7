"""What a session of the learner works with: threads and clients, opened here and closed in the order in which they depend on one another.

reader ─▶ check ─▶ intake ─▶ source ─▶ the loop      publication ─▶ tells trust, heartbeat and evaluations what is in the log
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

from echo_bus.client import profiles
from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_bus.requests.broadcast import BroadcastTimer
from echo_bus.requests.roster import Roster
from echo_bus.tracing import Tracer
from echo_core.assembly import GroupAssembler
from echo_learner.agreement import Agreement
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.placement import SnapshotPlacement
from echo_learner.commit.publication import Publication, PublicationThread, SnapshotWriter
from echo_learner.commit.rivals import Rivals
from echo_learner.commit.run_record import write_run
from echo_learner.costs import HeardCosts
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.evaluation.setup import obey_orders, open_evaluations
from echo_learner.heartbeat import ProgressHeartbeat
from echo_learner.intake import AdmissionLimits, Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.record_check import RecordCheck
from echo_learner.reward_watch import RewardWatch
from echo_learner.source import BatchSource, open_source
from echo_learner.start import Beginning
from echo_learner.training.batch import SignalSource
from echo_learner.training.config import assembly_limits, logprob_tolerance
from echo_learner.training.ranks import Trainer
from echo_learner.trust import WorkerTrust
from echo_runtime.notices import Notices
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess
from echo_schemas.columns import pack_seqs
from echo_schemas.records import Control, Progress, WorkerStatus
from echo_schemas.topics import REQUESTS_DEAD, REWARDS, TRAJECTORIES, WORKERS
from echo_settings import Settings
from echo_settings.rules import staleness_policy
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import ChatCodec
from echo_tasks.task import reads_texts


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """What the stages share; all opened, and closed, by whoever made it."""

    settings: Settings
    trainer: Trainer
    task: SignalSource
    intake: Intake
    source: BatchSource
    trust: WorkerTrust
    agreement: Agreement
    rewards: RewardWatch
    store: CheckpointStore
    publication: PublicationThread
    heartbeat: ProgressHeartbeat
    rivals: Rivals
    broadcast: BroadcastTimer
    costs: HeardCosts
    evaluations: Evaluations
    control: CompactedView[Control]
    places: PlaceTimes
    notices: Notices
    metrics: LearnerMetrics
    clock: Clock
    tracer: Tracer | None = None


@contextmanager
def open_parts(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, beginning: Beginning, prompts: ChatCodec
) -> Iterator[LearnerParts]:
    """Everything but the intake's thread runs when this yields. `prompts`: the base model's text codec."""
    bus, settings, clock = process.bus, process.settings, process.clock
    state = beginning.state
    with ExitStack() as stack:
        publisher = stack.enter_context(closing(bus.publisher(profiles.PRODUCER_LATENCY)))
        chunks = stack.enter_context(closing(bus.publisher(profiles.PRODUCER_BLOBS)))
        workers = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
        control = stack.enter_context(closing(bus.orders()))
        roster = Roster(heartbeat_s=settings.rollout.heartbeat_s, group_size=settings.rollout.group_size)
        roster.follow(workers, clock)
        broadcast = BroadcastTimer(roster, clock, metrics.broadcast_seconds.observe)
        workers.on_change(broadcast.on_worker)
        evaluations = stack.enter_context(closing(open_evaluations(settings, bus, metrics, clock)))
        trust = WorkerTrust(metrics, clock, tolerance=logprob_tolerance(settings))
        for manifest in beginning.manifests.values():
            trust.published(manifest.version, manifest.sha256)
        task = load_task(settings.task.name, settings.task.options)
        assembler = GroupAssembler(settings.run.name, state.terms, assembly_limits(settings), state=state.assembly if state.id else None)
        check = RecordCheck(settings, task, prompts)
        reader = bus.reader(
            [TRAJECTORIES, REWARDS, REQUESTS_DEAD],
            # Waited for: the next checkpoint counts what was read as accounted for, and this is its only account.
            on_invalid=bus.dead_letters(publisher).send,
            check=check,
            # A sequential learner has nothing to do until the last reward is there; the other one has a step to compute meanwhile.
            profile=profiles.READER if settings.run.mode == "sequential" else profiles.GATHERING_READER,
        )
        intake = Intake(
            reader,
            assembler,
            policy=staleness_policy(settings),
            limits=AdmissionLimits(vocabulary=trainer.vocabulary, max_length=settings.policy.max_length),
            trust=trust,
            evaluations=evaluations,
            places=process.places,
            metrics=metrics,
            clock=clock,
            max_bytes=settings.learner.buffer_mb << 20,
            keeps_texts=reads_texts(task),
        )
        stack.enter_context(closing(intake))
        heartbeat = ProgressHeartbeat(publisher, _first_progress(beginning), clock, closed_from=intake.closed_from, read=intake.read_from)
        stack.enter_context(closing(heartbeat))
        opening = open_source(
            process, state, intake, assembler=assembler, roster=roster, publisher=publisher, prompts=prompts, metrics=metrics
        )  # fmt: skip
        source = stack.enter_context(opening)
        check.is_issued = source.is_issued
        rewards = RewardWatch(
            samples_per_step=settings.learner.groups_per_step * settings.rollout.group_size,
            deadline_s=settings.scoring.deadline_s,
            applications=settings.scoring.applications,
            notices=process.notices,
            clock=clock,
        )
        intake.call_on_reward(rewards.note, rewards.counts)

        def on_published(publication: Publication) -> None:
            if publication.snapshot is not None:
                metrics.published.set(publication.version)
                trust.published(publication.version, publication.snapshot.sha256)
                heartbeat.published(publication.version)
                evaluations.published(publication.version, is_last=0 < settings.learner.steps <= publication.version)

        snapshots = SnapshotWriter(
            settings.run.name,
            blobs=bus.blob_writer(chunks),
            placement=SnapshotPlacement(bus, settings),
            codec=bus.codec,
            clock=clock,
            writes_deltas=settings.weights.delta,
        )
        publication = PublicationThread(
            beginning.writer, snapshots, places=process.places, metrics=metrics, clock=clock, on_published=on_published
        )  # fmt: skip
        stack.enter_context(closing(publication))
        progress = stack.enter_context(closing(sessions.watch_progress(bus)))
        rivals = Rivals(progress, beginning.session, lambda: sessions.read_tip(bus, settings.run.name).claim)
        write_run(publisher, settings, created_ms=clock.time_ms())
        heartbeat.start()
        evaluations.start()
        control.on_change(lambda key, order: obey_orders(evaluations, settings, {key: order} if order is not None else {}))
        obey_orders(evaluations, settings, control.items())
        yield LearnerParts(
            settings=settings,
            trainer=trainer,
            task=task,
            intake=intake,
            source=source,
            trust=trust,
            agreement=_agreement(settings, trainer, metrics),
            rewards=rewards,
            store=beginning.store,
            publication=publication,
            heartbeat=heartbeat,
            rivals=rivals,
            broadcast=broadcast,
            costs=HeardCosts(workers, clock),
            evaluations=evaluations,
            control=control,
            places=process.places,
            notices=process.notices,
            metrics=metrics,
            clock=clock,
            tracer=bus.tracer,
        )


def _agreement(settings: Settings, trainer: Trainer, metrics: LearnerMetrics) -> Agreement:
    return Agreement(trainer, metrics, versions=staleness_policy(settings).budget + 2, max_tokens=settings.learner.micro_batch_tokens)


def _first_progress(beginning: Beginning) -> Progress:
    state, current = beginning.state, beginning.current
    return Progress(
        run_id=state.run_id,
        session=beginning.session,
        version=state.version,
        published=0 if current is None else current.version,
        groups_trained=state.groups_trained,
        groups_dropped=state.groups_dropped,
        groups_ready=0,
        next_seq=state.assembly.floor,
        closed=pack_seqs(state.assembly.floor, state.assembly.closed),
        time_ms=0,
    )
