"""The state of a run's reward applications: which are alive, how far behind, their values and errors.

All of it comes from the log and the consumer groups, so the applications may run on any machine.

Threads: everything blocks the caller and belongs to one thread at a time.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from confluent_kafka import KafkaException, TopicPartition

from echo_bus.bus import Bus
from echo_bus.client.consumer_queries import committed_offsets, end_offsets, num_partitions, open_asker
from echo_bus.client.kafka_errors import translated
from echo_bus.client.profiles import LOOK
from echo_bus.clock import Deadline
from echo_bus.errors import TransportError
from echo_bus.message import raw_headers
from echo_ops.groups import groups_with_members
from echo_ops.rewards.weights import policy_of
from echo_replay.rescoring import RESCORE, UNREPEATABLE
from echo_schemas.headers import oldest_version
from echo_schemas.records import Control, Reward, RewardAttachment, RewardOutcome, RewardTerm
from echo_schemas.topics import OWN_APPLICATION, REWARDS, TRAJECTORIES

_READ_S = 15.0
_PEEK_S = 1.0
# How many values the shown mean is of.
_RECENT = 500
# Writers choose the names of rewards and applications, so their number is limited.
_MOST_PAIRS = 64
_MOST_PARTITION_RECORDS = 200


class ScorerState(StrEnum):
    """Whether an application scores."""

    SCORING = "scoring"
    CATCHING_UP = "catching up"
    GONE = "no process"
    DETACHED = "detached"


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """Backlog of an application: trajectories, and the age of the oldest one in seconds and in versions of the learner."""

    num: int = 0
    seconds: float = 0.0
    versions: int = 0


@dataclass(slots=True)
class RecentRewards:
    """The newest records of one reward by one application."""

    outcomes: Counter[RewardOutcome] = field(default_factory=Counter)
    values: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    error: str = ""
    scored_ms: int = 0

    def add(self, reward: Reward) -> None:
        self.outcomes[reward.outcome] += 1
        if reward.value is not None:
            self.values.append(reward.value)
            self.scored_ms = max(self.scored_ms, reward.time_ms)
        elif reward.outcome is not RewardOutcome.STALE:
            self.error = reward.error or reward.outcome.value


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerLine:
    """One reward by one application. Counts are of the records that were read, `mean` is of their newest values."""

    name: str
    application: str
    state: ScorerState
    term: RewardTerm | None
    share: float
    behind: Behind
    mean: float | None
    num_scored: int
    num_failed: int
    num_stale: int
    error: str

    @property
    def weight(self) -> float:
        """Its weight in the sum that is trained on; 0 without one."""
        return 0.0 if self.term is None else self.term.weight

    @property
    def policy(self) -> str:
        """What groups do while its value is missing."""
        return policy_of(self.term)

    @property
    def is_shadow(self) -> bool:
        return self.weight == 0.0


class ScorerWatch:
    """Watches one run's applications. `close` it."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._rewards = bus.look([REWARDS])
        self._trajectories = bus.cluster.consumer({**LOOK, "client.id": bus.client_id, "group.id": f"{bus.client_id}.peek"})
        self._read_to: dict[tuple[str, int], int] = {}
        self.heard: dict[tuple[str, str], RecentRewards] = {}
        """(application, reward) → its newest records, as of the last `listen`."""

    def close(self) -> None:
        with suppress(TransportError, KafkaException):
            self._rewards.close()
            self._trajectories.close()

    def listen(self, most: int = _MOST_PARTITION_RECORDS) -> None:
        """Read new records of `rewards`, the newest `most` of each partition. Raises TransportError."""
        bounds = self._rewards.bounds()
        starts = {place: max(low, high - most, min(high, self._read_to.get(place, 0))) for place, (low, high) in bounds.items()}
        ends = {place: high for place, (_, high) in bounds.items()}
        self._rewards.start(starts)
        for messages in self._rewards.read_to_end(Deadline.after(_READ_S, self._bus.clock), ends):
            for message in messages:
                if isinstance(message.record, Reward):
                    self._hear(message.record)
        self._read_to = self._rewards.positions

    def _hear(self, reward: Reward) -> None:
        if reward.application in (RESCORE, UNREPEATABLE):
            # A rescoring ends: no group may wait for its values.
            return
        pair = (reward.application or OWN_APPLICATION, reward.name)
        if pair not in self.heard:
            if len(self.heard) >= _MOST_PAIRS:
                return
            self.heard[pair] = RecentRewards()
        self.heard[pair].add(reward)

    def hear(self, rewards: Iterable[Reward]) -> None:
        """Take these records instead of those read before."""
        self.heard = {}
        for reward in rewards:
            self._hear(reward)

    def look(
        self, terms: Sequence[RewardTerm], orders: Mapping[str, Control], version: int, most: int = _MOST_PARTITION_RECORDS
    ) -> list[ScorerLine]:
        """Read new records, as `listen`; then a line for each reward with records or an order, weighted ones first. Raises TransportError.

        `terms`: in force; `orders`: of `control`; `version`: of the learner.
        """
        self.listen(most)
        return self.lines(terms, orders, version)

    def lines(self, terms: Sequence[RewardTerm], orders: Mapping[str, Control], version: int) -> list[ScorerLine]:
        """As `look`, from the records that were read already."""
        attachments = {order.attachment.application: order.attachment for order in orders.values() if order.attachment is not None}
        prefix = self._bus.namespace.group("reward", "x").removesuffix("x")
        groups = {
            group.removeprefix(prefix): alive for group, alive in groups_with_members(self._bus.cluster).items() if group.startswith(prefix)
        }
        known = {term.name: term for term in terms}
        ends = self._ends()
        found: list[ScorerLine] = []
        for application in sorted({*groups, *attachments, *(application for application, _ in self.heard)}):
            attachment = attachments.get(application)
            behind = self._behind(prefix + application, ends, version) if application in groups else Behind()
            state = _state(behind, attachment, is_alive=groups.get(application, False))
            for name in self._names_of(application, attachment, known):
                heard = self.heard.get((application, name), RecentRewards())
                found.append(
                    ScorerLine(
                        name=name,
                        application=application,
                        state=state,
                        term=known.get(name),
                        share=1.0 if attachment is None else attachment.share,
                        behind=behind,
                        mean=sum(heard.values) / len(heard.values) if heard.values else None,
                        num_scored=heard.outcomes[RewardOutcome.SCORED],
                        num_failed=heard.outcomes[RewardOutcome.FAILED] + heard.outcomes[RewardOutcome.TIMED_OUT],
                        num_stale=heard.outcomes[RewardOutcome.STALE],
                        error=heard.error,
                    )
                )
        return sorted(found, key=lambda line: (line.is_shadow, line.application != OWN_APPLICATION, line.name))

    def _names_of(self, application: str, attachment: RewardAttachment | None, known: Mapping[str, RewardTerm]) -> list[str]:
        names = {name for by, name in self.heard if by == application} | set(() if attachment is None else attachment.rewards)
        if not names and application == OWN_APPLICATION:
            names = set(known)
        return sorted(names)

    def _ends(self) -> dict[tuple[str, int], int]:
        physical = self._bus.namespace.topic(TRAJECTORIES)
        count = num_partitions(self._trajectories, physical, _READ_S)
        return end_offsets(self._trajectories, [(physical, partition) for partition in range(count)], _READ_S)

    def _behind(self, group: str, ends: Mapping[tuple[str, int], int], version: int) -> Behind:
        with closing(open_asker(self._bus.cluster, group, self._bus.client_id)) as asker:
            committed = committed_offsets(asker, group, list(ends), _READ_S)
        left = {place: committed.get(place, 0) for place, end in ends.items() if committed.get(place, 0) < end}
        if not left:
            return Behind()
        oldest_ms, oldest = self._peek(left)
        now_ms = self._bus.clock.time_ms()
        return Behind(
            num=sum(ends[place] - offset for place, offset in left.items()),
            seconds=0.0 if oldest_ms is None else max(0.0, (now_ms - oldest_ms) / 1000),
            versions=0 if oldest is None else max(0, version - oldest),
        )

    def _peek(self, left: Mapping[tuple[str, int], int]) -> tuple[int | None, int | None]:
        """Oldest time and oldest version of the records at these offsets; None if no record was read in time."""
        times: list[int] = []
        versions: list[int] = []
        seen: set[int | None] = set()
        with translated("the trajectories"):
            self._trajectories.assign([TopicPartition(*place, offset) for place, offset in left.items()])
            until_s = time.monotonic() + _PEEK_S
            while len(seen) < len(left) and time.monotonic() < until_s:
                raw = self._trajectories.poll(_PEEK_S / 4)
                if raw is None or raw.error() is not None or raw.partition() in seen:
                    continue
                seen.add(raw.partition())
                times.append(raw.timestamp()[1])
                named = oldest_version(raw_headers(raw))
                versions += [] if named is None else [named]
            self._trajectories.assign([])
        return min(times, default=None), min(versions, default=None)


