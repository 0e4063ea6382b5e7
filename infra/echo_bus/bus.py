"""The front door: one object per process that opens everything on one cluster, under one namespace, with one codec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from echo_bus.blobs.transfer import BlobReader, BlobWriter
from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster
from echo_bus.client.publisher import Publisher
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Deadline
from echo_bus.dead_letters import DeadLetterLimits, DeadLetters
from echo_bus.group.consumer import ConsumerLoop, group_properties
from echo_bus.group.state import LoopLimits
from echo_bus.message import Handler
from echo_bus.reading.reader import Check, Isolation, LogReader, OnInvalid
from echo_bus.reading.view import CompactedView
from echo_bus.requests.dispatch import WORKERS_GROUP, WorkObserver
from echo_bus.wire import Wire
from echo_schemas.records import Control, Record
from echo_schemas.topics import CONTROL, REQUESTS, Topic

V = TypeVar("V", bound=Record)
_OPEN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus(Wire):
    """Opens publishers, readers, views and the rest for one role. What is opened is closed by whoever opened it."""

    cluster: Cluster

    def publisher(self, profile: profiles.Properties = profiles.PRODUCER_THROUGHPUT) -> Publisher:
        """A publisher; choose PRODUCER_LATENCY where somebody waits, PRODUCER_BLOBS for chunks."""
        return Publisher(self.cluster.producer({**profile, "client.id": self.client_id}), self)

    def transactions(self, role: str | None = None, profile: profiles.Properties = profiles.TRANSACTIONAL) -> TransactionalWriter:
        """The transactional writer of this role; `start` it before use."""
        transactional_id = self.namespace.transactional_id(role or self.role)
        producer = self.cluster.producer({**profile, "client.id": self.client_id, "transactional.id": transactional_id})
        return TransactionalWriter(producer, self, transactional_id)

    def consumer(
        self,
        topics: Sequence[Topic],
        group: str,
        handler: Handler,
        dead_letters: Publisher,
        *,
        next_generation: bool = False,
        static_member: str | None = None,
        is_prompt: bool = False,
        limits: LoopLimits | None = None,
    ) -> ConsumerLoop:
        """A loop that reads `topics` as a member of `<namespace>.<group>`; what it cannot read goes out through `dead_letters`.

        `static_member`, `is_prompt`: see `group_properties`.
        """
        properties = group_properties(
            self.namespace.group(group),
            client_id=self.client_id,
            next_generation=next_generation,
            static_member=static_member,
            is_prompt=is_prompt,
        )
        return ConsumerLoop(self.cluster, self, topics, handler, properties=properties, dead_letters=dead_letters, limits=limits)

    def dead_letters(self, publisher: Publisher) -> DeadLetters:
        """Where a reader without a group sends what it cannot read; the client id stands for the group."""
        return DeadLetters(publisher, self, self.client_id)

    def reader(
        self,
        topics: Sequence[Topic],
        *,
        isolation: Isolation = Isolation.COMMITTED,
        on_invalid: OnInvalid | None = None,
        check: Check | None = None,
        limits: DeadLetterLimits | None = None,
        profile: profiles.Properties = profiles.READER,
    ) -> LogReader:
        """A reader by position; `start` it where reading begins. `on_invalid` gets what cannot be read or what `check` refuses
        (`DeadLetters.send` fits); `limits`: others than this process has.

        Choose GATHERING_READER for a stream that nobody waits for.
        """
        return LogReader(
            self.cluster, self, topics, isolation=isolation, on_invalid=on_invalid, check=check, limits=limits, profile=profile
        )

    def look(self, topics: Sequence[Topic], *, isolation: Isolation = Isolation.COMMITTED) -> LogReader:
        """A reader for whoever reads what is there and closes it: at the end nothing is waited for."""
        return self.reader(topics, isolation=isolation, profile=profiles.LOOK)

    def newest(self, topic: Topic, record: type[V], timeout_s: float = _OPEN_S, *, only: str | None = None) -> dict[str, V]:
        """The newest record of every key of a compacted topic, or of the key `only`, as it is now.

        Raises DeadlineExceeded, or as `LogReader.read`.
        """
        view = CompactedView(self.look([topic]), self, topic, record, only=only)
        with closing(view):
            view.load(Deadline.after(timeout_s, self.clock))
            return view.items()

    def view(self, topic: Topic, record: type[V], *, only: str | None = None) -> CompactedView[V]:
        """A view of a compacted topic that carries `record`, or of its key `only`, read to its end."""
        view = CompactedView(self.look([topic]), self, topic, record, only=only)
        view.open(Deadline.after(_OPEN_S, self.clock))
        return view

    def orders(self) -> CompactedView[Control]:
        """The orders of `control` by key, read to the end: the one way to read them. Lower epochs are ignored; a tombstone takes back an
        order, and its epoch with it.
        """
        view = CompactedView(self.look([CONTROL]), self, CONTROL, Control, is_outdated=lambda known, new: new.epoch < known.epoch)
        view.open(Deadline.after(_OPEN_S, self.clock))
        return view

    def observer(self) -> WorkObserver:
        """What the workers have done of `requests`, as their group has committed it."""
        group = self.namespace.group(WORKERS_GROUP)
        return WorkObserver(self.cluster, physical=self.namespace.topic(REQUESTS), group=group, client_id=self.client_id)

    def blob_writer(self, publisher: Publisher) -> BlobWriter:
        """Writes blobs through `publisher`."""
        return BlobWriter(publisher, self)

    def blob_reader(self) -> BlobReader:
        """Reads blobs."""
        # Its own login lets a role look up nothing but names below its client id.
        return BlobReader(self.cluster, self)
