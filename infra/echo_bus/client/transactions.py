"""Transactions: several records, and positions of consumer groups, that readers see together or not at all.

One thread uses a writer. After a fatal error the producer is dead; a successor *may* exist (KIP-98 fencing), but a transaction time-out has
the same effect. So `ProducerFenced` is raised, and the caller reads the newest session claim to find out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from echo_bus.client.cluster import RawConsumer, RawProducer
from echo_bus.client.publisher import Publisher, Receipt
from echo_bus.client.refusals import refused
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded, ProducerFenced, TransactionAborted, TransportError
from echo_schemas.records import Record
from echo_schemas.rights import Resource
from echo_schemas.topics import PROGRESS, Topic

if TYPE_CHECKING:
    from echo_bus.wire import Wire

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A commit or init asks the coordinator again until this time-out; longer than any fail-over.
DEFAULT_TIMEOUT_S = 60.0


class TransactionalWriter:
    """Writes transactions under one transactional id. `start` before anything else."""

    def __init__(self, producer: RawProducer, wire: Wire, transactional_id: str) -> None:
        """`producer` was configured with this `transactional.id` (see `profiles.TRANSACTIONAL`)."""
        self._producer = producer
        self._transactional_id = transactional_id
        # A topic that every role with a transactional id may describe; without a name the answer would hold every topic.
        self._topic = wire.namespace.topic(PROGRESS)
        self._metrics, self._clock = wire.metrics, wire.clock
        self._publisher = Publisher(producer, wire, poll=False)
        self._open = False

    def start(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take over the transactional id: fences a predecessor and rolls back its open transaction."""
        deadline = Deadline.after(timeout_s, self._clock)
        self._connect(deadline)
        self._call(self._producer.init_transactions, deadline, "taking over the transactional id")

    @contextmanager
    def transaction(self) -> Iterator[TransactionalWriter]:
        """Commits the records published inside when the block ends; rolls them back if it raises.

        Raises TransactionAborted if the cluster refused and the same writer may try again, ProducerFenced if the writer is dead.
        """
        deadline = Deadline.after(DEFAULT_TIMEOUT_S, self._clock)
        started_s = self._clock.monotonic_s()
        self._call(lambda _: self._producer.begin_transaction(), deadline, "beginning a transaction")
        self._open = True
        try:
            yield self
            self._commit(deadline)
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except BaseException:  # also an interrupt: readers must see nothing of the block
            self._abort(deadline)
            raise
        finally:
            self._open = False
        self._metrics.transactions.labels("committed").inc()
        self._metrics.transaction_seconds.observe(self._clock.monotonic_s() - started_s)

    def publish(self, topic: Topic, record: Record, *, key: str | None = None, partition: int | None = None) -> Receipt:
        """Hand over a record of the open transaction. Its receipt is settled at the latest when the transaction commits."""
        self._require_open()
        return self._publisher.publish(topic, record, key=key, partition=partition)

    def publish_tombstone(self, topic: Topic, key: str) -> Receipt:
        """Delete `key`, within the open transaction."""
        self._require_open()
        return self._publisher.publish_tombstone(topic, key)

    def publish_bytes(
        self,
        physical: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
        partition: int | None = None,
    ) -> Receipt:
        """Hand over bytes unchanged, within the open transaction."""
        self._require_open()
        return self._publisher.publish_bytes(physical, value, key=key, headers=headers, partition=partition)

    def move(self, member: RawConsumer, positions: list[TopicPartition]) -> None:
        """Set the positions of `member`'s group when the open transaction commits. `member` must not have joined the group."""
        self._require_open()
        deadline = Deadline.after(DEFAULT_TIMEOUT_S, self._clock)
        group = member.consumer_group_metadata()
        self._call(
            lambda left_s: self._producer.send_offsets_to_transaction(positions, group, left_s), deadline, "moving a group's position"
        )  # fmt: skip

    def close(self) -> None:
        """Drop the records that are not sent. The coordinator rolls an open transaction back."""
        self._producer.purge()

    def _connect(self, deadline: Deadline) -> None:
        """Open a connection first: without one the client finds no broker to ask for its coordinator, and retries after half a second."""
        try:
            # Twice, because the client closes the connection to the configured address once it knows its brokers.
            for _ in range(2):
                self._producer.list_topics(self._topic, timeout=deadline.remaining_s())
        except KafkaException as exc:
            logger.debug("No broker answers yet: %s", exc)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError("A transactional writer publishes only inside `with writer.transaction():`.")

    def _commit(self, deadline: Deadline) -> None:
        # Flushing first makes the commit several times faster, and reports a failed record as such instead of as an abort.
        self._call(lambda timeout_s: self._publisher.flush(timeout_s), deadline, "delivering the transaction's records")
        self._call(self._producer.commit_transaction, deadline, "committing")

    def _abort(self, deadline: Deadline) -> None:
        """Roll back. An error here must not hide the block's own error, unless the producer is dead."""
        try:
            self._call(self._producer.abort_transaction, deadline, "rolling back")
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except TransportError as exc:
            logger.warning("The transaction could not be rolled back and will time out: %s", exc)
        # Rolling back purges unsent records, which reports them as failed.
        self._publisher.forget_failure()
        self._metrics.transactions.labels("aborted").inc()

    def _call(self, step: Callable[[float], object], deadline: Deadline, doing: str) -> None:
        """Run one step of the protocol, repeat it after retriable errors, and translate other errors."""
        while True:
            try:
                step(deadline.remaining_s())
            except KafkaException as exc:
                error: KafkaError = exc.args[0]
                cause: BaseException = exc
            except SystemError as exc:
                # A fatal error raised out of poll or flush while a Python callback runs arrives wrapped.
                if not isinstance(exc.__cause__, KafkaException):
                    raise
                error, cause = exc.__cause__.args[0], exc
            else:
                return
            if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
                raise refused("Write", Resource.TRANSACTIONAL_ID, self._transactional_id) from cause
            if error.fatal():
                raise ProducerFenced(
                    f"The transactional producer is dead (while {doing}): {error.str()}.",
                    hint="Make a new one and read the newest session claim: only that says whether a successor exists.",
                ) from cause
            if error.txn_requires_abort():
                raise TransactionAborted(f"The transaction must be rolled back (while {doing}): {error.str()}.") from cause
            if not error.retriable():
                raise TransportError(f"A transaction failed while {doing}: {error.str()}.") from cause
            if deadline.expired():
                raise DeadlineExceeded(f"The transaction coordinator did not answer in time (while {doing}): {error.str()}.") from cause
