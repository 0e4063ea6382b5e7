"""The records of one run beside its trajectories: steps, drops, manifests, requests, replies, dead letters, and the run's own record.

Order of reading: first `steps`, to its present end, then all other topics. So every record that a step names is in the log by then, or
never comes. A transaction becomes visible partition by partition: `drops` and `weights` are read until every transaction is decided that
was open when `steps` had been read.

Memory: a few dozen bytes for each sample, drop and request, and the reports without their batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.dead_letters import ORIGINAL_TOPIC, READER, REASON, original_place
from echo_bus.errors import DeadlineExceeded
from echo_bus.message import LazyHeaders, Message
from echo_bus.reading.reader import Isolation, LogReader
from echo_replay.raw_log import RawLog
from echo_replay.steps import Step, step_of
from echo_schemas.errors import InvalidReason, InvalidRecord, UserError
from echo_schemas.records import (
    Coordinates,
    Drop,
    Purpose,
    ReplyOutcome,
    RolloutReply,
    RolloutRequest,
    Run,
    SessionClaim,
    StepReport,
    WeightManifest,
)
from echo_schemas.topics import DROPS, REPLIES, REQUESTS, RUNS, STEPS, TRAJECTORIES, WEIGHTS, Topic, weights_key

Goal = dict[tuple[str, int], int]
"""The offset at which reading ends, by (logical topic, partition)."""

READ_S = 600.0
# Longer than any transaction may stay open.
_SETTLE_S = 70.0
# The same for an export: the next one adds the drops.
_LOOK_S = 3.0
_READ_AT_ONCE = 1_000
# Reasons of refusals that other settings would not give.
_REFUSED = frozenset(reason.value.encode() for reason in (InvalidReason.NOT_ASKED, InvalidReason.BAD_SIGNATURE))
# An audit never stops at an invalid message: it counts the message, and the promise stays unproved.
_ANY_NUMBER = DeadLetterLimits(stop_after=0)


# Of an unknown run's namespace, in the error.
_MOST_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """The ancestors' seqs up to the version at which a fork began. `trained`: by seq, the run and version that trained it. `version` 0 and
    `run_id` None: the run is no fork. `doubt`: why some of these seqs are unknown; empty if none are."""

    run_id: str | None = None
    version: int = 0
    sha256: str = ""
    trained: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    doubt: str = ""


@dataclass(slots=True)
class RunLog:
    """One run, without its trajectories. Lists are in the order of the log; `lows`: the first offset that each partition still holds."""

    run_id: str
    steps: list[Step] = field(default_factory=list)
    claims: list[tuple[int, SessionClaim]] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    late_drops: list[Drop] = field(default_factory=list)
    """Drops of records that became visible while the audit was reading."""
    manifests: list[tuple[int, bool, WeightManifest]] = field(default_factory=list)
    """(offset, whether under the key `current`, manifest)."""
    dead: list[Coordinates] = field(default_factory=list)
    """Trajectory records that the learner could not read and copied to the dead letters."""
    refused: list[Coordinates] = field(default_factory=list)
    """Trajectory records that the learner copied there because no request asked for them, or no trusted key signed them. With other
    settings the learner may accept them."""
    issued: set[int] = field(default_factory=set)
    correlations: set[str] = field(default_factory=set)
    replies: list[RolloutReply] = field(default_factory=list)
    lows: dict[str, dict[int, int]] = field(default_factory=dict)
    inherited: Inherited = Inherited()
    unreadable: dict[str, int] = field(default_factory=dict)
    """By topic: the number of messages that are no record of it."""

    @property
    def has_begun(self) -> bool:
        """Whether the log has any record of the run."""
        return bool(self.steps or self.claims or self.runs or self.manifests or self.issued)

    @property
    def has_whole_history(self) -> bool:
        """Whether the log still holds the run's first report, or the run has none yet."""
        first = self.inherited.version + 1
        return not self.steps or self.steps[0].report.version == first or not self.lows[STEPS.name].get(0)

    def step_of(self, version: int) -> Step | None:
        """The step that made `version`."""
        at = bisect_left(self.steps, version, key=lambda step: step.version)
        return self.steps[at] if at < len(self.steps) and self.steps[at].version == version else None

    @property
    def tip(self) -> int:
        """The newest version whose report is committed."""
        return max((step.version for step in self.steps), default=0)

    @property
    def read_to(self) -> dict[int, int]:
        """By partition of `trajectories`: the offset after the last record that the newest report accounts for."""
        return {position.partition: position.read_to for position in self.steps[-1].report.positions} if self.steps else {}

    @property
    def has_lost_drops(self) -> bool:
        """Whether retention has removed drops."""
        return any(self.lows.get(DROPS.name, {}).values())


def read_steps(bus: Bus, log: RunLog) -> None:
    """Read reports and claims, to the present end of `steps`. Raises DeadlineExceeded, TransportError."""
    with closing(StepsFollower(bus, log)) as follower:
        follower.read()