def _state(behind: Behind, attachment: RewardAttachment | None, *, is_alive: bool) -> ScorerState:
    if is_alive:
        return ScorerState.CATCHING_UP if behind.seconds > _CATCHING_UP_S else ScorerState.SCORING
    return ScorerState.DETACHED if attachment is not None and not attachment.is_attached else ScorerState.GONE


# Offsets are committed once a second, and a burst of trajectories takes a few seconds.
_CATCHING_UP_S = 10.0


def behind_words(behind: Behind) -> str:
    """`412, 3.1 s, 2 versions`, or `–`."""
    if not behind.num:
        return "–"
    return f"{behind.num:,}, {behind.seconds:.1f} s, {behind.versions} version{'' if behind.versions == 1 else 's'}"


def plain_line(line: ScorerLine) -> dict[str, object]:
    """A line as plain data, for `echoswarm reward list --json` and the run's summary."""
    return {
        "name": line.name,
        "application": line.application,
        "weight": line.weight,
        "state": line.state.value,
        "share": line.share,
        "behind": {"samples": line.behind.num, "seconds": line.behind.seconds, "versions": line.behind.versions},
        "mean": line.mean,
        "scored": line.num_scored,
        "failed": line.num_failed,
        "stale": line.num_stale,
        "error": line.error,
        "policy": line.policy,
    }
