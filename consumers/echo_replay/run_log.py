"""What the log says of one run beside its trajectories: steps, drops, manifests, requests, replies, dead letters, and what the run is.

Order of reading. `steps` is read first, to where it ends now; everything else afterwards. So whatever a step speaks of is there, or will
never be. A transaction becomes visible partition by partition: `drops` and `weights` are read until every transaction is decided that was
open when `steps` had been read.

Memory: what is kept is a few dozen bytes a sample, drop and request, and the reports without their batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_bus.dead_letters import REASON, DeadLetterLimits
from echo_bus.errors import BlobCorrupt, DeadlineExceeded, OffsetLost
from echo_bus.message import LazyHeaders, Message
from echo_bus.reading.reader import Isolation, LogReader
from echo_replay.raw_log import RawLog
from echo_schemas.columns import LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.headers import number_of
from echo_schemas.records import (
    Batch,
    Coordinates,
    Drop,
    Purpose,
    ReplyOutcome,
    RewardColumn,
    RolloutReply,
    RolloutRequest,
    Run,
    SessionClaim,
    StepReport,
    WeightManifest,
)
from echo_schemas.topics import DROPS, REPLIES, REQUESTS, RUNS, STEPS, TRAJECTORIES, WEIGHTS, Topic, weights_key

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

Goal = dict[tuple[str, int], int]
"""Up to where to read, by (logical topic, partition)."""

READ_S = 600.0
# Longer than any transaction may stay open.
_SETTLE_S = 70.0
_READ_AT_ONCE = 1_000
# `steps` has one partition: reports are in one order.
_STEPS_PARTITION = 0
_DEAD_LETTER = "__connect.errors."
# What other settings may take.
_REFUSED = frozenset(reason.value.encode() for reason in (InvalidReason.NOT_ASKED, InvalidReason.BAD_SIGNATURE))
# An audit reads on whatever it meets: what is no record is counted, and proves nothing.
_ANY_NUMBER = DeadLetterLimits(stop_after=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A report, and its batch as arrays of one entry a sample. `offset`: of the report on `steps`.

    `groups`: which group of the batch a sample belongs to; `attempts`: `hash` of its group's token, as an index has it.
    `rewards`: the columns of the batch. `missing`: why the batch could not be read; the arrays are empty then.
    """

    report: StepReport
    offset: int
    partitions: Ints
    offsets: Ints
    seqs: Ints
    indices: Ints
    groups: Ints
    attempts: Ints
    advantages: Floats
    tokens: tuple[str, ...]
    rewards: tuple[RewardColumn, ...] = ()
    missing: str = ""
    corrupt: bool = False

    @property
    def version(self) -> int:
        """The version that it made."""
        return self.report.version

    @property
    def is_sequential(self) -> bool:
        """Whether the learner asked for exactly this step's samples."""
        return "requests_sent" in self.report.metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """What a fork goes on from: its ancestors' seqs up to the version that it began at. `trained`: the run and version of each.

    `version` 0 and `run_id` None: it is no fork. `doubt`: why not all of it is known, if so.
    """

    run_id: str | None = None
    version: int = 0
    sha256: str = ""
    trained: Mapping[int, tuple[str, int]] = field(default_factory=dict)
    closed: frozenset[int] = frozenset()
    doubt: str = ""


@dataclass(slots=True)
class RunLog:
    """One run, without its trajectories. Lists are in the order of the log; `lows` tells what of each partition retention has left."""

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
    """Trajectory records that the learner could not read, and of which it put a copy into the dead letters."""
    refused: list[Coordinates] = field(default_factory=list)
    """Those that it put there because nobody had asked for them, or no trusted key had signed them: other settings may take them."""
    issued: set[int] = field(default_factory=set)
    correlations: set[str] = field(default_factory=set)
    replies: list[RolloutReply] = field(default_factory=list)
    lows: dict[str, dict[int, int]] = field(default_factory=dict)
    inherited: Inherited = Inherited()
    unreadable: dict[str, int] = field(default_factory=dict)
    """Messages that are no record of their topic, by topic."""

    @property
    def has_begun(self) -> bool:
        """Whether the log knows the run at all."""
        return bool(self.steps or self.claims or self.runs or self.manifests or self.issued)

    @property
    def has_whole_history(self) -> bool:
        """Whether no report of the run was removed: the first one is there, or there is none yet."""
        first = self.inherited.version + 1
        return not self.steps or self.steps[0].report.version == first or not self.lows[STEPS.name].get(0)

    @property
    def tip(self) -> int:
        """The newest version whose report is committed."""
        return max((step.version for step in self.steps), default=0)


