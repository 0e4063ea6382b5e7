"""What an error of confluent-kafka means: the error of `errors.py` that says what to do.

translate, translated    of a request
check_error              of a consumer's event: go on, or stop
replaced                 of a member whose name another process has
missing                  of a topic that is not there
grown                    of a keyed topic to which somebody adds partitions
not_delivered            of a record without an acknowledgement
transaction_error        of a step of a transaction: repeat it, roll back, or give the writer up
refused, refusal         of an operation that the cluster refuses: which one, on which resource, and the command that allows it
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from confluent_kafka import KafkaError, KafkaException

from echo_bus.client.cluster import RawMessage
from echo_bus.errors import (
    ClusterUnreachable,
    DeliveryFailed,
    MemberReplaced,
    NotAuthorized,
    OffsetLost,
    ProducerFenced,
    TopicMissing,
    TransactionAborted,
    TransportError,
)
from echo_schemas.errors import UserError
from echo_schemas.rights import Acl, Resource

logger = logging.getLogger(__name__)
END_OF_PARTITION = KafkaError._PARTITION_EOF  # noqa: SLF001  public in librdkafka, underscored in Python
LOGIN_REFUSED = frozenset({KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._AUTHENTICATION})  # noqa: SLF001  as above
_NOT_ALLOWED = LOGIN_REFUSED | {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_NO_BROKER = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._TIMED_OUT, KafkaError._RESOLVE})  # noqa: SLF001
MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001
_LOST = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001
_FATAL, _FENCED = KafkaError._FATAL, "fenced by other consumer"  # noqa: SLF001
_REPLACED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID, KafkaError._FENCED})  # noqa: SLF001
LOGIN_HINT = (
    "Check the user and the password, token or certificate in [kafka.client], or in the role's file below [kafka] logins; "
    "is the user known to the cluster?"
)
# Placeholders in the command of the hint, if the principal or the address is unknown.
_SOMEBODY, _SOMEWHERE = "User:LOGIN", "HOST:PORT"
# A role without any permission lacks thirty.
_MOST_NAMED = 3


def kafka_error(exc: KafkaException | SystemError) -> KafkaError | None:
    """The error that a call raised. A fatal one raised out of poll or flush while a Python callback runs arrives as a SystemError; None for
    any other SystemError."""
    cause = exc if isinstance(exc, KafkaException) else exc.__cause__
    return cause.args[0] if isinstance(cause, KafkaException) else None


def translate(error: KafkaException, where: str) -> TransportError:
    """The error for a request to `where` that has failed."""
    cause: KafkaError = error.args[0]
    if cause.code() in _NOT_ALLOWED:
        return NotAuthorized(f"The cluster at {where} does not allow this: {cause.str()}", hint="Compare with `echoswarm acls render`.")
    if cause.code() in _NO_BROKER:
        return ClusterUnreachable(
            f"No broker answers at {where}.",
            hint="Is it running (`echoswarm kafka status`), is the address right, and does it want TLS or a login ([kafka.client])?",
        )
    return TransportError(f"Kafka at {where} says: {cause.str()}.")


@contextmanager
def translated(where: str) -> Iterator[None]:
    """Raises a KafkaException of the block as `translate` says."""
    try:
        yield
    except KafkaException as exc:
        raise translate(exc, where) from exc


def check_error(error: KafkaError, raw: RawMessage, group: str = "") -> None:
    """Return if the client recovers by itself, else raise NotAuthorized, TopicMissing, OffsetLost, MemberReplaced or TransportError.

    `group`: the member's group. A reader joins none and needs no right on one, so without `group` a refusal for a group is ignored.
    """
    code, where = error.code(), f"{raw.topic()}[{raw.partition()}]" if raw.topic() else "the group"
    if code == END_OF_PARTITION:
        return
    if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
        if not group:
            return
        raise refused("Read", Resource.GROUP, group)
    if code == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        raise refused("Read", Resource.TOPIC, raw.topic() or error.str())
    if code in LOGIN_REFUSED:
        raise NotAuthorized(f"The cluster refuses the login: {error.str()}.", hint=LOGIN_HINT)
    if code in MISSING:
        raise missing(where, error)
    if code in _LOST:
        raise OffsetLost(f"The position asked for is not in {where} any more: {error.str()}.", hint="Choose where to go on reading.")
    # A fenced member gets a fatal error whose text alone names the cause.
    if code in _REPLACED or (code == _FATAL and _FENCED in error.str()):
        raise replaced(error.str())
    if code == _FATAL or error.fatal():
        raise TransportError(f"The consumer of {where} failed for good: {error.str()}.")
    logger.warning("The client reports about %s: %s; it goes on by itself", where, error)


def replaced(said: str) -> MemberReplaced:
    """The error for a static member whose name another process has; `said`: what the client says of it."""
    return MemberReplaced(
        f"Another consumer has taken this one's place in the group: {said}.",
        hint="Two processes have the same name. Stop one of them, or give each its own (--name).",
    )


def missing(where: str, error: KafkaError) -> TopicMissing:
    """The error for a topic or a partition, `where` in words, of which the cluster says one of `MISSING`."""
    return TopicMissing(f"{where} does not exist: {error.str()}.", hint="Run `echoswarm topics apply`.")


def grown(topic: str, num_read: int) -> UserError:
    """The error for a keyed topic that has more partitions than the `num_read` that it had when this process began to read."""
    return UserError(
        f"Somebody added partitions: {topic} had {num_read} when this process began to read, and has more. What is written to the new ones "
        "is not read.",
        hint="End all processes of the run and start it once more with --skip. Nothing is lost: what nobody has read is asked for again.",
    )


def not_delivered(physical: str, error: KafkaError | None) -> TransportError:
    """The error for a record that was not acknowledged, or (None) acknowledged without an offset."""
    if error is None:
        # The client assumed the delivery, because a later record was delivered; no broker has confirmed it.
        return DeliveryFailed(
            f"A record for {physical} was acknowledged without an offset, so it may be missing from the log.",
            hint="Publish it again: readers count a repeated record once.",
        )
    if error.code() in MISSING:
        return TopicMissing(f"The topic {physical}, or the partition asked for, does not exist.", hint="Run `echoswarm topics apply`.")
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return refused("Write", Resource.TOPIC, physical)
    return DeliveryFailed(f"A record for {physical} was not acknowledged: {error.str()}.")


def transaction_error(error: KafkaError, doing: str, transactional_id: str) -> TransportError | None:
    """The error for a step of a transaction, `doing` in words; None: the step may be repeated."""
    if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return refused("Write", Resource.TRANSACTIONAL_ID, transactional_id)
    if error.fatal():
        return ProducerFenced(
            f"The transactional producer is dead (while {doing}): {error.str()}.",
            hint="Make a new one and read the newest session claim: only that says whether a successor exists.",
        )
    if error.txn_requires_abort():
        return TransactionAborted(f"The transaction must be rolled back (while {doing}): {error.str()}.")
    return None if error.retriable() else TransportError(f"A transaction failed while {doing}: {error.str()}.")


def refused(operation: str, resource: Resource, name: str) -> NotAuthorized:
    """The error for one refused operation, named as `echoswarm acls render` names it: `refused("Write", Resource.TOPIC, …)`."""
    return refusal(Acl(_SOMEBODY, resource, name, operation))


def refusal(*lacking: Acl, bootstrap: str = _SOMEWHERE) -> NotAuthorized:
    """The error for one or more missing permissions of one principal."""
    first, more = lacking[0], len(lacking) - _MOST_NAMED
    named = ", ".join(acl.words for acl in lacking[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    who = "this login" if first.principal == _SOMEBODY else first.principal
    rest = "all that each role needs: `echoswarm acls render`." if len(lacking) == 1 else "and so on: `echoswarm acls render` prints all."
    return NotAuthorized(f"The cluster refuses {who} {named}.", hint=f"Type `{first.command(bootstrap)}`; {rest}", resource=first.resource)
