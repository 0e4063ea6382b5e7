"""The feeder: allocates the run's seqs without end and writes a request for each, where and when a worker can use it.

    progress, weights, workers, control ──wake──▶ feeder thread: committed offsets → room → pace → one transaction of requests

One allocator per run. Two feeders must never allocate the same seqs, so every batch of requests is a small transaction
under the transactional id `feeder`. A feeder takes that id over before it reads the log; from then on the cluster refuses every batch of
an earlier feeder, so the log holds all that the earlier one ever wrote. A transaction costs some milliseconds per batch.

Threads: `run` blocks its caller; the views' threads wake it. It waits for `progress` to move. Only while the window is full does it ask the
cluster for the workers' committed offsets: every 20 ms, and less often while nothing moves, down to every 2 s in long steps.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import ClusterUnreachable, ProducerFenced, TransactionAborted
from echo_bus.reading.view import CompactedView
from echo_bus.requests.dispatch import LeastLagChooser, PartitionWork, WorkObserver
from echo_bus.requests.issued_requests import IssuedRequest, read_issued
from echo_bus.requests.roster import Roster
from echo_core.bottleneck import Place, Use
from echo_core.closed_seqs import plan_resume
from echo_core.dispatch import DispatchState, may_issue, required_version
from echo_core.patience import Patience, StepPace
from echo_core.policy import StalenessPolicy
from echo_core.work_shares import horizon_of
from echo_rollout.metrics import FeederMetrics
from echo_rollout.open_seqs import Ledger, OpenRequests, OpenSeqs, dispatch_state
from echo_runtime.notices import Notices, Standstill
from echo_runtime.places import PlaceTimes
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Progress, Purpose, RolloutRequest, RunState, WeightManifest, WorkerStatus, ordered_state
from echo_schemas.topics import REQUESTS, weights_key
from echo_settings import Settings
from echo_settings.rules import training_sampling
from echo_tasks.prompts import TextCodec
from echo_tasks.requests import RequestBuilder
from echo_tasks.task import Task

logger = logging.getLogger(__name__)

# One batch is one transaction: large enough for a step of groups, small enough that a pause of the run is obeyed at once.
_MAX_BATCH = 64
# Pauses between two queries of the workers' offsets while the window is full; longer where a step, and so a group, takes long.
_FULL_LEAST_S, _FULL_MOST_S, _FULL_LONGEST_S = 0.02, 0.2, 2.0
_LOOKS_A_STEP = 100
_IDLE_S = 0.25
# Pause between two searches for lost requests: they are few, and no step waits for a particular one.
_LOOK_S = 1.0
# After so many new requests one lost request is written; else lost seqs would stay open while there are new ones.
_NEW_PER_LOST = 8
# Limit for reading the issued requests when taking over.
_READ_S = 60.0


class Why(StrEnum):
    """Why a seq is written again."""

    MISSING = "missing"
    LOST = "lost"


class Hold(StrEnum):
    """What keeps the feeder from issuing."""

    UNPUBLISHED = "unpublished"
    PAUSED = "paused"
    PACE = "pace"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class _Issue:
    """One request to write: `resends` counts how often its seq was or may have been issued before, `why` says why its request was lost."""

    purpose: Purpose
    seq: int
    resends: int = 0
    why: str = ""


@dataclass(kw_only=True, eq=False)
class Feeder:
    """Issues requests until `stop`. Used from one thread; `wake` may be called from any.

    `run_feeder` opens and closes what it works with. The views follow the log. `writer` is not started yet: `take_over` does it, before
    anything is read.
    """

    settings: Settings
    policy: StalenessPolicy
    task: Task
    prompts: TextCodec
    bus: Bus
    writer: TransactionalWriter
    observer: WorkObserver
    progress: CompactedView[Progress]
    weights: CompactedView[WeightManifest]
    workers: CompactedView[WorkerStatus]
    control: CompactedView[Control]
    places: PlaceTimes
    notices: Notices
    metrics: FeederMetrics
    clock: Clock

    def __post_init__(self) -> None:
        self._run_id = self.settings.run.name
        self._builder = RequestBuilder(run_id=self._run_id, task=self.task, seed=self.settings.run.seed, prompts=self.prompts)
        self._sampling = training_sampling(self.settings.rollout)
        self._wake = threading.Event()
        self._open = OpenSeqs()
        self._requests = OpenRequests(self._open)
        # Seqs that were never written although seqs above them were; lost seqs; probes.
        self._missing: deque[_Issue] = deque()
        self._lost: deque[_Issue] = deque()
        self._probes: deque[_Issue] = deque()
        # New requests since the last lost one was written.
        self._num_new = 0
        self._next_seq = 0
        self._num_partitions = self.observer.num_partitions()
        self._chooser = LeastLagChooser(self._num_partitions, depth=self.settings.rollout.depth)
        self._ledger = Ledger(self._num_partitions)
        self._last_probe = -1
        self._resumed = False
        self._full_wait_s = _FULL_LEAST_S
        self._standstill = Standstill(self.notices, "requests", self.clock)
        self._said_s = self._count_at_s = -math.inf
        self._roster = Roster(heartbeat_s=self.settings.rollout.heartbeat_s, group_size=self.settings.rollout.group_size)
        self._steps = StepPace()
        self._patience = Patience(least_s=self.settings.rollout.request_timeout_s, num_steps=self.policy.budget + 1)
        self._looked_s = self.clock.monotonic_s()
        for view in (self.progress, self.weights, self.control):
            view.on_change(lambda _key, _record: self._wake.set())
        # Look again when workers or their partitions change.
        self._roster.follow(self.workers, self.clock, self._wake.set)

    def run(self, stop: StopSignal) -> None:
        """Issue until `stop` is set or the run is told to stop.

        Raises UserError when another feeder has taken the run over, TransportError when the cluster does not let it go on.
        """
        stop.on_set(self._wake.set)
        while not stop.is_set() and self._run_state() is not RunState.STOPPING:
            started_s = self.clock.monotonic_s()
            hold = self.advance()
            now_s = self.clock.monotonic_s()
            self.places.add(Place.REQUEST, Use.BUSY, now_s - started_s)
            self._say(hold)
            if hold is not None:
                self._wait(hold)
                use = Use.EMPTY if hold in {Hold.UNPUBLISHED, Hold.PAUSED} else Use.BLOCKED
                self.places.add(Place.REQUEST, use, self.clock.monotonic_s() - now_s)
        logger.info("The feeder of %s ends before seq %d", self._run_id, self._next_seq)

    def advance(self) -> Hold | None:
        """One round, without waiting: take over, and from then on write what may be written now. Returns what holds the rest back.

        For callers that wait themselves; `run` adds the waiting. Raises as `run`.
        """
        if not self._resumed:
            self._resumed = self._take_over()
            return None if self._resumed else Hold.UNPUBLISHED
        return self._issue()

    def _take_over(self) -> bool:
        """Fence an earlier feeder, then read in the log what it issued. False while no version is published: nothing may be issued."""
        manifest = self.weights.get(weights_key(self._run_id, None))
        if manifest is None:
            return False
        self.writer.start()
        progress = self.progress.get(self._run_id)
        floor = max(manifest.next_seq, 0 if progress is None else progress.next_seq)
        if progress is not None:
            self._requests.hear(progress)
        shown: dict[int, tuple[int, int, int]] = {}
        for request in self._read_issued(manifest, floor):
            ordinal = self._ledger.written(request.partition, request.offset)
            self._chooser.observe({request.partition: PartitionWork(first_open=0, end=ordinal + 1)})
            if request.purpose is Purpose.PROBE:
                self._last_probe = max(self._last_probe, request.seq)
            elif request.purpose is Purpose.TRAIN:
                # The newest of a seq counts; partitions are read in no order.
                shown[request.seq] = max(shown.get(request.seq, (0, 0, 0)), (request.resends, ordinal, request.partition))
        resume = plan_resume(floor, shown.keys() | self._open.seen)
        now_s = self.clock.monotonic_s()
        for seq, (resends, ordinal, partition) in sorted(shown.items(), key=lambda item: item[1][1]):
            if floor <= seq < resume.next_seq:
                self._requests.issued(seq, partition, ordinal, now_s, resends=resends, is_ours=False)
        self._missing.extend(_Issue(Purpose.TRAIN, seq, resends=1) for seq in resume.missing)
        self.metrics.reissued.labels(Why.MISSING.value).inc(len(resume.missing))
        self._next_seq = resume.next_seq
        self._observe()
        logger.info("Issuing from seq %d; %d below it are written again", resume.next_seq, len(resume.missing))
        return True

    def _read_issued(self, manifest: WeightManifest, floor: int) -> list[IssuedRequest]:
        """The requests of the run that can still matter. The first snapshot of a run tells when the run began."""
        is_first = manifest.parent is None or manifest.parent_run is not None
        with closing(self.bus.look([REQUESTS])) as reader:
            return read_issued(
                reader,
                floor=floor,
                committed=self.observer.committed(self._num_partitions),
                since_ms=manifest.created_ms if is_first else None,
                patience=Deadline.after(_READ_S, self.clock),
            )

    def _issue(self) -> Hold | None:
        """Write what may be written now, in one transaction. Returns what holds it back where nothing was."""
        if self._run_state() is RunState.PAUSED:
            return Hold.PAUSED
        progress = self.progress.get(self._run_id)
        if progress is not None:
            self._requests.hear(progress)
            self._steps.saw(progress.version, self.clock.monotonic_s())
        self._plan_lost()
        self._plan_probe(progress)
        if not self._has_work(dispatch_state(progress, self._open.undecided)):
            return Hold.PACE
        self._observe()
        self._share()
        batch, hold = self._choose(progress)
        if batch:
            self._full_wait_s = _FULL_LEAST_S
            self._write(batch)
        return hold

    def _choose(self, progress: Progress | None) -> tuple[list[tuple[_Issue, int, RolloutRequest]], Hold | None]:
        """The next requests with their partitions, at most a batch; and what keeps the batch from being full."""
        batch: list[tuple[_Issue, int, RolloutRequest]] = []
        num_new = 0
        while len(batch) < _MAX_BATCH:
            state = dispatch_state(progress, self._open.undecided + num_new)
            if not self._has_work(state):
                return batch, Hold.PACE
            partition = self._chooser.choose()
            if partition is None:
                return batch, Hold.WINDOW
            issue = self._next_issue(state)
            num_new += issue.purpose is Purpose.TRAIN and not issue.why
            batch.append((issue, partition, self._request(issue, state)))
        return batch, None

    def _has_work(self, state: DispatchState) -> bool:
        """Whether there is anything that may be written now."""
        while self._lost and not self._open.is_missed(self._lost[0].seq):
            self._lost.popleft()
        return bool(self._probes or self._lost) or may_issue(state, self.policy)

    def _next_issue(self, state: DispatchState) -> _Issue:
        """Probes first, then missing and new seqs; a lost one after `_NEW_PER_LOST` of these, or when pace lets nothing new in."""
        if self._probes:
            return self._probes.popleft()
        if self._lost and (self._num_new >= _NEW_PER_LOST or not may_issue(state, self.policy)):
            self._num_new = 0
            return self._lost.popleft()
        self._num_new += 1
        while self._missing:
            issue = self._missing.popleft()
            # Skip a seq of which the learner has read a record meanwhile.
            if not self._open.is_answered(issue.seq):
                return issue
        self._next_seq += 1
        return _Issue(Purpose.TRAIN, self._next_seq - 1)

    def _write(self, batch: list[tuple[_Issue, int, RolloutRequest]]) -> None:
        """All of `batch` or nothing of it. Raises UserError if another feeder has taken over."""
        metrics = self.metrics
        try:
            with self.writer.transaction() as transaction:
                receipts = [transaction.publish(REQUESTS, request, partition=partition) for _, partition, request in batch]
        except ProducerFenced as exc:
            raise UserError(
                f"Another feeder has taken over the seqs of run {self._run_id!r} (or a transaction of this one timed out); this one ends.",
                hint="Run one feeder per run. If no other runs, start this one again: it goes on where the log ends.",
            ) from exc
        except TransactionAborted as exc:
            logger.warning("%d requests were rolled back and are written again: %s", len(batch), exc)
            metrics.aborted.inc()
            for issue, partition, _ in reversed(batch):
                self._chooser.failed(partition)
                where = self._probes if issue.purpose is Purpose.PROBE else self._lost if issue.why else self._missing
                where.appendleft(issue)
            return
        now_s = self.clock.monotonic_s()
        for (issue, partition, request), receipt in zip(batch, receipts, strict=True):
            if receipt.where is None:
                raise ClusterUnreachable(f"A committed request of seq {issue.seq} has no coordinates.")
            ordinal = self._ledger.written(partition, receipt.where.offset)
            self._chooser.acknowledged(partition, ordinal)
            metrics.issued.labels(issue.purpose.value).inc()
            logger.debug(
                "Group %s is requested, at %s[%s]", request.group_id, partition, receipt.where.offset, extra={"group": request.group_id}
            )
            if issue.purpose is Purpose.TRAIN:
                self._requests.issued(issue.seq, partition, ordinal, now_s, resends=issue.resends)
            if issue.why:
                said = "The request for seq %d was lost (%s); it is issued again"
                logger.warning(said, issue.seq, issue.why, extra={"group": request.group_id})
                metrics.reissued.labels(Why.LOST.value).inc()
        metrics.next_seq.set(self._next_seq)

    def _request(self, issue: _Issue, state: DispatchState) -> RolloutRequest:
        rollout, now_ms, is_probe = self.settings.rollout, self.clock.time_ms(), issue.purpose is Purpose.PROBE
        patience_s = self._patience.limit_s(self._steps.step_s)
        group_size = rollout.probe_size if is_probe else rollout.group_size
        return replace(
            self._builder.build(issue.seq, issue.purpose, group_size=group_size, sampling=self._sampling),
            required_version=issue.seq if is_probe else required_version(state, self.policy),
            exact=is_probe,
            learner_version=state.version,
            issued_ms=now_ms,
            deadline_ms=None if patience_s is None else now_ms + int(patience_s * 1000),
            resends=issue.resends,
        )

    def _plan_probe(self, progress: Progress | None) -> None:
        """One probe of the newest published version; versions that were published and passed meanwhile have none."""
        published = 0 if progress is None else progress.published
        if self.settings.rollout.probe_size and published > self._last_probe:
            self._last_probe = published
            self._probes.append(_Issue(Purpose.PROBE, published))

    def _plan_lost(self) -> None:
        """Every `_LOOK_S` find the requests that are lost."""
        now_s = self.clock.monotonic_s()
        if now_s - self._looked_s < _LOOK_S:
            return
        self._looked_s = now_s
        self._observe()
        alone = self._roster.shares(now_s).alone
        found = self._requests.lost(now_s, self._patience.limit_s(self._steps.step_s), self._roster.active_s(now_s), alone=alone)
        self._lost = deque(_Issue(Purpose.TRAIN, seq, resends=resends + 1, why=why) for seq, resends, why in found)

    def _share(self) -> None:
        """Share requests out among partitions by the measured speed of the workers that own them, new partitions included."""
        now_s = self.clock.monotonic_s()
        shares = self._roster.shares(now_s)
        if now_s >= self._count_at_s and any(max(owner.partitions) >= self._num_partitions for owner in shares.owners):
            self._count_at_s = now_s + _LOOK_S
            with suppress(ClusterUnreachable):
                self._num_partitions = self.observer.num_partitions()
                self._chooser.grow(self._num_partitions)
                self._ledger.grow(self._num_partitions)
        self._chooser.share(shares.owners, horizon_s=horizon_of(self.policy.budget, self._steps.step_s), alone=shares.alone)

    def _observe(self) -> None:
        """Read the workers' committed offsets. Without an answer the window stays as it is."""
        try:
            committed = self.observer.committed(self._num_partitions)
        except ClusterUnreachable as exc:
            logger.warning("The workers' offsets are not known at the moment: %s", exc)
            return
        now_s = self.clock.monotonic_s()
        done = {partition: self._ledger.finish_below(partition, offset) for partition, offset in committed.items()}
        for partition, num_done in done.items():
            for took_s in self._requests.finished(partition, num_done, now_s):
                self._patience.finished(took_s)
        self._chooser.observe(
            {partition: PartitionWork(first_open=num_done, end=self._ledger.num_written(partition)) for partition, num_done in done.items()}
        )
        self.metrics.outstanding.set(self._chooser.outstanding)

    def _say(self, hold: Hold | None) -> None:
        """Report a standstill that only the feeder sees. Waiting for pace is none while a worker is ready."""
        now_s, outstanding = self.clock.monotonic_s(), self._chooser.outstanding
        if now_s - self._said_s < _LOOK_S:
            return
        self._said_s = now_s
        match hold:
            case Hold.UNPUBLISHED:
                self._standstill.stands("No request was issued", lambda: "No version is published yet. Look at the learner's log.")
            case Hold.PAUSED:
                self._standstill.stands("No request was issued", lambda: "The run is paused by an order.")
            case Hold.PACE | Hold.WINDOW if outstanding and not self._roster.shares(now_s).owners:
                self._standstill.stands(
                    "No worker was ready", lambda: f"{outstanding} requests wait for one. Look at the workers' logs, or start some."
                )
            case _:
                self._standstill.moves()

    def _wait(self, hold: Hold) -> None:
        """Wait for a change that may end `hold`, at most for a moment."""
        if hold is Hold.WINDOW:
            self._wake.wait(self._full_wait_s)
            most_s = max(_FULL_MOST_S, min(_FULL_LONGEST_S, (self._steps.step_s or 0.0) / _LOOKS_A_STEP))
            self._full_wait_s = min(most_s, self._full_wait_s * 1.5)
        else:
            self._wake.wait(_IDLE_S)
        self._wake.clear()

    def _run_state(self) -> RunState:
        return ordered_state(self.control.get(f"{self._run_id}/run"))
