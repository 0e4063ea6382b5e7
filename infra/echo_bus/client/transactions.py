"""Transactions: several records, and positions of consumer groups, that others see together or not at all.

One thread uses a writer. A fatal error means this producer is dead and *may* mean that a successor exists (KIP-98 fencing, but also a
transaction time-out): `ProducerFenced` says so, and the caller decides by reading the newest session claim.
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

# A commit or init asks the coordinator again until this is over; longer than any fail-over.
DEFAULT_TIMEOUT_S = 60.0


class TransactionalWriter:
    """Writes transactions under one transactional id. `start` before anything else."""

    def __init__(self, producer: RawProducer, wire: Wire, transactional_id: str) -> None:
        """`producer` was configured with this `transactional.id` (see `profiles.TRANSACTIONAL`)."""
        self._producer = producer
        self._transactional_id = transactional_id
        # One that everybody with a transactional id may see; without a name the answer describes every topic of the cluster.
        self._topic = wire.namespace.topic(PROGRESS)
        self._metrics, self._clock = wire.metrics, wire.clock
        self._publisher = Publisher(producer, wire, poll=False)
        self._open = False

    def start(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take over the transactional id: an unfinished transaction of a predecessor is rolled back and the predecessor fenced."""
        deadline = Deadline.after(timeout_s, self._clock)
        self._connect(deadline)
        self._call(self._producer.init_transactions, deadline, "taking over the transactional id")

    @contextmanager
    def transaction(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Iterator[TransactionalWriter]:
        """Everything published inside commits when the block ends, and is rolled back when it raises.

        Raises TransactionAborted when the cluster refused and the same writer may try again, ProducerFenced when the writer is dead.
        """
        deadline = Deadline.after(timeout_s, self._clock)
        started_s = self._clock.monotonic_s()
        self._call(lambda _: self._producer.begin_transaction(), deadline, "beginning a transaction")
        self._open = True
        try:
            yield self
            self._commit(deadline)
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except BaseException:  # whatever ended the block, an interrupt included: nothing of it may be seen
            self._abort(deadline)
            raise
        finally:
            self._open = False
        self._metrics.transactions.labels("committed").inc()
        self._metrics.transaction_seconds.observe(self._clock.monotonic_s() - started_s)

    def publish(self, topic: Topic, record: Record, *, key: str | None = None, partition: int | None = None) -> Receipt:
        """Hand over a record of the open transaction. Its receipt settles at the latest when the transaction commits."""
        self._require_open()
        return self._publisher.publish(topic, record, key=key, partition=partition)

    def publish_tombstone(self, topic: Topic, key: str) -> Receipt:
        """Say, within the open transaction, that `key` is gone."""
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
        """Hand over bytes as they are, within the open transaction."""
        self._require_open()
        return self._publisher.publish_bytes(physical, value, key=key, headers=headers, partition=partition)

    def move(self, member: RawConsumer, positions: list[TopicPartition], timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Let the group of `member`, a client that has joined nothing, stand at `positions` once the open transaction is committed."""
        self._require_open()
        deadline = Deadline.after(timeout_s, self._clock)
        group = member.consumer_group_metadata()
        self._call(
            lambda left_s: self._producer.send_offsets_to_transaction(positions, group, left_s), deadline, "moving a group's position"
        )  # fmt: skip

    def close(self) -> None:
        """Forget the writer. An open transaction is left to the coordinator, which rolls it back."""
        self._producer.purge()

    def _connect(self, deadline: Deadline) -> None:
        """Have a connection: a client without one finds nobody to ask for its coordinator, and asks again half a second later."""
        try:
            # The first answer comes over a connection to the configured address, which the client gives up once it knows its brokers.
            for _ in range(2):
                self._producer.list_topics(self._topic, timeout=deadline.remaining_s())
        except KafkaException as exc:
            logger.debug("No broker answers yet: %s", exc)

    def _require_open(self) -> None:
        if not self._open:
            raise TransportError("A transactional writer publishes only inside `with writer.transaction():`.")

    def _commit(self, deadline: Deadline) -> None:
        # Flushing first makes the commit itself several times quicker, and a record that failed is named here, not as an abort.
        self._call(lambda timeout_s: self._publisher.flush(timeout_s), deadline, "delivering the transaction's records")
        self._call(self._producer.commit_transaction, deadline, "committing")

    def _abort(self, deadline: Deadline) -> None:
        """Roll back; an error here must not hide the one that led here, unless the producer is dead."""
        try:
            self._call(self._producer.abort_transaction, deadline, "rolling back")
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except TransportError as exc:
            logger.warning("The transaction could not be rolled back and will time out: %s", exc)
        # Rolling back purges what was not sent yet, which reports it as failed.
        self._publisher.forget_failure()
        self._metrics.transactions.labels("aborted").inc()

    def _call(self, step: Callable[[float], object], deadline: Deadline, doing: str) -> None:
        """Run one step of the protocol, again while the cluster asks for patience, and translate what it raises."""
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
