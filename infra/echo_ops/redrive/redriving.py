"""Letters written again, each once: a batch of letters and the positions of their groups are one transaction.

Everything happens on the caller's thread. After a kill or Ctrl-C, the next redrive goes on where the last transaction ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

from confluent_kafka import TopicPartition

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.cluster import RawConsumer, RawMessage
from echo_bus.client.consumer_queries import committed, open_asker
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.errors import ProducerFenced
from echo_ops.redrive.letters import Letter, letter_of
from echo_ops.redrive.preparing import Handling, Mend, Prepared, Preparing, with_bytes_of
from echo_replay.raw_log import RawLog
from echo_schemas.errors import InvalidReason, UserError
from echo_schemas.records import Coordinates
from echo_schemas.topics import REQUESTS, REWARDS, TRAJECTORIES, Topic

ROLE = "redrive"
REDRIVABLE = (TRAJECTORIES, REWARDS, REQUESTS)
"""Topics with many independent writers; see docs/decisions/0026-redrive.md."""
# A transaction takes a few milliseconds; with this many letters in it the letters take longer.
_AT_ONCE = 100
_PARTITION = 0


@dataclass(slots=True)
class Tally:
    """What was done. `stopped`: the letter before which a redrive ended."""

    done: Counter[Handling] = field(default_factory=Counter)
    stopped: Prepared | None = None


class Backlog:
    """The letters of one topic, and which of them were redriven or discarded. A context manager."""

    def __init__(self, bus: Bus, topic: Topic) -> None:
        """Raises TopicMissing, NotAuthorized, ClusterUnreachable."""
        self.topic = topic
        self._bus = bus
        self._physical = bus.namespace.dead_letters(topic)
        self._clients = ExitStack()
        self._members: dict[str, RawConsumer] = {}
        self._handled: dict[str, tuple[int, str]] = {}
        self._originals: RawLog | None = None
        self._log = self._clients.enter_context(RawLog(bus, self._physical))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    @property
    def end(self) -> int:
        """The offset after the newest letter."""
        return self._log.ends[_PARTITION]

    def offsets_between(self, since_ms: int | None, until_ms: int | None) -> tuple[int, int]:
        """The first offset of the letters from one time to another, both included, and that after the last; None: without this bound."""
        first = 0 if since_ms is None else self._log.offsets_at(since_ms)[_PARTITION]
        return first, self.end if until_ms is None else self._log.offsets_at(until_ms + 1)[_PARTITION]

    def letters(self, *, first: int = 0, end: int | None = None) -> Iterator[Letter]:
        """All letters from offset `first` up to `end` (None: to the end), in order, handled ones too."""
        return (letter_of(raw, self.topic) for raw in self.messages(first=first, end=end))

    def messages(self, *, first: int = 0, end: int | None = None) -> Iterator[RawMessage]:
        """The same as they lie."""
        begin, until = max(self._log.lows[_PARTITION], first), self.end if end is None else min(self.end, end)
        for messages in self._log.within({_PARTITION: (begin, until)}) if begin < until else ():
            yield from messages

    def position(self, reason: str) -> int:
        """The letters of `reason` before this offset are handled."""
        return self._handled_of(reason)[0]

    def last_done(self, reason: str) -> str:
        """What was done last with letters of `reason`, and by whom; empty if nothing was."""
        return self._handled_of(reason)[1]

    def _handled_of(self, reason: str) -> tuple[int, str]:
        if reason not in self._handled:
            (found,) = committed(self.member(reason), [(self._physical, _PARTITION)], asks_for=self._group_of(reason))
            self._handled[reason] = (max(0, found.offset), found.metadata or "")
        return self._handled[reason]

    def waiting(self, reasons: frozenset[str], end: int | None = None) -> Iterator[Letter]:
        """Unhandled letters of `reasons` (none: all) up to `end`, in order."""
        first = min(map(self.position, reasons)) if reasons else 0
        for letter in self.letters(first=first, end=end):
            if (not reasons or letter.reason in reasons) and letter.offset >= self.position(letter.reason):
                yield letter

    def original(self, letter: Letter) -> Letter | None:
        """The whole letter of a copy that was cut; None if its topic does not hold the original any more."""
        if letter.origin is None:
            return None
        if self._originals is None:
            self._originals = self._clients.enter_context(RawLog(self._bus, self._bus.namespace.topic(self.topic), profiles.LOOK))
        log, partition, offset = self._originals, letter.origin.partition, letter.origin.offset
        if not log.lows.get(partition, offset + 1) <= offset < log.ends.get(partition, 0):
            return None
        found = next(log.between(partition, [offset]), None)
        return None if found is None else with_bytes_of(letter, letter_of(found, self.topic))

    def member(self, reason: str) -> RawConsumer:
        """A client of the group whose position says which letters of `reason` are handled. It does not join the group."""
        if reason not in self._members:
            member = self._members[reason] = open_asker(self._bus.cluster, self._group_of(reason), self._bus.client_id)
            self._clients.callback(member.close)
        return self._members[reason]

    def _group_of(self, reason: str) -> str:
        return self._bus.namespace.group(ROLE, f"{self.topic.name}.{reason}")

    def place(self, offset: int, note: str) -> TopicPartition:
        """A position for the client, with `note` as its metadata."""
        return TopicPartition(self._physical, _PARTITION, offset, note)


class Redrive:
    """One redrive of a backlog. `mend` None: the original bytes are written."""

    def __init__(self, bus: Bus, backlog: Backlog, *, by: str, mend: Mend | None = None) -> None:
        self._bus = bus
        self._backlog = backlog
        self._by = by
        self._preparing = Preparing(wire=bus, whole=backlog.original, by=by, mend=mend)

    def prepared(self, letters: Iterator[Letter]) -> Iterator[Prepared]:
        """The handling of each letter. Writes nothing. A message that several readers could not use has a letter of each."""
        written: set[Coordinates] = set()
        for letter in letters:
            if letter.origin is not None and letter.origin in written:
                yield Prepared(letter=letter, handling=Handling.REPEATED)
                continue
            found = self._preparing.prepare(letter, self._bus.clock.time_ms())
            if found.handling is Handling.WRITE and letter.origin is not None:
                written.add(letter.origin)
            yield found

    def run(
        self,
        letters: Iterator[Letter],
        tally: Tally | None = None,
        *,
        rate: float | None = None,
        passes_by: bool = False,
        note: Callable[[Tally], None] = lambda _: None,
    ) -> Tally:
        """Write `letters`, `rate` a second at most. Ends before a letter that would come straight back, unless `passes_by`. Counts in
        `tally`, which is also returned.

        Raises UserError if another redrive has begun or the mend fails, and TransportError; finished batches stay done.
        """
        tally = tally or Tally()
        prepared = self.prepared(letters)
        with _alone(self._bus) as writer:
            while tally.stopped is None and (batch := list(islice(prepared, _batch_size(rate)))):
                began_s = self._bus.clock.monotonic_s()
                stop = next((number for number, each in enumerate(batch) if each.handling is Handling.STOP and not passes_by), None)
                if stop is not None:
                    tally.stopped = batch[stop]
                    del batch[stop:]
                if not batch:
                    break
                self._write(writer, batch)
                tally.done.update(each.handling for each in batch)
                note(tally)
                if rate is not None:
                    time.sleep(max(0.0, len(batch) / rate - (self._bus.clock.monotonic_s() - began_s)))
        return tally

    def _write(self, writer: TransactionalWriter, batch: list[Prepared]) -> None:
        physical = self._bus.namespace.topic(self._backlog.topic)
        with writer.transaction() as transaction:
            for each in batch:
                if each.handling is Handling.WRITE:
                    transaction.publish_bytes(physical, each.value, key=each.key, headers=each.headers, partition=each.partition)
            for reason, end in {each.letter.reason: each.letter.offset + 1 for each in batch}.items():
                writer.move(self._backlog.member(reason), [self._backlog.place(end, f"redriven by {self._by}")])


def discard(bus: Bus, backlog: Backlog, letters: Iterator[Letter], *, by: str) -> Counter[str]:
    """Mark `letters` as handled; returns their number by reason. Retention removes them later. Raises as `Redrive.run`."""
    ends: dict[str, int] = {}
    counts: Counter[str] = Counter()
    with _alone(bus) as writer:
        for letter in letters:
            ends[letter.reason] = letter.offset + 1
            counts[letter.reason] += 1
        if ends:
            with writer.transaction():
                for reason, end in ends.items():
                    writer.move(backlog.member(reason), [backlog.place(end, f"discarded by {by}")])
    return counts


@contextmanager
def _alone(bus: Bus) -> Iterator[TransactionalWriter]:
    """The namespace's only redrive. It fences the one before, so read positions inside the block, never before it."""
    with closing(bus.transactions(ROLE)) as writer:
        writer.start()
        try:
            yield writer
        except ProducerFenced as exc:
            raise UserError(
                "Another redrive of this namespace has begun, so this one ends.", hint="Run one at a time; nothing was written twice."
            ) from exc


def require_redrivable(name: str) -> Topic:
    """The topic `name`. Raises UserError for a topic whose letters are not redriven."""
    known = {topic.name: topic for topic in REDRIVABLE}
    if name not in known:
        raise UserError(
            f"Dead letters of {name!r} are not brought back.",
            hint=f"Only those of {', '.join(known)} are: in the others an older record would replace a newer one, or only the learner "
            "may write.",
        )
    return known[name]


def require_reasons(names: Sequence[str]) -> frozenset[str]:
    """`names` as a set. Raises UserError for an unknown reason."""
    known = {reason.value for reason in InvalidReason}
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"There is no reason {wrong[0]!r}.", hint=f"Reasons are {', '.join(sorted(known))}.")
    return frozenset(names)


def _batch_size(rate: float | None) -> int:
    """Letters of one transaction; with a rate those of a quarter of a second, so that the rate is even."""
    return _AT_ONCE if rate is None else max(1, min(_AT_ONCE, int(rate / 4)))