def read_rest(bus: Bus, log: RunLog) -> DropsFollower:
    """Read all other topics but `trajectories`. The caller closes the follower, which goes on where the drops ended."""
    goal = high_watermarks(bus, [DROPS, WEIGHTS])
    with ExitStack() as clients:
        follower = clients.enter_context(closing(DropsFollower(bus, log)))
        log.drops = follower.read(goal)
        read_manifests(bus, log, goal)
        _read_asked(bus, log)
        read_dead_letters(bus, log)
        clients.pop_all()
    return follower


def read_manifests(bus: Bus, log: RunLog, goal: Goal, settle_s: float | None = None) -> None:
    """Read the manifests below `goal`. Raises DeadlineExceeded if a transaction stays open for `settle_s`."""
    with closing(_reader(bus, [WEIGHTS], log)) as reader:
        reader.start()
        _note_lows(log, reader)
        current = weights_key(log.run_id, None)
        for message in _settled(reader, goal, bus, settle_s):
            if isinstance(message.record, WeightManifest):
                log.manifests.append((message.offset, message.key == current, message.record))


def read_ancestors(bus: Bus, log: RunLog) -> None:
    """Fill `log.inherited` of a fork from its ancestors' reports and drops. Raises DeadlineExceeded, TransportError."""
    first = next((manifest for _, _, manifest in log.manifests if manifest.parent_run is not None), None)
    if first is None or first.parent_run is None:
        return
    begun = first.version if first.parent is None else first.parent
    parent = RunLog(first.parent_run)
    parent_bus = replace(bus, run_id=first.parent_run)
    read_steps(parent_bus, parent)
    read_rest(parent_bus, parent).close()
    read_ancestors(parent_bus, parent)
    steps = [step for step in parent.steps if step.version <= begun]
    trained = dict(parent.inherited.trained)
    for step in steps:
        trained.update(dict.fromkeys(step.seqs.tolist(), (parent.run_id, step.version)))
    dropped = {drop.seq for drop in parent.drops if drop.what is None and drop.learner_version <= begun}
    doubt = parent.inherited.doubt
    if len({step.version for step in steps if not step.missing}) < begun - parent.inherited.version:
        doubt = f"not all steps of {parent.run_id} up to version {begun}, from which this run was forked, are in the log"
    log.inherited = Inherited(
        run_id=parent.run_id,
        version=begun,
        sha256=first.parent_sha256 or "",
        trained=trained,
        closed=parent.inherited.closed | frozenset(trained) | frozenset(dropped),
        doubt=doubt,
    )


class StepsFollower:
    """Reads reports and claims into a `RunLog`; each further `read` adds the new ones. `close` it."""

    def __init__(self, bus: Bus, log: RunLog) -> None:
        self._bus, self._log = bus, log
        self._reader = _reader(bus, [STEPS], log)
        self._ends: Goal | None = self._reader.start()
        _note_lows(log, self._reader)

    def read(self) -> list[Step]:
        """Read to the present end of `steps`; return the new steps. Raises DeadlineExceeded, TransportError."""
        num_known = len(self._log.steps)
        if self._ends is not None:
            # The first time: up to the end at the moment when `lows` were noted.
            messages, self._ends = _messages(self._reader, self._ends, self._bus), None
        else:
            # `read_to_end` returns at once on a reader that has reached the end before: compare positions instead.
            messages = _settled(self._reader, self._reader.end_offsets(), self._bus, None)
        for message in messages:
            if isinstance(message.record, StepReport):
                self._log.steps.append(step_of(self._bus, message.record, message.offset))
            elif isinstance(message.record, SessionClaim):
                self._log.claims.append((message.offset, message.record))
        return self._log.steps[num_known:]

    def close(self) -> None:
        self._reader.close()


class DropsFollower:
    """Reads `drops`; each further `read` returns the new ones. `close` it."""

    def __init__(self, bus: Bus, log: RunLog) -> None:
        self._bus = bus
        self._reader = _reader(bus, [DROPS], log)
        self._reader.start()
        _note_lows(log, self._reader)

    def read(self, goal: Goal | None = None) -> list[Drop]:
        """The drops up to `goal`, or to the topic's present end, once every open transaction is decided."""
        return list(self.each(goal))

    def each(self, goal: Goal | None = None, settle_s: float | None = None) -> Iterator[Drop]:
        """The same one by one. Raises DeadlineExceeded if a transaction stays open for `settle_s`."""
        wanted = goal or high_watermarks(self._bus, [DROPS])
        for message in _settled(self._reader, wanted, self._bus, settle_s):
            if isinstance(message.record, Drop):
                yield message.record

    def close(self) -> None:
        self._reader.close()


