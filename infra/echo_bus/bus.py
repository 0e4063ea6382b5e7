"""The front door: one object per process that opens everything on one cluster, under one namespace, with one codec."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from echo_bus.blobs.transfer import BlobReader, BlobWriter
from echo_bus.client import profiles
from echo_bus.client.cluster import Cluster
from echo_bus.client.publisher import Publisher
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Clock, Deadline
from echo_bus.dead_letters import DeadLetterLimits, DeadLetters
from echo_bus.group.consumer import ConsumerLoop, group_properties
from echo_bus.group.state import LoopLimits
from echo_bus.message import Handler
from echo_bus.metrics import BusMetrics
from echo_bus.reading.reader import Check, Isolation, LogReader, OnInvalid
from echo_bus.reading.view import CompactedView
from echo_schemas.codec import Codec
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, Record
from echo_schemas.topics import CONTROL, Topic

if TYPE_CHECKING:
    from echo_bus.signatures import Signer, Verifier
    from echo_bus.tracing import Tracer

V = TypeVar("V", bound=Record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bus:
    """Opens publishers, readers, views and the rest for one role. What is opened is closed by whoever opened it.

    `signer` signs what this role publishes on topics whose records have an author; `verifier` refuses there what no trusted key has signed;
    `tracer` follows some groups.
    """

    cluster: Cluster
    namespace: Namespace
    codec: Codec
    metrics: BusMetrics
    clock: Clock
    role: str
    run_id: str | None = None
    dead_letter_limits: DeadLetterLimits = field(default_factory=DeadLetterLimits)
    signer: Signer | None = None
    verifier: Verifier | None = None
    tracer: Tracer | None = None

    @property
    def client_id(self) -> str:
        """`<namespace>.<role>`: what quotas, broker logs and record headers show."""
        return self.namespace.client_id(self.role)

    def publisher(self, profile: profiles.Properties = profiles.PRODUCER_THROUGHPUT) -> Publisher:
        """A publisher; choose PRODUCER_LATENCY where somebody waits, PRODUCER_BLOBS for chunks."""
        producer = self.cluster.producer({**profile, "client.id": self.client_id})
        return Publisher(
            producer,
            namespace=self.namespace,
            codec=self.codec,
            metrics=self.metrics,
            clock=self.clock,
            source=self.client_id,
            signer=self.signer,
            tracer=self.tracer,
        )

    def transactions(self, role: str | None = None, profile: profiles.Properties = profiles.TRANSACTIONAL) -> TransactionalWriter:
        """The transactional writer of this role; `start` it before use."""
        transactional_id = self.namespace.transactional_id(role or self.role)
        producer = self.cluster.producer({**profile, "client.id": self.client_id, "transactional.id": transactional_id})
        return TransactionalWriter(
            producer,
            namespace=self.namespace,
            codec=self.codec,
            metrics=self.metrics,
            clock=self.clock,
            source=self.client_id,
            signer=self.signer,
            tracer=self.tracer,
            transactional_id=transactional_id,
        )

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
        name = self.namespace.group(group)
        return ConsumerLoop(
            self.cluster,
            topics,
            handler,
            properties=group_properties(
                name, client_id=self.client_id, next_generation=next_generation, static_member=static_member, is_prompt=is_prompt
            ),
            namespace=self.namespace,
            codec=self.codec,
            dead_letters=DeadLetters(dead_letters, namespace=self.namespace, group=name, metrics=self.metrics),
            metrics=self.metrics,
            run_id=self.run_id,
            clock=self.clock,
            limits=limits,
            dead_letter_limits=self.dead_letter_limits,
            verifier=self.verifier,
        )

    def dead_letters(self, publisher: Publisher) -> DeadLetters:
        """Where a reader without a group sends what it cannot read; the client id stands for the group."""
        return DeadLetters(publisher, namespace=self.namespace, group=self.client_id, metrics=self.metrics)

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
            self.cluster,
            topics,
            client_id=self.client_id,
            namespace=self.namespace,
            codec=self.codec,
            metrics=self.metrics,
            run_id=self.run_id,
            isolation=isolation,
            on_invalid=on_invalid,
            check=check,
            limits=limits or self.dead_letter_limits,
            profile=profile,
            verifier=self.verifier,
        )

    def look(self, topics: Sequence[Topic], *, isolation: Isolation = Isolation.COMMITTED) -> LogReader:
        """A reader for whoever reads what is there and closes it: at the end nothing is waited for."""
        return self.reader(topics, isolation=isolation, profile=profiles.LOOK)

    def newest(self, topic: Topic, record: type[V], timeout_s: float = 30.0, *, only: str | None = None) -> dict[str, V]:
        """The newest record of every key of a compacted topic, or of the key `only`, as it is now.

        Raises DeadlineExceeded, or as `LogReader.read`.
        """
        view = CompactedView(self.look([topic]), topic, record, metrics=self.metrics, run_id=self.run_id, only=only, clock=self.clock)
        with closing(view):
            view.load(Deadline.after(timeout_s, self.clock))
            return view.items()

    def view(self, topic: Topic, record: type[V], timeout_s: float = 30.0, *, only: str | None = None) -> CompactedView[V]:
        """A view of a compacted topic that carries `record`, or of its key `only`, read to its end."""
        view = CompactedView(self.look([topic]), topic, record, metrics=self.metrics, run_id=self.run_id, only=only, clock=self.clock)
        view.open(Deadline.after(timeout_s, self.clock))
        return view

    def orders(self, timeout_s: float = 30.0) -> CompactedView[Control]:
        """The orders of `control` by key, read to the end: the one way to read them. Lower epochs are ignored; a tombstone takes back an
        order, and its epoch with it.
        """
        view = CompactedView(
            self.look([CONTROL]),
            CONTROL,
            Control,
            metrics=self.metrics,
            run_id=self.run_id,
            clock=self.clock,
            is_outdated=lambda known, new: new.epoch < known.epoch,
        )
        view.open(Deadline.after(timeout_s, self.clock))
        return view

    def blob_writer(self, publisher: Publisher) -> BlobWriter:
        """Writes blobs through `publisher`."""
        return BlobWriter(publisher, metrics=self.metrics, clock=self.clock)

    def blob_reader(self) -> BlobReader:
        """Reads blobs."""
        # Its own login lets a role look up nothing but names below its client id.
        return BlobReader(
            self.cluster, client_id=self.client_id, namespace=self.namespace, codec=self.codec, metrics=self.metrics, clock=self.clock
        )
