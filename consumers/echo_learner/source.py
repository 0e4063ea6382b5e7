"""Where the learner's batches come from: groups that a feeder asked for, or groups that the learner itself asks for each step.

live        a feeder asks, far ahead    ─▶ intake ─▶ a batch as soon as enough groups are ready
sequential  the learner asks, each step ─▶ intake ─▶ the batch that was asked for (`sequential/asking.py`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Protocol

from echo_bus.client.publisher import Publisher
from echo_bus.requests.roster import Roster
from echo_core.assembly import GroupAssembler
from echo_core.batch_choice import ChosenGroup
from echo_core.policy import Admission
from echo_learner.commit.learner_state import LearnerState
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.record_check import CountedRequests, IsIssued
from echo_learner.sequential.setup import SEQUENTIAL, close_other_mode, open_asking
from echo_runtime.process import RoleProcess
from echo_schemas.records import RewardTerm
from echo_settings.rules import staleness_policy
from echo_tasks.prompts import TextCodec


class BatchSource(Protocol):
    """Used from the learner's thread; `is_issued` from any."""

    @property
    def needs_newest(self) -> bool:
        """Whether batches come only after the newest version is published."""

    def begin(self, version: int, sha256: str) -> None:
        """Note that the snapshot of `version`, with this checksum, is in the log or will soon be."""

    def next_batch(self, version: int, terms: tuple[RewardTerm, ...], timeout_s: float) -> tuple[ChosenGroup, ...] | None:
        """The groups of the batch of `version`, taken out of the assembler; None after `timeout_s`, or after `Intake.wake`.

        Raises UserError if no batch can come; TransportError.
        """

    def is_issued(self, seq: int) -> bool:
        """Whether `seq` may have been requested."""

    def take_counts(self) -> Mapping[str, float]:
        """Counts of requests and replies for the step's report, since the last call."""


class LiveBatches:
    """Groups that a feeder, or the offline producer, has asked for."""

    needs_newest = False

    def __init__(self, intake: Intake, is_issued: IsIssued) -> None:
        self.next_batch = intake.next_batch
        self.is_issued = is_issued

    def begin(self, version: int, sha256: str) -> None:
        """Nothing to do: samples of any version within the budget are trained."""

    def take_counts(self) -> Mapping[str, float]:
        """None: the learner sends no requests."""
        return {}


@contextmanager
def open_source(
    process: RoleProcess,
    state: LearnerState,
    intake: Intake,
    *,
    assembler: GroupAssembler,
    roster: Roster,
    publisher: Publisher,
    prompts: TextCodec,
    metrics: LearnerMetrics,
) -> Iterator[BatchSource]:
    """The source of the run's mode. Open seqs of the other mode are closed once the log is read."""
    settings = process.settings
    left_over = close_other_mode(process.bus, settings, state, intake, process.clock)
    if settings.run.mode == SEQUENTIAL:
        with open_asking(
            process, left_over, intake, session=state.session, roster=roster, publisher=publisher, prompts=prompts, metrics=metrics
        ) as asking:
            yield asking
        return
    policy = staleness_policy(settings)
    if policy.admission is Admission.PACE or settings.offline.episodes:
        yield LiveBatches(intake, lambda seq: policy.may_be_issued(seq, assembler.num_closed))
        return
    with closing(CountedRequests(process.bus, lambda: assembler.floor)) as counted:
        yield LiveBatches(intake, counted)
