"""The offline producer: the run's allocator in place of the feeder; groups of logged episodes go straight into `trajectories`.

    progress, control ──wake──▶ producer's thread: pace → one transaction of whole groups

Which group a seq gets is a pure function of the file, the run's seed and the seq, so it can be written again after any restart. Every batch
is a transaction under the feeder's transactional id. So a feeder or a second producer that starts later ends this one, and the other way
round: a run has one allocator. And a group is in the log whole or not at all.

Threads: `run` blocks its caller; the views' threads wake it.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import ProducerFenced, TransactionAborted
from echo_bus.reading.view import CompactedView
from echo_core.closed_seqs import plan_resume
from echo_core.dispatch import may_issue
from echo_core.policy import Admission, StalenessPolicy
from echo_rollout.metrics import OfflineMetrics
from echo_rollout.offline.rendering import RenderedEpisode
from echo_rollout.open_seqs import OpenSeqs, dispatch_state
from echo_runtime.process import StopSignal
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.errors import UserError
from echo_schemas.records import (
    Control,
    FinishReason,
    LogprobSource,
    Progress,
    Purpose,
    RunState,
    Sampling,
    Trajectory,
    TrajectorySource,
    VersionSpan,
    group_id_of,
    ordered_state,
)
from echo_schemas.topics import TRAJECTORIES
from echo_settings import Settings

logger = logging.getLogger(__name__)

ENGINE = "offline"
"""The engine and the worker in these trajectories."""
# Limits of one transaction: small enough that a pause is obeyed at once and its time-out is never reached.
_MAX_BATCH = 32
_MAX_BATCH_BYTES = 8 << 20
_IDLE_S = 0.25
_READ_S = 300.0

Group = tuple[RenderedEpisode, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Which group a seq gets: every group once in each epoch, in a new order each time. `epochs` 0: without end."""

    num_groups: int
    epochs: int
    seed: int
    first_seq: int = 0

    @property
    def end(self) -> int | None:
        """The first seq without a group; None: there is none."""
        return self.first_seq + self.epochs * self.num_groups if self.epochs else None

    def group_of(self, seq: int) -> int:
        """Index of the group of `seq`, which is not before the first."""
        epoch, place = divmod(seq - self.first_seq, self.num_groups)
        return _order(self.num_groups, self.seed, epoch)[place]


# The epoch that is under way, and the one before it for seqs that are written again.
@lru_cache(maxsize=2)
def _order(num_groups: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(num_groups))
    random.Random(f"offline/{seed}/{epoch}").shuffle(order)
    return order


