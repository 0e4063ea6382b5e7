"""Finished groups onto `trajectories`: built, encoded and published on a thread of its own, so that the engine never waits for Kafka.

    asyncio loop ──submit──▶ publishing thread ──publish──▶ client ──acknowledgements on the publisher's poll thread──▶ ended

`submit` never blocks: the number of groups in flight bounds the queue. The thread blocks on the client's full buffer; the poll thread
unblocks it.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from echo_bus import profiles
from echo_bus.clock import Clock
from echo_bus.errors import RecordTooLarge
from echo_bus.places import PlaceTimes
from echo_bus.publisher import Publisher, Receipt
from echo_bus.settings import Settings
from echo_core.bottleneck import Place, Use
from echo_core.evaluation import EVALUATION
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.generation import Sample
from echo_rollout.metrics import WorkerMetrics
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import Coordinates, RolloutRequest, Trajectory
from echo_schemas.topics import TRAJECTORIES

logger = logging.getLogger(__name__)


def trajectory_profile(settings: Settings) -> profiles.Properties:
    """How trajectories are sent: a sequential learner does nothing else until it has the last sample of its batch. A worker never gives up
    what it has generated."""
    speed = profiles.PRODUCER_AWAITED if settings.run.mode == "sequential" else profiles.PRODUCER_THROUGHPUT
    return {**speed, **profiles.FOR_EVER}


class Outcome(StrEnum):
    """How a group ended at a worker."""

    PUBLISHED = "published"
    EXPIRED = "expired"
    NOT_READY = "not_ready"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    ABANDONED = "abandoned"


class Failure(StrEnum):
    """Why a group yielded no complete set of trajectories."""

    EMPTY = "empty"
    OVERSIZED = "oversized"
    INVALID = "invalid"
    ENVIRONMENT = "environment"
    UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a group ended, and of one that was published what and where: `where` in the order of offsets."""

    outcome: Outcome
    failure: Failure | None = None
    detail: str = ""
    attempt: str = ""
    weights: SnapshotRef | None = None
    where: tuple[Coordinates, ...] = ()

    @property
    def said(self) -> str:
        """In words, for whoever asked."""
        return self.detail or (self.failure or self.outcome).value


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """What the engine made of one request. `ended(ending)` is called once, from any thread."""

    request: RolloutRequest
    prompt: str
    samples: Sequence[Sample]
    started_ms: int
    finished_ms: int
    ended: Callable[[Ending], None]


class TrajectoryPublisher:
    """Publishes groups. `start` it; `close` it after the last `submit`."""

    def __init__(
        self,
        publisher: Publisher,
        *,
        worker_id: str,
        engine: str,
        places: PlaceTimes,
        metrics: WorkerMetrics,
        clock: Clock,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`on_error` gets what ends the thread, or a delivery that failed: the worker must end, and the requests are delivered again."""
        self._publisher = publisher
        self._worker_id = worker_id
        self._engine = engine
        self._places = places
        self._metrics = metrics
        self._clock = clock
        self._on_error = on_error
        self._queue: queue.SimpleQueue[FinishedGroup | Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, group: FinishedGroup) -> None:
        """Publish `group` soon."""
        self._queue.put(group)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run `call`, which may wait for room in a publisher's buffer, on the publishing thread."""
        self._queue.put(call)

    def close(self) -> None:
        """Publish what was submitted and stop. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                with self._places.spent(Place.PUBLISH, Use.EMPTY):
                    group = self._queue.get()
                if group is None:
                    return
                with self._places.spent(Place.PUBLISH):
                    if isinstance(group, FinishedGroup):
                        self._publish(group)
                    else:
                        group()
        except BaseException as exc:  # the edge of the thread: the worker ends with it
            self._on_error(exc)

    def _publish(self, group: FinishedGroup) -> None:
        """All members, the largest first, so that one which no record can carry is found out before anything is written."""
        records = trajectories_of(group, worker_id=self._worker_id, engine=self._engine)
        acknowledged = _Acknowledgements(group, records[0].attempt, self._metrics, self._on_error)
        try:
            for record in records:
                record.validate()
            for record in sorted(records, key=_own_bytes, reverse=True):
                self._publisher.publish(TRAJECTORIES, record).on_done(acknowledged)
        except RecordTooLarge as exc:
            logger.warning("Group %s is given up: %s", group.request.group_id, exc)
            group.ended(Ending(outcome=Outcome.FAILED, failure=Failure.OVERSIZED, detail=exc.message))
        except InvalidRecord as exc:
            logger.warning("Group %s is given up: %s", group.request.group_id, exc)
            group.ended(Ending(outcome=Outcome.FAILED, failure=Failure.INVALID, detail=exc.message))


def _own_bytes(record: Trajectory) -> int:
    """About what tells the members of a group apart in size; prompt and entry are the same for all."""
    return len(record.token_ids) + len(record.logprobs) + len(record.completion)


class _Acknowledgements:
    """Ends a group when all its records are in the log. Called from the publisher's poll thread."""

    def __init__(self, group: FinishedGroup, attempt: str, metrics: WorkerMetrics, on_error: Callable[[BaseException], None]) -> None:
        self._group = group
        self._attempt = attempt
        self._metrics = metrics
        self._on_error = on_error
        self._lock = threading.Lock()
        self._where: list[Coordinates] = []

    def __call__(self, receipt: Receipt) -> None:
        if receipt.where is None:
            if receipt.error is not None:
                self._on_error(receipt.error)
            return
        samples = self._group.samples
        with self._lock:
            self._where.append(receipt.where)
            is_last = len(self._where) == len(samples)
        if is_last:
            self._metrics.trajectories.inc(len(samples))
            self._metrics.tokens.inc(sum(len(sample.logprobs) for sample in samples))
            self._group.ended(
                Ending(
                    outcome=Outcome.PUBLISHED,
                    attempt=self._attempt,
                    weights=SnapshotRef(version=samples[0].version_spans[0].version, sha256=samples[0].weights_sha256),
                    where=tuple(sorted(self._where, key=lambda where: (where.partition, where.offset))),
                )
            )


def trajectories_of(group: FinishedGroup, *, worker_id: str, engine: str) -> list[Trajectory]:
    """The records of one attempt, in order of index; the attempt's token is fresh."""
    request, attempt = group.request, uuid.uuid4().hex[:16]
    return [
        Trajectory(
            run_id=request.run_id,
            group_id=request.group_id,
            seq=request.seq,
            attempt=attempt,
            index=index,
            group_size=request.group_size,
            purpose=request.purpose,
            task=request.task,
            entry=request.entry,
            prompt=group.prompt if sample.prompt is None else sample.prompt,
            completion=sample.completion,
            token_ids=pack_tokens(sample.token_ids),
            generated=sample.generated,
            logprobs=pack_logprobs(sample.logprobs),
            version_spans=sample.version_spans,
            min_version=min(versions),
            max_version=max(versions),
            weights_sha256=sample.weights_sha256,
            worker_id=worker_id,
            engine=engine,
            sampling=request.sampling,
            logprob_source=sample.logprob_source,
            finish_reason=sample.finish_reason,
            turn_rewards=sample.turn_rewards,
            metadata={EVALUATION: request.evaluation} if request.evaluation else {},
            requested_ms=request.issued_ms,
            started_ms=group.started_ms,
            finished_ms=group.finished_ms,
        )
        for index, sample in enumerate(group.samples)
        for versions in ([span.version for span in sample.version_spans],)
    ]
