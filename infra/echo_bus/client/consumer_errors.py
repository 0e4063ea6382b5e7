"""What an error event of a consumer means: go on, or stop with an error that says what to do."""

from __future__ import annotations

import logging

from confluent_kafka import KafkaError

from echo_bus.client.cluster import RawMessage
from echo_bus.client.refusals import LOGIN_HINT, refused
from echo_bus.errors import MemberReplaced, NotAuthorized, OffsetLost, TopicMissing, TransportError
from echo_schemas.rights import Resource

logger = logging.getLogger(__name__)

END_OF_PARTITION = KafkaError._PARTITION_EOF  # noqa: SLF001  public in librdkafka, underscored in Python

_LOGIN_REFUSED = frozenset({KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError._AUTHENTICATION})  # noqa: SLF001
MISSING = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)
_LOST = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE})  # noqa: SLF001
_FATAL, _FENCED = KafkaError._FATAL, "fenced by other consumer"  # noqa: SLF001
_REPLACED = frozenset({KafkaError.FENCED_INSTANCE_ID, KafkaError.UNRELEASED_INSTANCE_ID, KafkaError._FENCED})  # noqa: SLF001


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
    if code in _LOGIN_REFUSED:
        raise NotAuthorized(f"The cluster refuses the login: {error.str()}.", hint=LOGIN_HINT)
    if code in MISSING:
        raise TopicMissing(f"{where} does not exist: {error.str()}.", hint="Run `echoswarm topics apply`.")
    if code in _LOST:
        raise OffsetLost(f"The position asked for is not in {where} any more: {error.str()}.", hint="Choose where to go on reading.")
    # A fenced member gets a fatal error whose text alone names the cause.
    if code in _REPLACED or (code == _FATAL and _FENCED in error.str()):
        raise MemberReplaced(
            f"Another consumer has taken this one's place in the group: {error.str()}.",
            hint="Two processes have the same name. Stop one of them, or give each its own (--name).",
        )
    if code == _FATAL or error.fatal():
        raise TransportError(f"The consumer of {where} failed for good: {error.str()}.")
    logger.warning("The client reports about %s: %s; it goes on by itself", where, error)
