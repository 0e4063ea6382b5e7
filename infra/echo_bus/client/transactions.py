"""Transactions: several records, and positions of consumer groups, that readers see together or not at all.

One thread uses a writer. After a fatal error the producer is dead; a successor *may* exist (KIP-98 fencing), but a transaction time-out has
the same effect. So `ProducerFenced` is raised, and the caller reads the newest session claim to find out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException, TopicPartition

from echo_bus.client.cluster import RawConsumer, RawProducer
from echo_bus.client.kafka_errors import kafka_error, transaction_error
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded, ProducerFenced, TransportError
from echo_schemas.topics import PROGRESS

if TYPE_CHECKING:
    from echo_bus.wire import Wire

logger = logging.getLogger(__name__)

# A commit or init asks the coordinator again until this time-out; longer than any fail-over.
DEFAULT_TIMEOUT_S = 60.0
# Rolling back may take so long, even if the time of the transaction has passed.
_ROLLBACK_S = 10.0


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
        self._is_rolling_back = False

    def start(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Take over the transactional id: fences a predecessor and rolls back its open transaction."""
        deadline = Deadline.after(timeout_s, self._clock)
        self._connect(deadline)
        self._call(self._producer.init_transactions, deadline, "taking over the transactional id")

    @contextmanager
    def transaction(self) -> Iterator[Publisher]:
        """Commits what is published inside, by the publisher that it gives, when the block ends; rolls it back if the block raises.

        Raises TransactionAborted if the cluster refused and the same writer may try again, ProducerFenced if the writer is dead.
        """
        deadline = Deadline.after(DEFAULT_TIMEOUT_S, self._clock)
        started_s = self._clock.monotonic_s()
        if self._is_rolling_back:
            self._roll_back(deadline)
        self._call(lambda _: self._producer.begin_transaction(), deadline, "beginning a transaction")
        try:
            yield self._publisher
            # Flushing first makes the commit several times faster, and reports a failed record as such instead of as an abort.
            self._call(self._publisher.flush, deadline, "delivering the transaction's records")
            self._call(self._producer.commit_transaction, deadline, "committing")
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except BaseException:  # also an interrupt: readers must see nothing of the block
            self._abort(deadline)
            raise
        self._metrics.transactions.labels("committed").inc()
        self._metrics.transaction_seconds.observe(self._clock.monotonic_s() - started_s)

    def move(self, member: RawConsumer, positions: list[TopicPartition]) -> None:
        """Set the positions of `member`'s group when the open transaction commits. `member` must not have joined the group."""
        deadline = Deadline.after(DEFAULT_TIMEOUT_S, self._clock)
        group = member.consumer_group_metadata()
        send = self._producer.send_offsets_to_transaction
        self._call(lambda left_s: send(positions, group, left_s), deadline, "moving a group's position")

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

    def _abort(self, deadline: Deadline) -> None:
        """Roll back. An error here must not hide the block's own error, unless the producer is dead."""
        try:
            self._roll_back(Deadline.after(max(deadline.remaining_s(), _ROLLBACK_S), self._clock))
        except ProducerFenced:
            self._metrics.transactions.labels("fenced").inc()
            raise
        except TransportError as exc:
            logger.warning("The transaction is not rolled back yet; the next one waits for it: %s", exc)
        # Rolling back purges unsent records, which reports them as failed.
        self._publisher.forget_failure()
        self._metrics.transactions.labels("aborted").inc()

    def _roll_back(self, deadline: Deadline) -> None:
        """Raises as `_call`; librdkafka then takes no other step before this one is repeated."""
        self._is_rolling_back = True
        self._call(self._producer.abort_transaction, deadline, "rolling back")
        self._is_rolling_back = False

    def _call(self, step: Callable[[float], object], deadline: Deadline, doing: str) -> None:
        """Run one step of the protocol, repeat it after retriable errors, and translate other errors."""
        while True:
            try:
                step(deadline.remaining_s())
            except (KafkaException, SystemError) as exc:
                error = kafka_error(exc)
                if error is None:
                    raise
                failed = transaction_error(error, doing, self._transactional_id)
                if failed is not None:
                    raise failed from exc
                if deadline.expired():
                    raise DeadlineExceeded(f"The transaction coordinator did not answer in time (while {doing}): {error.str()}.") from exc
            else:
                return
