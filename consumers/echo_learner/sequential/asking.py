"""Where a sequential learner's batches come from: it requests exactly the groups of the next step, and waits for them.

    learner's thread, while it waits:  receipts ─▶ ledger ─▶ requests, by lag       what the intake assembles ─▶ ledger, batch
    replies thread ── wakes it ───────────┘

Everything here runs on the learner's thread, inside `next_batch`: while a step is trained no request is open. `RequestLedger` decides
what to send; requests go to the partition with the least work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock
from echo_bus.requests.dispatch import LeastLagChooser, PartitionWork
from echo_bus.requests.request_reply import reply_headers
from echo_core.batch_choice import ChosenGroup
from echo_core.groups import SeqState
from echo_core.patience import Patience
from echo_learner.intake import Intake
from echo_learner.metrics import LearnerMetrics
from echo_learner.sequential.replies import PARTITION, ReplyInbox
from echo_learner.sequential.requesting import Closing, ReplyFate, RequestLedger
from echo_schemas.errors import UserError
from echo_schemas.records import Purpose, ReplyOutcome, RewardTerm, RolloutReply, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS
from echo_tasks.requests import RequestBuilder

logger = logging.getLogger(__name__)

# A step that has to replace so many times its groups gets no batch from these workers.
_MOST_REPLACED = 8


@dataclass(kw_only=True, eq=False)
class BatchRequests:
    """Requests one batch after another: a `BatchSource`. Used from the learner's thread.

    The caller opens and closes what it works with. `inbox` is started; `reply_topic` is its physical name. `share` tells the chooser the
    workers and their speeds, before each round of requests. `holders`: the workers that report to read a partition of `requests` now.
    `timeout_s`: the least time that a request has.
    """

    builder: RequestBuilder
    group_size: int
    probe_size: int
    sampling: Sampling
    timeout_s: float
    publisher: Publisher
    inbox: ReplyInbox
    reply_topic: str
    chooser: LeastLagChooser
    num_partitions: int
    share: Callable[[LeastLagChooser], None]
    holders: Callable[[int], frozenset[str]]
    intake: Intake
    metrics: LearnerMetrics
    clock: Clock
    ledger: RequestLedger

    needs_newest = True

    def __post_init__(self) -> None:
        self._version = -1
        self._probed = -1
        self._last_closing: Closing | None = None
        self._fates: Counter[ReplyFate] = Counter()
        self._num_sent = self._num_resent = 0
        # Whether requests wait for room: then every receipt must wake the learner.
        self._is_short = False
        self._patience = Patience(least_s=self.timeout_s, num_steps=0)
        # By correlation id: the request's partition, and the workers that read it when the request was sent.
        self._placed: dict[str, tuple[int, frozenset[str]]] = {}
        # Per partition, requests written and done. Not offsets: other writers' records lie between them.
        self._written = [0] * self.num_partitions
        self._done = [0] * self.num_partitions

    def begin(self, version: int, sha256: str) -> None:
        """Request samples of `version` from now on, whose snapshot, with this checksum, is in the log or will soon be."""
        self.intake.expect_weights(sha256)
        self.ledger.begin(version, sha256)
        self._version = version

    def is_issued(self, seq: int) -> bool:
        """Whether `seq` was ever requested. From any thread."""
        return seq < self.ledger.next_seq

    def next_batch(self, version: int, terms: tuple[RewardTerm, ...], timeout_s: float) -> tuple[ChosenGroup, ...] | None:
        """The groups of the next batch; None if they are not there within `timeout_s`, or after `Intake.wake`.

        Raises UserError if the workers fail at everything, TransportError.
        """
        intake, clock = self.intake, self.clock
        # Until the log is read to its end, it may hold the groups already.
        if intake.is_caught_up:
            self._look(intake.states(self.ledger.open_seqs))
            self._take_replies()
            self._close(self.ledger.expire(clock.time_ms(), self._patience.limit_s(), least_s=self.timeout_s))
            self._send()
        groups = intake.next_batch(version, terms, timeout_s)
        if groups is not None:
            trained = {group.seq for group in groups}
            # A group that became whole after the look above may be in this batch already.
            self._look(dict.fromkeys(self.ledger.open_seqs & trained, SeqState.WHOLE))
            self.ledger.trained(trained)
            self._settle_places()
        return groups

    def hear(self, reply: RolloutReply) -> None:
        """Take note of a receipt, on the replies thread. An expected one does not wake the learner: its group will."""
        is_plain = reply.outcome is ReplyOutcome.DONE and reply.version == self._version and len(reply.where) == self.group_size
        if self._is_short or not is_plain:
            self.intake.wake()

    def take_counts(self) -> dict[str, float]:
        """Counts for the step's report, since the last call: requests sent, and replies by fate."""
        counts = {"requests_sent": float(self._num_sent), "requests_resent": float(self._num_resent)}
        counts |= {f"replies_{fate.value}": float(self._fates[fate]) for fate in ReplyFate}
        self._num_sent = self._num_resent = 0
        self._fates.clear()
        return counts

    def _look(self, states: Mapping[int, SeqState]) -> None:
        """Tell the ledger the assembler's state of open seqs."""
        for seq, state in states.items():
            took_s = self.ledger.look(seq, state, self.clock.time_ms())
            if took_s is not None:
                self._patience.finished(took_s)

    def _take_replies(self) -> None:
        for correlation, reply in self.inbox.take():
            verdict = self.ledger.take(correlation, reply, is_holder=self._is_holder(correlation, reply.worker_id))
            self._fates[verdict.fate] += 1
            self.metrics.replies.labels(verdict.fate.value).inc()
            if verdict.fate is ReplyFate.FOREIGN:
                said = reply.error or reply.outcome.value
                ignored = "%s answers %s for %s, which it did not hold; ignored"
                logger.warning(ignored, reply.worker_id, said, reply.group_id, extra={"group": reply.group_id})
                continue
            self._finish(correlation)
            if verdict.fate is ReplyFate.UNFULFILLED:
                answer = (reply.worker_id, reply.outcome.value, reply.group_id, reply.error)
                logger.warning("%s answers %s for %s: %s", *answer, extra={"group": reply.group_id})
            if verdict.closing is not None:
                self._close([verdict.closing])

    def _is_holder(self, correlation: str, worker_id: str) -> bool:
        """Whether the worker may have held the request. If no worker reports to read its partition, any may have."""
        placed = self._placed.get(correlation)
        if placed is None:
            return True
        holders = placed[1] | self.holders(placed[0])
        return not holders or worker_id in holders

    def _close(self, closings: list[Closing]) -> None:
        for closing in closings:
            about = {"group": group_id_of(self.builder.run_id, closing.seq)}
            logger.warning("Seq %d is given up (%s): %s", closing.seq, closing.why.value, closing.detail, extra=about)
            self.intake.drop(closing.seq, closing.why, closing.detail)
            self._last_closing = closing
        if self.ledger.num_given_up > _MOST_REPLACED * max(1, len(self.ledger.open_seqs)):
            last = "the assembler dropped them" if self._last_closing is None else self._last_closing.detail
            raise UserError(
                f"No batch of version {self._version} can be filled: {self.ledger.num_given_up} groups were given up. The last: {last}",
                hint="Read the workers' logs; the run goes on from its last step once they can answer.",
            )

    def _send(self) -> None:
        """Send the wanted requests, as far as the workers have room."""
        if not self.ledger.num_wanted:
            return
        self._settle_places()
        self.share(self.chooser)
        self._send_probe()
        while (ask := self.ledger.next_wanted(self.clock.time_ms(), self._patience.limit_s())) is not None:
            partition = self.chooser.choose()
            self._is_short = partition is None
            if partition is None:
                return
            request = self.builder.build(ask.seq, Purpose.TRAIN, group_size=self.group_size, sampling=self.sampling)
            self._publish(
                replace(self._exact(request, ask.deadline_ms), correlation=ask.correlation, resends=ask.resends),
                partition,
                headers=reply_headers(ask.correlation, topic=self.reply_topic, partition=PARTITION, deadline_ms=ask.deadline_ms),
            )
            self._place(ask.correlation, partition)
            self.ledger.sent(ask)
            self._num_sent += 1
            self._num_resent += ask.resends > 0

    def _send_probe(self) -> None:
        """Send one probe per version, on which log-probabilities are compared. No batch waits for it."""
        if not self.probe_size or self._probed >= self._version:
            return
        self._probed = self._version
        partition = self.chooser.choose()
        if partition is None:
            return
        request = self.builder.build(self._version, Purpose.PROBE, group_size=self.probe_size, sampling=self.sampling)
        patience_s = self._patience.limit_s()
        deadline_ms = None if patience_s is None else self.clock.time_ms() + int(patience_s * 1000)
        self._publish(self._exact(request, deadline_ms), partition)
        self.chooser.failed(partition)

    def _exact(self, request: RolloutRequest, deadline_ms: int | None) -> RolloutRequest:
        return replace(
            request,
            required_version=self._version,
            exact=True,
            learner_version=self._version,
            issued_ms=self.clock.time_ms(),
            deadline_ms=deadline_ms,
        )

    def _publish(self, request: RolloutRequest, partition: int, headers: tuple[tuple[str, bytes], ...] = ()) -> None:
        self.publisher.publish(REQUESTS, request, partition=partition, headers=headers)
        self.metrics.requests.labels(request.purpose.value).inc()
        logger.debug("Group %s is requested, in partition %s", request.group_id, partition, extra={"group": request.group_id})

    # How much work each partition has

    def _place(self, correlation: str, partition: int) -> None:
        self._placed[correlation] = partition, self.holders(partition)
        self.chooser.acknowledged(partition, self._written[partition])
        self._written[partition] += 1

    def _finish(self, correlation: str) -> None:
        """Note that the request is done, with or without success."""
        if correlation in self._placed:
            partition, _ = self._placed.pop(correlation)
            self._done[partition] += 1
            self.chooser.observe({partition: PartitionWork(first_open=self._done[partition], end=self._written[partition])})

    def _settle_places(self) -> None:
        """Release the shares of requests whose answer is not needed any more."""
        current = self.ledger.current
        for correlation in [correlation for correlation in self._placed if correlation not in current]:
            self._finish(correlation)