def read_steps(bus: Bus, log: RunLog) -> None:
    """The reports and claims, to where `steps` ends now. Raises DeadlineExceeded, TransportError."""
    with closing(StepsFollower(bus, log)) as follower:
        follower.read()


def read_rest(bus: Bus, log: RunLog) -> DropsFollower:
    """Everything else but trajectories. The follower, to be closed, goes on where the drops ended."""
    goal = high_watermarks(bus, [DROPS, WEIGHTS])
    follower = DropsFollower(bus, log)
    try:
        log.drops = follower.read(goal)
        read_manifests(bus, log, goal)
        _read_asked(bus, log)
        read_dead_letters(bus, log)
    except BaseException:  # whatever ends the reading: the client must not outlive it
        follower.close()
        raise
    return follower


def read_manifests(bus: Bus, log: RunLog, goal: Goal, settle_s: float | None = None) -> None:
    """What was published, up to `goal`. Raises DeadlineExceeded if a transaction stays open for `settle_s`."""
    with closing(_reader(bus, [WEIGHTS], log)) as reader:
        reader.start()
        _note_lows(log, reader)
        current = weights_key(log.run_id, None)
        for message in _settled(reader, goal, bus, settle_s):
            if isinstance(message.record, WeightManifest):
                log.manifests.append((message.offset, message.key == current, message.record))


def read_ancestors(bus: Bus, log: RunLog) -> None:
    """Of a fork, what it inherited: read from its ancestors' reports and drops. Raises DeadlineExceeded, TransportError."""
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
    """Reads the reports and claims into a `RunLog`, and again what has come since. `close` it."""

    def __init__(self, bus: Bus, log: RunLog) -> None:
        self._bus, self._log = bus, log
        self._reader = _reader(bus, [STEPS], log)
        self._ends: Goal | None = self._reader.start()
        _note_lows(log, self._reader)

    def read(self) -> list[Step]:
        """Up to where `steps` ends now; the steps that are new. Raises DeadlineExceeded, TransportError."""
        num_known = len(self._log.steps)
        if self._ends is not None:
            # The first time, where it ended when the partitions' beginnings were noted.
            messages, self._ends = _messages(self._reader, self._ends, self._bus), None
        else:
            # A reader that was at the end once takes itself to be there: only positions say whether something has come.
            messages = _settled(self._reader, self._reader.end_offsets(), self._bus, None)
        for message in messages:
            if isinstance(message.record, StepReport):
                self._log.steps.append(_step(self._bus, message.record, message.offset))
            elif isinstance(message.record, SessionClaim):
                self._log.claims.append((message.offset, message.record))
        return self._log.steps[num_known:]

    def close(self) -> None:
        """Close the client."""
        self._reader.close()


class DropsFollower:
    """Reads `drops`, and again what has come since. `close` it."""

    def __init__(self, bus: Bus, log: RunLog) -> None:
        self._bus = bus
        self._reader = _reader(bus, [DROPS], log)
        self._reader.start()
        _note_lows(log, self._reader)

    def read(self, goal: Goal | None = None) -> list[Drop]:
        """Up to `goal`, or to where the topic ends now, every open transaction decided."""
        return list(self.each(goal))

    def each(self, goal: Goal | None = None, settle_s: float | None = None) -> Iterator[Drop]:
        """The same one by one, for whoever keeps less than the records. Raises DeadlineExceeded if a transaction stays open for
        `settle_s`.
        """
        wanted = goal or high_watermarks(self._bus, [DROPS])
        for message in _settled(self._reader, wanted, self._bus, settle_s):
            if isinstance(message.record, Drop):
                yield message.record

    def close(self) -> None:
        """Close the client."""
        self._reader.close()


def batch_of(bus: Bus, report: StepReport) -> Batch:
    """The report's batch, wherever it is. Raises BlobCorrupt, OffsetLost (retention took it), DeadlineExceeded."""
    if report.batch is not None:
        return report.batch
    assert report.batch_blob is not None, "a report has one of the two"
    try:
        whole = bus.codec.decode(bus.blob_reader().read(report.batch_blob, report.run_id))
    except InvalidRecord as exc:
        raise BlobCorrupt(f"The blob {report.batch_blob.blob} holds no report: {exc.message}") from exc
    if not isinstance(whole, StepReport) or whole.batch is None or whole.version != report.version:
        raise BlobCorrupt(f"The blob {report.batch_blob.blob} does not hold the report of version {report.version}.")
    return whole.batch


