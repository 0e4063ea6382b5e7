"""Puts a worker together: clients, engine, the stations of a group, membership in the consumer group. `worker.py` tells what they do."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from echo_bus.client.publisher import Publisher
from echo_bus.group.consumer import ConsumerLoop
from echo_bus.group.state import LoopLimits, PartitionKey
from echo_bus.reading.view import CompactedView
from echo_bus.requests.dispatch import WORKERS_GROUP
from echo_bus.requests.request_reply import ReplyServer
from echo_rollout.awaited import Failing
from echo_rollout.engines.engine import Engine
from echo_rollout.evaluation_sampling import EvaluationSampler
from echo_rollout.exact_versions import ExactVersions
from echo_rollout.generation import GroupSampler, Sample
from echo_rollout.group_work import GroupWork
from echo_rollout.heartbeat import GenerationTime, WorkerHeartbeat, first_status
from echo_rollout.holding import EARLY_ASKED_S, EARLY_S, Holding
from echo_rollout.in_hand_notes import DeathRecord, InHandNotes
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.membership import Membership
from echo_rollout.price import PriceFile
from echo_rollout.publishing import TrajectoryPublisher, trajectory_profile
from echo_rollout.receipts import Receipts
from echo_rollout.refusing import Refusals
from echo_rollout.undelivered import Undelivered
from echo_rollout.weights.sources import published_manifest
from echo_rollout.worker_parts import WorkerParts
from echo_schemas.records import Purpose, WeightManifest
from echo_schemas.topics import REPLIES, REQUESTS, weights_key
from echo_tasks.task import Task

logger = logging.getLogger(__name__)

# Shares of [run] drain_s: to finish groups in hand, then to wait until the log has acknowledged them. The rest is for leaving the group,
# closing the engine and ending the interpreter.
FINISH_SHARE, ACKNOWLEDGE_SHARE = 0.4, 0.1
# Groups in hand, as a multiple of those that the engine works on: the others wait for room, or for their acknowledgement.
_IN_HAND = 2
# A request that was put off is offered again when one in hand is done, or after so long if none is in hand (a suspect waits to be alone).
_BUSY_RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCrew:
    """The parts that take, do and deliver groups."""

    intake: RequestIntake
    holding: Holding
    notes: InHandNotes
    groups: GroupWork
    membership: Membership


def open_heartbeat(parts: WorkerParts, stack: ExitStack, statuses: Publisher) -> WorkerHeartbeat:
    """Not started yet; `stack` closes it, which publishes GONE."""
    rollout, generation = parts.settings.rollout, GenerationTime(parts.places, parts.clock)
    price = PriceFile(Path(rollout.price_file), parts.notices).now if rollout.price_file else None
    status = first_status(
        run_id=parts.settings.run.name,
        worker_id=parts.worker_id,
        engine=parts.engine_name,
        price_per_hour=rollout.price_per_hour if price is None else price(),
        kind=parts.kind,
        capacity=_IN_HAND * rollout.groups_in_flight,
    )
    heartbeat = WorkerHeartbeat(statuses, status, generation, parts.clock, every_s=rollout.heartbeat_s, price=price)
    return stack.enter_context(closing(heartbeat))


def open_crew(
    parts: WorkerParts,
    stack: ExitStack,
    heartbeat: WorkerHeartbeat,
    weights: CompactedView[WeightManifest],
    engine: ExactVersions,
    undelivered: Undelivered,
    failing: Failing,
) -> WorkerCrew:
    """On the asyncio loop; no request is taken yet. `stack` closes what is opened."""
    settings, key = parts.settings, weights_key(parts.settings.run.name, None)
    publisher = stack.enter_context(closing(parts.bus.publisher(trajectory_profile(settings))))
    publishing = TrajectoryPublisher(publisher, worker_id=parts.worker_id, engine=parts.engine_name, places=parts.places)
    stack.enter_context(closing(publishing)).start()
    holding = Holding(
        settings.rollout.groups_in_flight,
        installed=lambda: engine.installed,
        floor=lambda: 0 if (newest := weights.get(key)) is None else newest.next_seq,
        metrics=parts.metrics,
        clock=parts.clock,
        published=lambda: None if (newest := weights.get(key)) is None else newest.version,
        early_s=EARLY_ASKED_S if settings.run.mode == "sequential" else EARLY_S,
    )
    notes = InHandNotes(session=uuid.uuid4().hex[:8])
    server = ReplyServer(heartbeat.publisher, REPLIES, parts.bus)
    receipts = Receipts(
        server, worker_id=parts.worker_id, installed=lambda: engine.installed, clock=parts.clock, on_error=failing.note
    )  # fmt: skip
    intake = RequestIntake(
        parts.codec,
        DeathRecord(parts.journal, notes),
        capacity=_IN_HAND * settings.rollout.groups_in_flight,
        vocabulary=parts.vocabulary,
        max_length=settings.policy.max_length,
        take=lambda work: failing.on_loop(lambda: groups.begin(work)),
        clock=parts.clock,
        receipts=receipts,
        is_stuck=lambda: undelivered.is_stuck or not membership.takes,
        num_early=lambda: holding.num_early,
    )
    groups = GroupWork(
        intake=intake,
        holding=holding,
        notes=notes,
        sample=_sampling(parts, engine, stack),
        publishing=publishing,
        receipts=receipts,
        refusals=Refusals(parts.worker_id, parts.notices, resends=settings.rollout.resends),
        undelivered=undelivered,
        heartbeat=heartbeat,
        metrics=parts.metrics,
        clock=parts.clock,
        on_error=failing.note,
    )
    membership = _open_membership(parts, groups, publisher, failing)
    return WorkerCrew(intake=intake, holding=holding, notes=notes, groups=groups, membership=membership)


def _open_membership(parts: WorkerParts, groups: GroupWork, publisher: Publisher, failing: Failing) -> Membership:
    """`publisher`: for dead letters. Each stay in the group has a consumer loop of its own."""
    settings = parts.settings

    def has(keys: frozenset[PartitionKey]) -> None:
        """On the poll thread: the worker has these partitions from now on."""
        partitions = {partition for _, partition in keys}
        groups.heartbeat.has(partitions)
        if moved := groups.intake.keep(partitions):
            logger.info("%d requests that had not begun went with their partitions to another worker", len(moved))
            failing.on_loop(lambda: groups.drop(moved))

    def open_loop() -> ConsumerLoop:
        loop = parts.bus.consumer(
            [REQUESTS],
            WORKERS_GROUP,
            groups.intake,
            publisher,
            next_generation=settings.kafka.group_protocol == "consumer",
            static_member=parts.worker_id,
            is_prompt=settings.coordinator.enabled,
            limits=LoopLimits(drain_s=(FINISH_SHARE + ACKNOWLEDGE_SHARE) * settings.run.drain_s, busy_retry_s=_BUSY_RETRY_S),
        )
        loop.keep_notes(groups.notes)
        loop.on_assignment(has)
        return loop

    membership = Membership(open_loop, may_join=parts.may_join, on_error=failing.note)
    groups.notes.changed = membership.commit_soon
    groups.holding.on_early = membership.offer_again
    return membership


def _sampling(parts: WorkerParts, engine: ExactVersions, stack: ExitStack) -> Callable[[Work], Coroutine[Any, Any, list[Sample]]]:
    """The function that samples a group: under the newest version, or under the one that an evaluation names."""

    def open_sampler(engine: Engine, task: Task) -> GroupSampler:
        return GroupSampler(
            engine,
            task,
            parts.codec,
            vocabulary=parts.vocabulary,
            on_empty=parts.metrics.empty.inc,
            max_turn_tokens=parts.settings.rollout.max_turn_tokens,
        )

    ordinary = stack.enter_context(closing(open_sampler(engine, parts.task)))
    evaluating = stack.enter_context(
        closing(
            EvaluationSampler(
                engine,
                parts.source,
                parts.folder,
                manifest_of=partial(published_manifest, parts.bus, parts.settings.run.name),
                tasks=parts.evaluation_tasks,
                own_task=parts.task,
                open_sampler=lambda task: open_sampler(parts.engine, task),
            )
        )
    )

    async def sample(work: Work) -> list[Sample]:
        if work.request.purpose is Purpose.EVAL:
            return await evaluating.sample(work.request, work.prompt)
        return await ordinary.sample(work.prompt)

    return sample
