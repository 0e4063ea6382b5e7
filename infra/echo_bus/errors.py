"""The transport's errors. An invalid *message* is an `echo_schemas.errors.InvalidRecord`.

EchoError
└── TransportError              the cluster, the network or a client failed; nothing is wrong with the record
    ├── ClusterUnreachable      no broker answered in time
    ├── NotAuthorized           authentication or an ACL said no; retrying will not help
    ├── TopicMissing            the topic or partition does not exist (only `echoswarm topics apply` creates topics)
    ├── DeliveryFailed          a record was not acknowledged; it may or may not be in the log
    ├── ProducerClosed          publish after close
    ├── RecordTooLarge          the encoded record is above the 900 KB that every cluster accepts
    ├── OffsetLost              the position asked for is below retention or above the end
    ├── DeadlineExceeded        a wait ended without its condition; the message names the condition
    ├── TransactionAborted      the transaction was rolled back; it may be tried again with the same producer
    ├── ProducerFenced          the transactional producer is dead; a successor *may* exist: read the newest session claim
    ├── MemberReplaced          a later consumer joined the group under the same static name
    ├── BlobCorrupt             a chunk is missing, altered or out of place
    └── TooManyDeadLetters      more invalid messages in a row than the limit: the deployment is wrong, not one message
"""

from __future__ import annotations

from echo_schemas.errors import EchoError
from echo_schemas.rights import Resource


class TransportError(EchoError):
    """The cluster, the network or a client failed."""


class ClusterUnreachable(TransportError):
    """No broker answered within the time allowed."""


class NotAuthorized(TransportError):
    """The cluster refused the login, or an operation on a resource; `resource`: the kind of resource, if it is known."""

    def __init__(self, message: str, *, hint: str = "", resource: Resource | None = None) -> None:
        super().__init__(message, hint=hint)
        self.resource = resource


class TopicMissing(TransportError):
    """A topic or partition does not exist."""


class DeliveryFailed(TransportError):
    """A record was not acknowledged within the delivery time-out."""


class ProducerClosed(TransportError):
    """A record was published through a closed publisher."""


class RecordTooLarge(TransportError):
    """An encoded record is larger than `profiles.MAX_RECORD_BYTES`."""


class OffsetLost(TransportError):
    """A position lies outside the offsets that the partition holds."""


class DeadlineExceeded(TransportError):
    """A wait ended before its condition became true."""


class TransactionAborted(TransportError):
    """The transaction did not commit; its records are invisible to read_committed readers."""


class ProducerFenced(TransportError):
    """The transactional producer met a fatal error and must be discarded."""


class MemberReplaced(TransportError):
    """Another consumer has joined the group under this static member's name."""


class BlobCorrupt(TransportError):
    """The bytes read are not the bytes that the manifest promises."""


class TooManyDeadLetters(TransportError):
    """More messages were invalid than the policy allows; the consumer stops instead of moving the whole topic to the dead letters."""