def read_batch(bus: Bus, step: Step) -> Batch:
    """The batch of a step once more, with its rewards, of which a `Step` keeps none. Raises as `batch_of`."""
    with RawLog(bus, bus.namespace.topic(STEPS), profiles.GLIMPSE) as steps:
        for raw in steps.between(_STEPS_PARTITION, [step.offset]):
            record = bus.codec.decode(raw.value())
            if isinstance(record, StepReport) and record.run_id == step.report.run_id:
                return batch_of(bus, record)
    raise OffsetLost(f"The report of version {step.version} is no longer at offset {step.offset} of steps.")


def _step(bus: Bus, report: StepReport, offset: int) -> Step:
    try:
        batch = batch_of(bus, report)
    except (BlobCorrupt, DeadlineExceeded) as exc:
        return _empty_step(report, offset, exc.message, corrupt=True)
    except OffsetLost as exc:
        return _empty_step(report, offset, exc.message)
    try:
        return _filled_step(report, offset, batch)
    except ValueError as exc:
        return _empty_step(report, offset, f"the columns of its batch contradict one another ({exc})", corrupt=True)


def _filled_step(report: StepReport, offset: int, batch: Batch) -> Step:
    """Raises ValueError if the columns do not fit together."""
    sizes = np.frombuffer(batch.group_sizes, TOKEN_DTYPE)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    if len(groups) != batch.num_samples:
        message = f"groups of {len(groups)} samples for {batch.num_samples}"
        raise ValueError(message)
    keys = np.array([hash(attempt.encode()) for attempt in batch.attempts], np.int64)
    return Step(
        # What an audit needs of the batch is in the arrays.
        report=replace(report, batch=None),
        offset=offset,
        partitions=np.frombuffer(batch.partitions, TOKEN_DTYPE).astype(np.int64),
        offsets=np.frombuffer(batch.offsets, OFFSET_DTYPE),
        seqs=np.frombuffer(batch.seqs, OFFSET_DTYPE),
        indices=np.frombuffer(batch.indices, TOKEN_DTYPE).astype(np.int64),
        groups=groups,
        attempts=keys[groups],
        advantages=np.frombuffer(batch.advantages, LOGPROB_DTYPE),
        tokens=batch.attempts,
        rewards=batch.rewards,
    )


def _empty_step(report: StepReport, offset: int, missing: str, *, corrupt: bool = False) -> Step:
    none = np.zeros(0, np.int64)
    return Step(
        report=report,
        offset=offset,
        partitions=none,
        offsets=none,
        seqs=none,
        indices=none,
        groups=none,
        attempts=none,
        advantages=np.zeros(0, np.float32),
        tokens=(),
        missing=missing,
        corrupt=corrupt,
    )


def _read_asked(bus: Bus, log: RunLog) -> None:
    """What was asked for and answered, and what the run is."""
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
    """Copies of trajectories that the learner could not read; those of other readers are no terminal state."""
    physical = bus.namespace.topic(TRAJECTORIES)
    learner = bus.namespace.client_id("learner")
    with RawLog(bus, bus.namespace.dead_letters(TRAJECTORIES)) as letters:
        log.lows["trajectories.dlq"] = dict(letters.lows)
        for batch in letters.messages():
            for raw in batch:
                headers = LazyHeaders(raw)
                reader = headers.get(f"{_DEAD_LETTER}connector.name", b"").decode(errors="replace")
                if reader != learner and not reader.startswith(f"{learner}."):
                    continue
                partition, offset = (number_of(headers.get(f"{_DEAD_LETTER}{name}")) for name in ("partition", "offset"))
                if headers.get(f"{_DEAD_LETTER}topic") == physical.encode() and partition is not None and offset is not None:
                    is_readable = headers.get(REASON) in _REFUSED
                    (log.refused if is_readable else log.dead).append(Coordinates(partition=partition, offset=offset))


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
    """Everything below `goal`, the ends of a log with transactions that may still be open: waits until they are decided."""
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
                hint="A learner that was killed leaves one, which the cluster rolls back after a minute: audit again.",
            )
        yield from messages


def high_watermarks(bus: Bus, topics: Sequence[Topic]) -> Goal:
    """Where the topics end, open transactions included."""
    with closing(bus.look(topics, isolation=Isolation.UNCOMMITTED)) as reader:
        return {place: end for place, (_, end) in reader.bounds().items()}