@dataclass(kw_only=True, eq=False)
class OfflineProducer:
    """Puts groups into the log until all are there, `stop` is set, or the run is told to stop. Used from one thread.

    `run_offline` opens and closes what it works with. `file`, `sha256`: name and checksum of the file of `groups`.
    """

    settings: Settings
    policy: StalenessPolicy
    groups: Sequence[Group]
    schedule: Schedule
    file: str
    sha256: str
    bus: Bus
    writer: TransactionalWriter
    progress: CompactedView[Progress]
    control: CompactedView[Control]
    metrics: OfflineMetrics
    clock: Clock

    def __post_init__(self) -> None:
        self._run_id = self.settings.run.name
        # A logged episode cannot grow stale, but the learner holds a limited number of waiting groups.
        self._policy = replace(self.policy, admission=Admission.PACE)
        self._next_seq = 0
        self._again: deque[int] = deque()
        self._open = OpenSeqs()
        self._wake = threading.Event()
        for view in (self.progress, self.control):
            view.on_change(lambda _key, _record: self._wake.set())

    def run(self, stop: StopSignal) -> None:
        """Raises UserError when another allocator has taken the run over, TransportError when the cluster does not let it go on."""
        stop.on_set(self._wake.set)
        resumed = False
        while not stop.is_set() and self._state() is not RunState.STOPPING:
            if not resumed:
                resumed = self._take_over()
                moved = resumed
            else:
                if self._is_done():
                    logger.info("Every seq of %s is allocated; the last one is %d", self.file, self._next_seq - 1)
                    return
                moved = self._issue()
            if not moved:
                self._wake.wait(_IDLE_S)
                self._wake.clear()

    def _take_over(self) -> bool:
        """Fence any other allocator, then read in the log which seqs are there. False while there is no progress of the learner."""
        progress = self.progress.get(self._run_id)
        if progress is None:
            return False
        first, floor = self.schedule.first_seq, progress.next_seq
        if first > floor:
            raise UserError(
                f"The file's first group would get the seq {first}, and the run has decided only those below {floor}: the seqs between "
                "would never be decided.",
                hint=f"Set [offline] first_seq = {floor}, or less.",
            )
        self.writer.start()
        shown: set[int] = set()
        with closing(self.bus.look([TRAJECTORIES])) as reader:
            reader.start()
            for messages in reader.read_to_end(Deadline.after(_READ_S, self.clock)):
                records = (message.record for message in messages)
                shown.update(record.seq for record in records if isinstance(record, Trajectory) and record.purpose is Purpose.TRAIN)
        self._open.hear(progress)
        resume = plan_resume(floor, shown | self._open.seen)
        for seq in shown:
            if seq < resume.next_seq:
                self._open.issued(seq)
        self._again.extend(resume.missing)
        self._next_seq = resume.next_seq
        logger.info("Going on from seq %d; %d below it are missing", resume.next_seq, len(resume.missing))
        if self._is_done():
            logger.warning(
                "The file's seqs end before %s, and the run has allocated all below %d. To put the file into a run that has trained on "
                "other data, set [offline] first_seq = %d.",
                self.schedule.end,
                resume.next_seq,
                floor,
            )
        return True

    def _is_done(self) -> bool:
        end = self.schedule.end
        return not self._again and end is not None and self._next_seq >= end

    def _issue(self) -> bool:
        """Write the groups that pace lets in, in one transaction; False if there are none. Raises UserError if it is fenced."""
        if self._state() is RunState.PAUSED:
            return False
        progress = self.progress.get(self._run_id)
        seqs: list[int] = []
        end = self.schedule.end
        num_bytes = 0
        if progress is not None:
            self._open.hear(progress)
        while len(seqs) < _MAX_BATCH and num_bytes < _MAX_BATCH_BYTES:
            if not may_issue(dispatch_state(progress, self._open.undecided + len(seqs)), self._policy):
                break
            if self._again:
                seqs.append(self._again.popleft())
            elif end is None or self._next_seq < end:
                seqs.append(self._next_seq)
                self._next_seq += 1
            else:
                break
            num_bytes += sum(member.num_bytes for member in self._group(seqs[-1]))
        if seqs:
            self._write(seqs, 0 if progress is None else progress.published)
        return bool(seqs)

    def _write(self, seqs: Sequence[int], version: int) -> None:
        metrics = self.metrics
        records = [record for seq in seqs for record in self._trajectories(seq, version)]
        try:
            with self.writer.transaction() as transaction:
                for record in records:
                    transaction.publish(TRAJECTORIES, record)
        except ProducerFenced as exc:
            raise UserError(
                f"Another allocator has taken over the seqs of run {self._run_id!r}, or a transaction of this one timed out: it ends.",
                hint="Run one feeder or one offline producer. If no other runs, start this one again: it goes on where the log ends.",
            ) from exc
        except TransactionAborted as exc:
            logger.warning("%d groups were rolled back and are written again: %s", len(seqs), exc)
            metrics.aborted.inc()
            self._again.extendleft(reversed(seqs))
            return
        for seq in seqs:
            self._open.issued(seq)
        metrics.groups.inc(len(seqs))
        metrics.episodes.inc(len(records))
        metrics.next_seq.set(self._next_seq)

    def _trajectories(self, seq: int, version: int) -> list[Trajectory]:
        now_ms = self.clock.time_ms()
        group = self._group(seq)
        return [
            Trajectory(
                run_id=self._run_id,
                group_id=group_id_of(self._run_id, seq),
                seq=seq,
                # Depends on the content alone, so that a group that is written twice counts once.
                attempt=f"{ENGINE}-{self.sha256[:12]}",
                index=index,
                group_size=len(group),
                purpose=Purpose.TRAIN,
                task=self.settings.task.name,
                entry=member.episode.entry,
                prompt=member.prompt,
                completion=member.completion,
                token_ids=pack_tokens(member.token_ids),
                generated=member.generated,
                logprobs=pack_logprobs(np.zeros(member.num_generated, np.float32)),
                version_spans=tuple(VersionSpan(start=span.start, end=span.end, version=version) for span in member.generated),
                min_version=version,
                max_version=version,
                weights_sha256="",
                worker_id=ENGINE,
                engine=ENGINE,
                sampling=Sampling(max_new_tokens=member.num_generated, temperature=self.settings.rollout.temperature),
                logprob_source=LogprobSource.RECOMPUTED,
                source=TrajectorySource.OFFLINE,
                finish_reason=FinishReason.ENVIRONMENT,
                turn_rewards=member.episode.turn_rewards,
                requested_ms=now_ms,
                started_ms=now_ms,
                finished_ms=now_ms,
                metadata={"file": self.file, "line": str(member.episode.line)},
            )
            for index, member in enumerate(group)
        ]

    def _group(self, seq: int) -> Group:
        return self.groups[self.schedule.group_of(seq)]

    def _state(self) -> RunState:
        return ordered_state(self.control.get(f"{self._run_id}/run"))
