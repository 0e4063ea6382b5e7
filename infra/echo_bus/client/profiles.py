"""librdkafka properties by purpose. Layers: base, then purpose, then the user's `[kafka.client]`, which wins.

Numbers whose source is not named are from librdkafka's CONFIGURATION.md or were measured on a real cluster: see docs/kafka.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Properties = Mapping[str, Any]

# Below every broker's default limit (1,048,588 bytes with the batch's own overhead), so no cluster setting needs raising.
MAX_RECORD_BYTES = 900_000


def _frozen(**properties: Any) -> Properties:
    return MappingProxyType({name.replace("_", "."): value for name, value in properties.items()})


# Shared by every client. A frozen broker is noticed in seconds rather than a minute, and a moved leader found at once.
FAILOVER = _frozen(
    socket_timeout_ms=6_000,
    socket_connection_setup_timeout_ms=3_000,
    reconnect_backoff_ms=50,
    reconnect_backoff_max_ms=500,
    topic_metadata_refresh_interval_ms=5_000,
    topic_metadata_refresh_fast_interval_ms=100,
    retry_backoff_ms=50,
    retry_backoff_max_ms=500,
)

# The brokers' side of it, in server.properties of three or more: a dead broker is fenced after two seconds, not nine. Until then it stays
# in sync by name, and acks=all waits for it in every partition that it follows. The embedded cluster of three has them.
BROKER_FAILOVER: Mapping[str, str] = MappingProxyType(
    {
        "broker.session.timeout.ms": "2000",
        "broker.heartbeat.interval.ms": "500",
        "replica.lag.time.max.ms": "3000",
        "replica.socket.timeout.ms": "3000",
        "controller.quorum.fetch.timeout.ms": "1500",
        "controller.quorum.election.timeout.ms": "500",
        "leader.imbalance.check.interval.seconds": "10",
    }
)

# As many as an idempotent producer may have.
_MOST_IN_FLIGHT = 5

_PRODUCER_BASE = _frozen(
    enable_idempotence=True,
    acks="all",
    # Idempotence alone loses records: a leader that does not know the producer yet may refuse its first batch ("not leader") and take its
    # second, and librdkafka then calls the first one delivered (confluent-kafka-go#921). Nothing is sent behind what is not acknowledged.
    max_in_flight_requests_per_connection=1,
    # librdkafka's own default is CRC32; Java and Faust use murmur2, and co-partitioning needs one rule.
    partitioner="murmur2_random",
    request_timeout_ms=4_000,
    # Well above any fail-over: an acknowledgement that comes late is better than a duplicate or a loss.
    delivery_timeout_ms=120_000,
    message_max_bytes=1_000_000,
    # How long a missing topic may be a topic that was only just created; the default holds a mistake back for 30 s.
    topic_metadata_propagation_max_ms=5_000,
    allow_auto_create_topics=False,
)

# Many records: fill batches, and let a full buffer hold the caller back. With 20 ms instead of 5 the broker handles a third fewer requests;
# whatever lies between versions is not in that hurry.
PRODUCER_THROUGHPUT: Properties = MappingProxyType(
    {
        **FAILOVER,
        **_PRODUCER_BASE,
        **_frozen(linger_ms=20, batch_size=1_000_000, compression_codec="lz4", queue_buffering_max_kbytes=65_536),
    }
)
# Many records the last of which somebody waits for: batches still fill while they come in a burst.
PRODUCER_AWAITED: Properties = MappingProxyType({**PRODUCER_THROUGHPUT, **_frozen(linger_ms=2)})
# For what its sender keeps until it is acknowledged, and could not make again: the client never gives up (0 is librdkafka's "for ever").
FOR_EVER: Properties = _frozen(delivery_timeout_ms=0)
# Few records that somebody waits for.
PRODUCER_LATENCY: Properties = MappingProxyType({**FAILOVER, **_PRODUCER_BASE, **_frozen(linger_ms=0, queue_buffering_max_kbytes=65_536)})
# Large records that do not compress, several on their way. Whoever writes them waits for the first one on a partition: see `BlobWriter`.
PRODUCER_BLOBS: Properties = MappingProxyType(
    {
        **FAILOVER,
        **_PRODUCER_BASE,
        **_frozen(
            linger_ms=0, batch_size=1_000_000, queue_buffering_max_kbytes=131_072, max_in_flight_requests_per_connection=_MOST_IN_FLIGHT
        ),
    }
)
# A transaction that outlives the longest fail-over, and a delivery that ends before it: librdkafka refuses any other order. Longer would
# only keep the readers behind an abandoned transaction waiting longer.
TRANSACTIONAL: Properties = MappingProxyType({**PRODUCER_LATENCY, **_frozen(transaction_timeout_ms=60_000, delivery_timeout_ms=45_000)})
# For whoever writes much beside a run: batches fill until the commit, and what it leaves open when it is killed holds the readers back no
# longer than this.
BRIEF_TRANSACTIONS: Properties = MappingProxyType(
    {**PRODUCER_THROUGHPUT, **_frozen(transaction_timeout_ms=15_000, delivery_timeout_ms=12_000)}
)

_CONSUMER_BASE = _frozen(
    enable_auto_commit=False,
    enable_auto_offset_store=False,
    enable_partition_eof=False,
    allow_auto_create_topics=False,
    fetch_min_bytes=1,
    fetch_wait_max_ms=500,
    # The default of one second makes a full client queue stall three times longer than the reader needs.
    fetch_queue_backoff_ms=10,
    fetch_error_backoff_ms=50,
    # Memory of a stalled reader: what librdkafka holds before it stops fetching.
    queued_max_messages_kbytes=32_768,
    isolation_level="read_committed",
)

GROUP_CONSUMER: Properties = MappingProxyType(
    {
        **FAILOVER,
        **_CONSUMER_BASE,
        **_frozen(
            partition_assignment_strategy="cooperative-sticky",
            auto_offset_reset="earliest",
            session_timeout_ms=10_000,
            # Members learn of a rebalance with a heartbeat; at the default of 3 s moved partitions stall that long.
            heartbeat_interval_ms=1_000,
            # Nothing blocks the poll thread, so a long interval only guards against a process that hangs.
            max_poll_interval_ms=300_000,
        ),
    }
)
# For groups whose members come and go on an order: who is called back waits for two heartbeats of the others.
PROMPT_HEARTBEAT: Properties = _frozen(heartbeat_interval_ms=300)
# KIP-848: session and heartbeat are the broker's, and the assignor is too.
NEXT_GENERATION_GROUP: Properties = MappingProxyType(
    {**FAILOVER, **_CONSUMER_BASE, **_frozen(group_protocol="consumer", auto_offset_reset="earliest", max_poll_interval_ms=300_000)}
)
# No group: positions are the caller's, and one that the log no longer holds is an error, never a silent jump.
READER: Properties = MappingProxyType({**FAILOVER, **_CONSUMER_BASE, **_frozen(auto_offset_reset="error")})
# A reader of what is there, which is then closed. An empty fetch tells the end behind a transaction's marker, and whatever is asked of a
# broker meanwhile waits behind the fetch: half a second each time, if it is held back as long as for readers that stay.
LOOK: Properties = MappingProxyType({**READER, **_frozen(fetch_wait_max_ms=10)})
# A reader of a few records out of the middle of a long log. What a client fetches ahead of them, a megabyte of each partition, costs more
# than they do: 250 records of each of eight partitions of a log of 40,000 took 0.4 s with it and 0.03 s without.
GLIMPSE: Properties = MappingProxyType({**LOOK, **_frozen(max_partition_fetch_bytes=65_536, queued_min_messages=100)})
# A reader that has come to the end of a topic on which little is said, and stays there, asking its broker for nothing else. What comes is
# delivered at once; a process of some views asks a few times a second less. No longer: the time-out of a socket must be above it.
WATCHER: Properties = MappingProxyType({**READER, **_frozen(fetch_wait_max_ms=2_500)})
# A reader of a stream that always flows and is waited for by nobody: fetches come back full, or after a moment, instead of once for every
# few records; each is a request that the broker and both clients pay for.
GATHERING_MIN_BYTES, GATHERING_WAIT_MS = 1_000_000, 100
GATHERING_READER: Properties = MappingProxyType(
    {**READER, **_frozen(fetch_min_bytes=GATHERING_MIN_BYTES, fetch_wait_max_ms=GATHERING_WAIT_MS)}
)
# A reader of blobs: one large sequential fetch after another.
BLOB_READER: Properties = MappingProxyType(
    {**READER, **_frozen(fetch_max_bytes=67_108_864, max_partition_fetch_bytes=67_108_864, queued_max_messages_kbytes=131_072)}
)
