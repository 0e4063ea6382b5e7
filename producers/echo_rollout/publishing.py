"""Finished groups onto `trajectories`: built, encoded and published on a thread of its own, so that the engine never waits for Kafka.

    a group's task ──publish──▶ publishing thread ──▶ client ──acknowledgements on the publisher's poll thread──▶ the task again

The number of groups in hand bounds the queue. The thread blocks on the client's full buffer; the poll thread unblocks it.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from echo_bus.client import profiles
from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.errors import RecordTooLarge
from echo_core.bottleneck import Place, Use
from echo_core.evaluation import EVALUATION
from echo_rollout.awaited import Awaited
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.generation import Sample
from echo_runtime.places import PlaceTimes
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.converters import maker_of
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import Coordinates, Experts, RolloutRequest, Trajectory, TrajectorySource
from echo_schemas.topics import TRAJECTORIES
from echo_settings import Settings

_make_trajectory = maker_of(Trajectory)


def trajectory_profile(settings: Settings) -> profiles.Properties:
    """How trajectories are sent: at once in sequential mode, where the learner waits for the last sample of its batch. Sending never gives
    up."""
    speed = profiles.PRODUCER_AWAITED if settings.run.mode == "sequential" else profiles.PRODUCER_THROUGHPUT
    return {**speed, **profiles.FOR_EVER}


class GroupEnd(StrEnum):
    """How a group ended at a worker."""

    PUBLISHED = "published"
    EXPIRED = "expired"
    NOT_READY = "not_ready"
    SUPERSEDED = "superseded"
    FAILED = "failed"
    ABANDONED = "abandoned"


class GroupFailure(StrEnum):
    """Why a group yielded no complete set of trajectories."""

    EMPTY = "empty"
    OVERSIZED = "oversized"
    INVALID = "invalid"
    ENVIRONMENT = "environment"
    UNUSABLE = "unusable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a group ended; of a published one also attempt, weights and coordinates (`where`, in the order of offsets)."""

    outcome: GroupEnd
    failure: GroupFailure | None = None
    detail: str = ""
    attempt: str = ""
    weights: SnapshotRef | None = None
    where: tuple[Coordinates, ...] = ()

    @property
    def said(self) -> str:
        """The ending in words, for the requester."""
        return self.detail or (self.failure or self.outcome).value


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """What the engine made of one request."""

    request: RolloutRequest
    prompt: str
    samples: Sequence[Sample]
    started_ms: int
    finished_ms: int


class TrajectoryPublisher:
    """Publishes groups. `start` it; `close` it after the last. Called on the asyncio loop."""

    def __init__(self, publisher: Publisher, *, worker_id: str, engine: str, places: PlaceTimes) -> None:
        self._publisher = publisher
        self._worker_id = worker_id
        self._engine = engine
        self._places = places
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="publishing", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def publish(self, group: FinishedGroup) -> Ending:
        """How `group` ended: all its members are in the log, or no record can carry one. Raises TransportError."""
        ended: Awaited[Ending] = Awaited()
        self._submit(lambda: self._publish(group, ended), ended)
        return await ended

    async def call(self, call: Callable[[], None]) -> None:
        """Run `call`, which may wait for room in a publisher's buffer, on the publishing thread."""
        called: Awaited[None] = Awaited()

        def run() -> None:
            call()
            called.settle(None)

        self._submit(run, called)
        await called

    def close(self) -> None:
        """Publish the groups that were handed over, and stop. Idempotent."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _submit(self, job: Callable[[], None], awaited: Awaited[Any]) -> None:
        def guarded() -> None:
            if awaited.is_given_up:
                return
            try:
                job()
            except BaseException as exc:  # the coroutine that awaits the job raises it
                awaited.fail(exc)

        self._queue.put(guarded)

    def _run(self) -> None:
        while True:
            with self._places.spent(Place.PUBLISH, Use.EMPTY):
                job = self._queue.get()
            if job is None:
                return
            with self._places.spent(Place.PUBLISH):
                job()

    def _publish(self, group: FinishedGroup, ended: Awaited[Ending]) -> None:
        """Publish all members, the largest first, so that one that is too large for a record is found before anything is written."""
        records = trajectories_of(group, worker_id=self._worker_id, engine=self._engine)
        acknowledged = _Acknowledgements(group.samples, records[0].attempt, ended)
        try:
            records.sort(key=_own_bytes, reverse=True)
            for receipt in self._publisher.publish_together(TRAJECTORIES, records):
                receipt.on_done(acknowledged)
        except RecordTooLarge as exc:
            ended.settle(Ending(outcome=GroupEnd.FAILED, failure=GroupFailure.OVERSIZED, detail=exc.message))
        except InvalidRecord as exc:
            ended.settle(Ending(outcome=GroupEnd.FAILED, failure=GroupFailure.INVALID, detail=exc.message))


def _own_bytes(record: Trajectory) -> int:
    """Size of the parts that differ within a group; prompt and entry are the same for all members."""
    experts = 0 if record.experts is None else len(record.experts.ids)
    return len(record.token_ids) + len(record.logprobs) + len(record.completion) + experts


class _Acknowledgements:
    """Ends a group when all its records are in the log. Called from the publisher's poll thread."""

    def __init__(self, samples: Sequence[Sample], attempt: str, ended: Awaited[Ending]) -> None:
        self._samples = samples
        self._attempt = attempt
        self._ended = ended
        self._lock = threading.Lock()
        self._where: list[Coordinates] = []

    def __call__(self, receipt: Receipt) -> None:
        if receipt.error is not None:
            self._ended.fail(receipt.error)
        if receipt.where is None:
            return
        with self._lock:
            self._where.append(receipt.where)
            is_last = len(self._where) == len(self._samples)
        if is_last:
            first = self._samples[0]
            self._ended.settle(
                Ending(
                    outcome=GroupEnd.PUBLISHED,
                    attempt=self._attempt,
                    weights=SnapshotRef(version=first.version_spans[0].version, sha256=first.weights_sha256),
                    where=tuple(sorted(self._where, key=lambda where: (where.partition, where.offset))),
                )
            )


def trajectories_of(group: FinishedGroup, *, worker_id: str, engine: str) -> list[Trajectory]:
    """The records of one attempt, in order of index; the attempt's token is fresh."""
    request, attempt = group.request, uuid.uuid4().hex[:16]
    metadata = {EVALUATION: request.evaluation} if request.evaluation else {}
    return [
        _make_trajectory(
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
            logprob_distribution=sample.logprob_distribution,
            experts=None if sample.experts is None else Experts.of(sample.experts),
            source=TrajectorySource.LIVE,
            finish_reason=sample.finish_reason,
            turn_rewards=sample.turn_rewards,
            metadata=metadata,
            requested_ms=request.issued_ms,
            started_ms=group.started_ms,
            finished_ms=group.finished_ms,
        )
        for index, sample in enumerate(group.samples)
        for versions in ([span.version for span in sample.version_spans],)
    ]
