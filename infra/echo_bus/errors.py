"""The transport's errors. What is wrong with a *message* is not here: see `echo_schemas.errors.InvalidRecord`.

EchoError
└── TransportError              the cluster, the network or a client failed; nothing is wrong with the record
    ├── ClusterUnreachable      no broker answered in time
    ├── NotAuthorized           authentication or an ACL said no; retrying will not help
    ├── TopicMissing            the topic or partition does not exist (topics are created by `echoswarm topics apply`, never by a client)
    ├── DeliveryFailed          a record was not acknowledged; it may or may not be in the log
    ├── ProducerClosed          publish after close
    ├── RecordTooLarge          the encoded record is above the 900 KB that every cluster accepts
    ├── OffsetLost              the position asked for is below retention or above the end
    ├── DeadlineExceeded        a wait ended without its condition; the message names the condition
    ├── TransactionAborted      the transaction was rolled back; it may be tried again with the same producer
    ├── ProducerFenced          the transactional producer is dead; a successor *may* exist: read the newest session claim
    ├── MemberReplaced          the group knows a later consumer by this one's name
    ├── BlobCorrupt             a chunk is missing, altered or out of place
    └── TooManyDeadLetters      the limit on invalid messages was passed: a bad deployment, not a bad message
"""

from __future__ import annotations

from echo_schemas.errors import EchoError
from echo_schemas.rights import Resource


class TransportError(EchoError):
    """Something below the records failed."""


class ClusterUnreachable(TransportError):
    """No broker answered within the time allowed."""


class NotAuthorized(TransportError):
    """The cluster refused our credentials or an operation on a resource; `resource`: of which kind, where that is known."""

    def __init__(self, message: str, *, hint: str = "", resource: Resource | None = None) -> None:
        super().__init__(message, hint=hint)
        self.resource = resource


class TopicMissing(TransportError):
    """A topic or partition does not exist."""


class DeliveryFailed(TransportError):
    """A record was not acknowledged within the delivery time-out."""


class ProducerClosed(TransportError):
    """Something was published through a closed publisher."""


class RecordTooLarge(TransportError):
    """An encoded record is larger than `profiles.MAX_RECORD_BYTES`."""


class OffsetLost(TransportError):
    """A position lies outside what the partition still holds."""


class DeadlineExceeded(TransportError):
    """A bounded wait ended before its condition became true."""


class TransactionAborted(TransportError):
    """The transaction did not commit; its records are invisible to read_committed readers."""


class ProducerFenced(TransportError):
    """The transactional producer met a fatal error and must be discarded."""


class MemberReplaced(TransportError):
    """A static member is not the one of its name any more."""


class BlobCorrupt(TransportError):
    """The bytes read are not the bytes that the manifest promises."""


class TooManyDeadLetters(TransportError):
    """More messages were invalid than the policy allows; the consumer stops instead of draining the topic."""
