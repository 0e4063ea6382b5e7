"""The threads and clients of a learner's session: each is opened after those that it uses, and closed before them.

reader ─▶ check ─▶ intake ─▶ source ─▶ the loop      publication ─▶ tells trust, heartbeat and evaluations of published versions
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from echo_bus.client import profiles
from echo_bus.client.publisher import Publisher
from echo_bus.reading.reader import LogReader
from echo_bus.reading.view import CompactedView
from echo_bus.requests.broadcast import BroadcastTimer
from echo_bus.requests.roster import Roster
from echo_core.assembly import GroupAssembler
from echo_learner.admission import AdmissionLimits
from echo_learner.agreement import Agreement
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.placement import SnapshotPlacement
from echo_learner.commit.publication import Publication, PublicationThread, SnapshotWriter
from echo_learner.commit.run_record import write_run
from echo_learner.commit.session import Rivals
from echo_learner.costs import HeardCosts
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.evaluation.setup import obey_orders, open_evaluations
from echo_learner.heartbeat import ProgressHeartbeat
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.partition_watch import PartitionWatch
from echo_learner.record_check import RecordCheck
from echo_learner.reward_watch import RewardWatch
from echo_learner.source import BatchSource, open_source
from echo_learner.start.beginning import Beginning
from echo_learner.training.batch import SignalSource
from echo_learner.training.config import assembly_limits, logprob_tolerance
from echo_learner.training.ranks import Trainer
from echo_learner.trust import WorkerTrust
from echo_runtime.opening import held_by_quota
from echo_runtime.process import RoleProcess
from echo_schemas.columns import pack_seqs
from echo_schemas.records import Control, Progress, WorkerStatus
from echo_schemas.topics import REQUESTS_DEAD, REWARDS, TRAJECTORIES, WORKERS
from echo_settings.rules import staleness_policy
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import ChatCodec
from echo_tasks.task import reads_texts


class _Closes(Protocol):
    def close(self) -> None: ...


Part = TypeVar("Part", bound=_Closes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """The parts that the stages share. `open_parts` opens and closes them."""

    process: RoleProcess
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
    partitions: PartitionWatch
    broadcast: BroadcastTimer
    costs: HeardCosts
    evaluations: Evaluations
    control: CompactedView[Control]
    metrics: LearnerMetrics


@contextmanager
def open_parts(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, beginning: Beginning, prompts: ChatCodec
) -> Iterator[LearnerParts]:
    """Everything but the intake's thread runs when this yields. `prompts`: the base model's text codec."""
    with ExitStack() as stack:
        yield _Opening(process, trainer, metrics, beginning, prompts, stack).parts()


@dataclass(frozen=True, slots=True)
class _Opening:
    """Opens the parts of one session; `stack` closes them."""

    process: RoleProcess
    trainer: Trainer
    metrics: LearnerMetrics
    beginning: Beginning
    prompts: ChatCodec
    stack: ExitStack

    def parts(self) -> LearnerParts:
        """Open the parts, then start those that publish."""
        process, metrics, beginning, keep = self.process, self.metrics, self.beginning, self._keep
        bus, settings, clock, state = process.bus, process.settings, process.clock, beginning.state
        publisher = keep(bus.publisher(profiles.PRODUCER_LATENCY))
        chunks = keep(bus.publisher(profiles.PRODUCER_BLOBS))
        workers = keep(bus.view(WORKERS, WorkerStatus))
        control = keep(bus.orders())
        roster = Roster(heartbeat_s=settings.rollout.heartbeat_s, group_size=settings.rollout.group_size)
        roster.follow(workers, clock)
        broadcast = BroadcastTimer(roster, clock, metrics.broadcast_seconds.observe)
        workers.on_change(broadcast.on_worker)
        evaluations = keep(open_evaluations(settings, bus, metrics, clock))
        trust = self._trust()
        task = load_task(settings.task.name, settings.task.options)
        check = RecordCheck(settings, task, self.prompts)
        assembler = GroupAssembler(settings.run.name, state.terms, assembly_limits(settings), state=state.assembly if state.id else None)
        reader = self._reader(publisher, check)
        intake = keep(self._intake(reader, assembler, trust, evaluations, keeps_texts=reads_texts(task)))
        progress = _first_progress(beginning)
        heartbeat = keep(
            ProgressHeartbeat(
                publisher,
                progress,
                clock,
                closed_from=intake.closed_from,
                read=lambda base: {**intake.read_from(base), "held": held_by_quota(process.notices)},
            )
        )
        opening = open_source(
            process, state, intake, assembler=assembler, roster=roster, publisher=publisher, prompts=self.prompts, metrics=metrics
        )  # fmt: skip
        source = self.stack.enter_context(opening)
        check.is_issued = source.is_issued
        rewards = self._rewards(intake)
        publication = keep(self._publication(chunks, trust, heartbeat, evaluations))
        watched = keep(sessions.watch_progress(bus))
        write_run(publisher, settings, created_ms=clock.time_ms())
        heartbeat.start()
        evaluations.start()
        control.on_change(lambda key, order: obey_orders(evaluations, settings, {key: order} if order is not None else {}))
        obey_orders(evaluations, settings, control.items())
        return LearnerParts(
            process=process,
            trainer=self.trainer,
            task=task,
            intake=intake,
            source=source,
            trust=trust,
            agreement=Agreement(
                self.trainer,
                metrics,
                versions=staleness_policy(settings).budget + 2,
                max_tokens=settings.learner.micro_batch_tokens,
            ),
            rewards=rewards,
            store=beginning.store,
            publication=publication,
            heartbeat=heartbeat,
            rivals=Rivals(watched, beginning.session, lambda: sessions.read_tip(bus, settings.run.name).claim),
            partitions=PartitionWatch(publisher, sum(name == TRAJECTORIES.name for name, _ in reader.places), clock),
            broadcast=broadcast,
            costs=HeardCosts(workers, clock),
            evaluations=evaluations,
            control=control,
            metrics=metrics,
        )

    def _keep(self, part: Part) -> Part:
        return self.stack.enter_context(closing(part))

    def _trust(self) -> WorkerTrust:
        trust = WorkerTrust(self.metrics, self.process.clock, tolerance=logprob_tolerance(self.process.settings))
        for manifest in self.beginning.manifests.values():
            trust.published(manifest.version, manifest.sha256)
        return trust

    def _reader(self, publisher: Publisher, check: RecordCheck) -> LogReader:
        bus = self.process.bus
        return bus.reader(
            [TRAJECTORIES, REWARDS, REQUESTS_DEAD],
            # The reader waits for the dead letter: the next checkpoint lies behind the record, which nothing else accounts for.
            on_invalid=bus.dead_letters(publisher).send,
            check=check,
            # A sequential learner waits for the last reward; an asynchronous one computes a step meanwhile.
            profile=profiles.READER if self.process.settings.run.mode == "sequential" else profiles.GATHERING_READER,
        )

    def _intake(
        self, reader: LogReader, assembler: GroupAssembler, trust: WorkerTrust, evaluations: Evaluations, *, keeps_texts: bool
    ) -> Intake:
        process, settings = self.process, self.process.settings
        return Intake(
            reader,
            assembler,
            policy=staleness_policy(settings),
            limits=AdmissionLimits(vocabulary=self.trainer.vocabulary, max_length=settings.policy.max_length, experts=self.trainer.experts),
            trust=trust,
            evaluations=evaluations,
            places=process.places,
            metrics=self.metrics,
            clock=process.clock,
            max_bytes=settings.learner.buffer_mb << 20,
            keeps_texts=keeps_texts,
        )

    def _rewards(self, intake: Intake) -> RewardWatch:
        settings = self.process.settings
        rewards = RewardWatch(
            samples_per_step=settings.learner.groups_per_step * settings.rollout.group_size,
            deadline_s=settings.scoring.deadline_s,
            applications=settings.scoring.applications,
            notices=self.process.notices,
            clock=self.process.clock,
        )
        intake.call_on_reward(rewards.note, rewards.counts)
        return rewards

    def _publication(
        self, chunks: Publisher, trust: WorkerTrust, heartbeat: ProgressHeartbeat, evaluations: Evaluations
    ) -> PublicationThread:
        process, metrics, settings = self.process, self.metrics, self.process.settings

        def on_published(publication: Publication) -> None:
            if publication.snapshot is not None:
                metrics.published.set(publication.version)
                trust.published(publication.version, publication.snapshot.sha256)
                heartbeat.published(publication.version)
                evaluations.published(publication.version, is_last=0 < settings.learner.steps <= publication.version)

        snapshots = SnapshotWriter(
            settings.run.name,
            blobs=process.bus.blob_writer(chunks),
            placement=SnapshotPlacement(process.bus, settings),
            codec=process.bus.codec,
            clock=process.clock,
            writes_deltas=settings.weights.delta,
        )
        return PublicationThread(
            self.beginning.writer, snapshots, places=process.places, metrics=metrics, clock=process.clock, on_published=on_published
        )


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
