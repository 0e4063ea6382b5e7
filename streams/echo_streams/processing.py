"""From raw trajectories to their rewards: filtered by headers, decoded, scored, encoded. Independent of Faust.

Threads: one event loop; `process` may run several times at once. A function returns the learner's version, which a view's thread updates.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from echo_bus.client.cluster import RawMessage
from echo_bus.client.kafka_errors import grown
from echo_bus.dead_letter_budget import DeadLetterBudget
from echo_bus.dead_letters import dead_letter_of
from echo_bus.message import raw_headers
from echo_bus.reading.decoding import Decoder
from echo_bus.wire import Wire
from echo_schemas.errors import InvalidRecord
from echo_schemas.headers import Header, headers_of
from echo_schemas.records import Coordinates, Purpose, Reward, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_streams.intake import Identity, Intake, Passed, Stale
from echo_streams.metrics import StreamsMetrics
from echo_streams.scoring import Judgeable, Scorer

logger = logging.getLogger(__name__)

LearnerVersion = Callable[[], int | None]
Send = Callable[["list[Outgoing]"], Awaitable[object]]
"""Begins to write records; when it returns they are under way."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be written. `partition` None: by its key."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: list[Header]


class Processor:
    """Answers batches. `learner_version()` is None while no learner has reported."""

    def __init__(
        self,
        wire: Wire,
        scorer: Scorer,
        intake: Intake,
        *,
        group: str,
        learner_version: LearnerVersion,
        metrics: StreamsMetrics,
    ) -> None:
        """`group`: the consumer group that reads."""
        self._wire = wire
        self._scorer = scorer
        self._intake = intake
        self._learner_version = learner_version
        self._metrics = metrics
        self._group = group
        self._budget = DeadLetterBudget(wire.dead_letter_limits, wire.clock, wire.metrics)
        self._decoder = Decoder(wire, [TRAJECTORIES])
        self._rewards = wire.namespace.topic(REWARDS)
        self._dead_letters = wire.namespace.dead_letters(TRAJECTORIES)
        self._num_partitions: int | None = None

    def set_num_partitions(self, count: int) -> None:
        """From now on keys must lie on their partitions, of which `trajectories` has `count`."""
        self._num_partitions = count
        self._decoder.set_num_partitions({self._wire.namespace.topic(TRAJECTORIES): count})

    async def process(self, batch: Sequence[RawMessage], send: Send | None = None) -> list[Outgoing]:
        """The records to write for `batch`, which is done once all are delivered.

        With `send`, each function's rewards go there as they come, and only the rest is returned.
        Raises TooManyDeadLetters, UserError if somebody added partitions, and RegistryError if a schema could not be asked for.
        """
        version = self._learner_version()
        answers: list[Outgoing] = []
        judgeable: list[Judgeable] = []
        num_valid = 0
        for raw in batch:
            try:
                answers += self._look(raw, version, judgeable)
                num_valid += 1
            except InvalidRecord as exc:
                self._budget.count_valid(num_valid)
                num_valid = 0
                answers.append(self._dead_letter(raw, exc))
        self._budget.count_valid(num_valid)
        if judgeable:
            started_ms = self._wire.clock.time_ms()
            hand_on = None if send is None else lambda rewards: send(self._encoded(rewards, started_ms))
            answers += self._encoded(await self._scorer.score(judgeable, hand_on), started_ms)
        return answers

    def _look(self, raw: RawMessage, version: int | None, judgeable: list[Judgeable]) -> list[Outgoing]:
        """Rewards of one message without scoring; one that is to be scored joins `judgeable`. Raises as `process`, and InvalidRecord."""
        partition, offset = raw.partition(), raw.offset()
        assert partition is not None, "a message without error has a partition"
        assert offset is not None, "a message without error has an offset"
        if self._num_partitions is not None and partition >= self._num_partitions:
            raise grown(TRAJECTORIES.name, self._num_partitions)
        at = Coordinates(partition=partition, offset=offset)
        time_ms = raw.timestamp()[1]
        found = self._intake.look(raw_headers(raw), version, time_ms)
        if isinstance(found, Passed):
            self._metrics.passed.labels(found.value).inc()
            return []
        if isinstance(found, Stale):
            return self._encoded(self._scorer.stale(found.identity, at, _said_of_age(found.version, version)))
        message = self._decoder.decode(raw)
        if message is None:
            self._metrics.passed.labels(Passed.OTHER_RUN.value).inc()
            return []
        assert isinstance(message.record, Trajectory), "the decoder lets nothing else through"
        return self._triage(message.record, at, version, judgeable, time_ms)

    async def judge_again(self, items: Sequence[Judgeable]) -> list[Outgoing]:
        """The records to write for trajectories whose rewards are missing."""
        version = self._learner_version()
        judgeable: list[Judgeable] = []
        answers: list[Outgoing] = []
        for item in items:
            answers += self._triage(item.trajectory, item.at, version, judgeable)
        started_ms = self._wire.clock.time_ms()
        return answers + (self._encoded(await self._scorer.score(judgeable), started_ms) if judgeable else [])

    def _triage(
        self, trajectory: Trajectory, at: Coordinates, version: int | None, judgeable: list[Judgeable], time_ms: int | None = None
    ) -> list[Outgoing]:
        """As `_look`, by the body."""
        passed = self._intake.passed(trajectory)
        if passed is not None:
            self._metrics.passed.labels(passed.value).inc()
            return []
        if why := self._too_old(trajectory, version, time_ms):
            return self._encoded(self._scorer.stale(Identity.of(trajectory), at, why))
        by_now = functools.partial(self._too_old_by_now, trajectory, time_ms)
        judgeable.append(Judgeable(trajectory=trajectory, at=at, too_old=by_now))
        return []

    def _too_old(self, trajectory: Trajectory, version: int | None, time_ms: int | None) -> str:
        """Why the learner at `version` would drop the trajectory for its age; empty if it would not."""
        is_bounded = trajectory.purpose is Purpose.TRAIN and not trajectory.is_exempt
        if not is_bounded or not self._intake.is_stale(trajectory.min_version, version, time_ms):
            return ""
        return _said_of_age(trajectory.min_version, version)

    def _too_old_by_now(self, trajectory: Trajectory, time_ms: int | None) -> str:
        """As `_too_old`, at the learner's version now. If the learner cannot be followed any more, the sample is scored: that is not its
        function's fault, and it ends the process at the next batch."""
        try:
            version = self._learner_version()
        except Exception:  # whatever ended the view of the learner
            return ""
        return self._too_old(trajectory, version, time_ms)

    def _encoded(self, rewards: Sequence[Reward], started_ms: int | None = None) -> list[Outgoing]:
        """`started_ms`: when the scoring began; None: no function was called."""
        encode, source, signer, tracer = self._wire.codec.encode, self._wire.client_id, self._wire.signer, self._wire.tracer
        records = [(reward.group_id.encode(), encode(reward)) for reward in rewards]
        if logger.isEnabledFor(logging.DEBUG):
            for reward in rewards:
                said = reward.outcome.value if reward.value is None else reward.value
                about = (reward.index, reward.group_id, said, reward.name, reward.error or "")
                logger.debug("Sample %d of group %s: %s by %s %s", *about, extra={"group": reward.group_id})
        added: list[list[Header]] = [[]] * len(records)
        if tracer is not None and started_ms is not None:
            added = tracer.scored(rewards, started_ms)
        if signer is not None:
            added = [[*headers, signature] for headers, signature in zip(added, signer.sign(self._rewards, records), strict=True)]
        return [
            Outgoing(
                self._rewards,
                reward.of.partition,
                key,
                value,
                headers_of(reward, source=source, time_ms=reward.time_ms) + more,
            )
            for reward, (key, value), more in zip(rewards, records, added, strict=True)
        ]

    def _dead_letter(self, raw: RawMessage, invalid: InvalidRecord) -> Outgoing:
        """Raises TooManyDeadLetters."""
        is_within_budget = self._budget.count_invalid(raw, invalid)
        letter = dead_letter_of(raw, invalid, group=self._group, whole=is_within_budget)
        self._wire.metrics.dead_letters.labels(raw.topic(), invalid.reason.value).inc()
        return Outgoing(self._dead_letters, None, letter.key, letter.value, letter.headers)


def _said_of_age(version: int, learner_version: int | None) -> str:
    return f"Version {version} is too old for the learner's {learner_version}."
