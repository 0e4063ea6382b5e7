"""One object per process that opens all readers and writers of one cluster, under one namespace, with one codec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

from echo_bus.blobs.transfer import BlobReader, BlobWriter
from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster
from echo_bus.client.publisher import Publisher
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Deadline
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.dead_letters import DeadLetters
from echo_bus.group.consumer import ConsumerLoop
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
    """Opens publishers, readers, views and the rest for one role. The caller closes what it opened."""

    cluster: Cluster

    def publisher(self, profile: profiles.Properties = profiles.PRODUCER_THROUGHPUT) -> Publisher:
        """A publisher. Choose PRODUCER_LATENCY for records that another role waits for, PRODUCER_BLOBS for chunks."""
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
        """A loop that reads `topics` as a member of `<namespace>.<group>`. `dead_letters` publishes the messages that it cannot read.

        `static_member`, `is_prompt`: see `profiles.group_properties`.
        """
        properties = profiles.group_properties(
            self.namespace.group(group),
            client_id=self.client_id,
            next_generation=next_generation,
            static_member=static_member,
            is_prompt=is_prompt,
        )
        return ConsumerLoop(self.cluster, self, topics, handler, properties=properties, dead_letters=dead_letters, limits=limits)

    def dead_letters(self, publisher: Publisher) -> DeadLetters:
        """The dead letters of a reader without a group; the client id stands for the group."""
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
        """A reader by position; see `LogReader`. Choose GATHERING_READER for a stream whose records may come late."""
        return LogReader(
            self.cluster, self, topics, isolation=isolation, on_invalid=on_invalid, check=check, limits=limits, profile=profile
        )

    def look(self, topics: Sequence[Topic], *, isolation: Isolation = Isolation.COMMITTED) -> LogReader:
        """A reader for what a topic holds now. It does not wait at the end; close it then."""
        return self.reader(topics, isolation=isolation, profile=profiles.LOOK)

    def newest(self, topic: Topic, record: type[V], timeout_s: float = _OPEN_S, *, only: str | None = None) -> dict[str, V]:
        """The newest record of every key of a compacted topic, or of the key `only`, as it is now.

        Raises DeadlineExceeded, or as `LogReader.read`.
        """
        view = CompactedView(self.look([topic]), self, topic, record, only=only)
        with closing(view):
            view.load(Deadline.after(timeout_s, self.clock))
            return view.items()

    def view(
        self, topic: Topic, record: type[V], *, only: str | None = None, is_outdated: Callable[[V, V], bool] = lambda known, new: False
    ) -> CompactedView[V]:
        """A view of a compacted topic that carries `record`, read to its end. `only`, `is_outdated`: see `CompactedView`."""
        view = CompactedView(self.look([topic]), self, topic, record, only=only, is_outdated=is_outdated)
        view.open(Deadline.after(_OPEN_S, self.clock))
        return view

    def orders(self) -> CompactedView[Control]:
        """The orders of `control` by key, read to the end. Always read them through this: it ignores an order whose epoch is below the
        known one. A tombstone removes an order together with its epoch.
        """
        return self.view(CONTROL, Control, is_outdated=lambda known, new: new.epoch < known.epoch)

    def observer(self) -> WorkObserver:
        """Reads which `requests` the workers' group has committed."""
        group = self.namespace.group(WORKERS_GROUP)
        return WorkObserver(self.cluster, physical=self.namespace.topic(REQUESTS), group=group, client_id=self.client_id)

    def blob_writer(self, publisher: Publisher) -> BlobWriter:
        return BlobWriter(publisher, self)

    def blob_reader(self) -> BlobReader:
        return BlobReader(self.cluster, self)