def read_drops(bus: Bus, run_id: str) -> tuple[list[Drop], list[str]]:
    """The drops of a run, and why some are unknown, a sentence each. Raises TransportError."""
    drops: list[Drop] = []
    with closing(DropsFollower(bus, RunLog(run_id))) as follower:
        try:
            drops.extend(follower.each(None, _LOOK_S))
        except DeadlineExceeded:
            return drops, ["a transaction on drops is open: the next export adds its drops"]
    return drops, []


def _read_asked(bus: Bus, log: RunLog) -> None:
    """Read requests, replies and the run's own record."""
    with closing(_reader(bus, [REQUESTS, REPLIES, RUNS], log)) as reader:
        ends = reader.start()
        _note_lows(log, reader)
        for message in _messages(reader, ends, bus):
            record = message.record
            if isinstance(record, RolloutRequest):
                if record.purpose is Purpose.TRAIN:
                    log.issued.add(record.seq)
                if record.correlation:
                    log.correlations.add(record.correlation)
            elif isinstance(record, RolloutReply) and record.outcome is ReplyOutcome.DONE:
                log.replies.append(record)
            elif isinstance(record, Run):
                log.runs.append(record)


def read_dead_letters(bus: Bus, log: RunLog) -> None:
    """Read the dead letters of `trajectories` that the learner wrote; another reader's dead letter is no terminal state."""
    physical = bus.namespace.topic(TRAJECTORIES)
    learner = bus.namespace.client_id("learner")
    with RawLog(bus, bus.namespace.dead_letters(TRAJECTORIES)) as letters:
        log.lows["trajectories.dlq"] = dict(letters.lows)
        for batch in letters.messages():
            for raw in batch:
                headers = LazyHeaders(raw)
                reader = headers.get(READER, b"").decode(errors="replace")
                if reader != learner and not reader.startswith(f"{learner}."):
                    continue
                where = original_place(headers)
                if where is not None and headers.get(ORIGINAL_TOPIC) == physical.encode():
                    (log.refused if headers.get(REASON) in _REFUSED else log.dead).append(where)


def _reader(bus: Bus, topics: Sequence[Topic], log: RunLog) -> LogReader:
    def count(_raw: object, topic: Topic, _invalid: InvalidRecord, _whole: bool) -> None:
        log.unreadable[topic.name] = log.unreadable.get(topic.name, 0) + 1

    return bus.reader(topics, on_invalid=count, limits=_ANY_NUMBER, profile=profiles.LOOK)


def _note_lows(log: RunLog, reader: LogReader) -> None:
    for (name, partition), low in reader.positions.items():
        log.lows.setdefault(name, {})[partition] = low


def _messages(reader: LogReader, ends: dict[tuple[str, int], int], bus: Bus) -> Iterator[Message]:
    """Everything below `ends`."""
    for batch in reader.read_to_end(Deadline.after(READ_S, bus.clock), ends):
        for message in batch:
            if message.offset < ends[message.topic.name, message.partition]:
                yield message


def _settled(reader: LogReader, goal: Goal, bus: Bus, settle_s: float | None) -> Iterator[Message]:
    """Every message below `goal`. Waits until the transactions that are open below it are decided."""
    settle_s = _SETTLE_S if settle_s is None else settle_s
    places = [place for place in reader.places if place in goal]
    deadline = Deadline.after(READ_S, bus.clock)
    quiet = Deadline.after(settle_s, bus.clock)
    while any(reader.positions[place] < goal[place] for place in places):
        messages = reader.read(_READ_AT_ONCE, timeout_s=0.5)
        if messages:
            quiet = Deadline.after(settle_s, bus.clock)
        if quiet.expired() or deadline.expired():
            raise DeadlineExceeded(
                f"A transaction on {', '.join(sorted({place[0] for place in places}))} has stayed open for {settle_s:g} s.",
                hint="A killed learner leaves one open, and the cluster rolls it back after a minute: audit again.",
            )
        yield from messages


def high_watermarks(bus: Bus, topics: Sequence[Topic]) -> Goal:
    """The topics' ends, open transactions included."""
    with closing(bus.look(topics, isolation=Isolation.UNCOMMITTED)) as reader:
        return {place: end for place, (_, end) in reader.bounds().items()}


def unknown_run(bus: Bus, run_id: str) -> UserError:
    """The error of a command about a run that the namespace does not have; it names the newest that it has. Raises TransportError."""
    runs = sorted(replace(bus, run_id=None).newest(RUNS, Run).values(), key=lambda run: -run.created_ms)
    named = ", ".join(run.run_id for run in runs[:_MOST_NAMED])
    return UserError(
        f"The namespace {bus.namespace.name!r} knows no run {run_id!r}.",
        hint=f"Its newest: {named}. Name one of them, or the run's file with --config."
        if runs
        else "No run was ever accepted there. Is it the Kafka of the run? `echoswarm doctor` says which one was asked.",
    )
