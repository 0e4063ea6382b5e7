"""Opens the parts with which a sequential learner sends requests, and closes the seqs that the other mode left open."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager

from echo_bus.bus import Bus
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock
from echo_bus.requests.dispatch import LeastLagChooser
from echo_bus.requests.roster import Roster
from echo_core.closed_seqs import ClosedSeqs, plan_resume
from echo_learner.commit.learner_state import LearnerState
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.sequential.asking import BatchRequests
from echo_learner.sequential.open_requests import LeftOver, find_left_over, read_requests
from echo_learner.sequential.replies import ReplyInbox
from echo_learner.sequential.requesting import RequestLedger
from echo_runtime.process import RoleProcess
from echo_schemas.records import DropReason
from echo_schemas.topics import REPLIES, REQUESTS
from echo_settings import Settings
from echo_settings.rules import training_sampling
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import TextCodec
from echo_tasks.requests import RequestBuilder

logger = logging.getLogger(__name__)

SEQUENTIAL = "sequential"


def close_other_mode(bus: Bus, settings: Settings, state: LearnerState, intake: Intake, clock: Clock) -> LeftOver:
    """Drop the open seqs that were requested in the other mode; return those of this mode.

    Reads `requests` only where there may be any: after a switch, and in sequential mode after every start.
    """
    is_sequential = settings.run.mode == SEQUENTIAL
    before = state.meaning.get("run.mode", settings.run.mode)
    closed = ClosedSeqs(state.assembly.floor, state.assembly.closed)
    if not state.id or (before == settings.run.mode and not is_sequential):
        return LeftOver(next_seq=plan_resume(closed.floor, closed.above).next_seq, on_their_way=(), again=(), other_mode=())
    # A sequential learner has no open seq at a step's checkpoint; a feeder runs ahead of it.
    since_ms = (state.weights_ms or state.created_ms) if before == SEQUENTIAL else None
    found = find_left_over(
        read_requests(bus, since_ms), closed, version=state.version, is_sequential=is_sequential, now_ms=clock.time_ms()
    )  # fmt: skip
    intake.drop_once_read(
        found.other_mode, DropReason.MODE_SWITCH, f"It was asked for in {'asynchronous' if is_sequential else SEQUENTIAL} mode."
    )  # fmt: skip
    if found.other_mode:
        logger.info("The run goes on in %s mode; %d open seqs of the other are closed", settings.run.mode, len(found.other_mode))
    return found


@contextmanager
def open_asking(
    process: RoleProcess,
    left_over: LeftOver,
    intake: Intake,
    *,
    session: str,
    roster: Roster,
    publisher: Publisher,
    prompts: TextCodec,
    metrics: LearnerMetrics,
) -> Iterator[BatchRequests]:
    """The source of batches in sequential mode. `left_over`: requests of earlier sessions; `session` made the checkpoint."""
    bus, settings, clock = process.bus, process.settings, process.clock

    def share(chooser: LeastLagChooser) -> None:
        """Share the work among the live workers by their speed; if none reports its partitions, among all partitions equally."""
        shares = roster.shares(clock.monotonic_s())
        chooser.share(shares.owners, alone=shares.alone)

    num_partitions = publisher.num_partitions(REQUESTS)
    groups = settings.learner.groups_per_step
    heard: list[BatchRequests] = []
    inbox = ReplyInbox(bus.reader([REPLIES]), lambda reply: heard[0].hear(reply))
    with closing(inbox):
        asking = BatchRequests(
            builder=RequestBuilder(
                run_id=settings.run.name,
                task=load_task(settings.task.name, settings.task.options),
                seed=settings.run.seed,
                prompts=prompts,
            ),
            group_size=settings.rollout.group_size,
            probe_size=settings.rollout.probe_size,
            sampling=training_sampling(settings.rollout),
            timeout_s=settings.rollout.request_timeout_s,
            publisher=publisher,
            inbox=inbox,
            reply_topic=bus.namespace.topic(REPLIES),
            chooser=LeastLagChooser(num_partitions, depth=max(settings.rollout.depth, math.ceil((groups + 1) / num_partitions))),
            num_partitions=num_partitions,
            share=share,
            holders=lambda partition: roster.holders(partition, clock.monotonic_s()),
            intake=intake,
            metrics=metrics,
            clock=clock,
            ledger=RequestLedger(
                num_groups=groups,
                group_size=settings.rollout.group_size,
                max_resends=settings.rollout.resends,
                session=f"{session}-{clock.time_ms()}",
                next_seq=left_over.next_seq,
                again=left_over.again,
            ),
        )
        heard.append(asking)
        for ask in left_over.on_their_way:
            asking.ledger.adopt(ask)
        inbox.start()
        yield asking
