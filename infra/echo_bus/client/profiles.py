"""librdkafka properties by purpose. Layers: base, then purpose, then the user's `[kafka.client]`, which wins.

Numbers without a named source are from librdkafka's CONFIGURATION.md or were measured on a real cluster: see docs/kafka.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Properties = Mapping[str, Any]

# Below every broker's default limit (1,048,588 bytes including the batch's overhead), so no cluster needs another setting.
MAX_RECORD_BYTES = 900_000


def _frozen(*layers: Properties, **properties: Any) -> Properties:
    """The `layers`, each over the one before, and `properties` over all."""
    merged = {name: value for layer in layers for name, value in layer.items()}
    return MappingProxyType(merged | {name.replace("_", "."): value for name, value in properties.items()})


# For every client. It notices a frozen broker in seconds instead of a minute, and finds a moved leader at once.
FAILOVER = _frozen(
    socket_timeout_ms=6_000,
    socket_connection_setup_timeout_ms=3_000,
    # A new client waits for half of it, 11 ms at least, before it connects for its first request.
    reconnect_backoff_ms=20,
    reconnect_backoff_max_ms=500,
    topic_metadata_refresh_interval_ms=5_000,
    topic_metadata_refresh_fast_interval_ms=100,
    retry_backoff_ms=50,
    retry_backoff_max_ms=500,
)

# For server.properties of three or more brokers: a dead broker is fenced after two seconds, not nine. Until then it counts as in sync, and
# acks=all waits for it in every partition that it follows. The embedded cluster of three has these.
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

_PRODUCER_BASE = _frozen(
    enable_idempotence=True,
    acks="all",
    # Idempotence alone can lose records: a leader that does not know the producer yet may refuse its first batch ("not leader") and accept
    # its second; librdkafka then reports the first as delivered (confluent-kafka-go#921). So one batch at a time.
    max_in_flight_requests_per_connection=1,
    # librdkafka's own default is CRC32; Java and Faust use murmur2, and co-partitioning needs one rule.
    partitioner="murmur2_random",
    request_timeout_ms=4_000,
    # Well above any fail-over: a late acknowledgement is better than a duplicate or a loss.
    delivery_timeout_ms=120_000,
    message_max_bytes=1_000_000,
    # How long a missing topic may be one that was just created; with the default a wrong name is reported after 30 s.
    topic_metadata_propagation_max_ms=5_000,
    allow_auto_create_topics=False,
)

# Many records: fill batches, and block the caller while the buffer is full. With 20 ms instead of 5 the broker handles a third fewer
# requests; with 100 ms, and readers that gather for 250, another quarter fewer, but then a learner of short steps waits twice as long.
PRODUCER_THROUGHPUT = _frozen(
    FAILOVER, _PRODUCER_BASE, linger_ms=20, batch_size=1_000_000, compression_codec="lz4", queue_buffering_max_kbytes=65_536
)
# Many records whose last one another role waits for: a burst still fills batches.
PRODUCER_AWAITED = _frozen(PRODUCER_THROUGHPUT, linger_ms=2)
# For records that the sender cannot make again and keeps until the acknowledgement: the client never gives up (0: no time-out).
FOR_EVER = _frozen(delivery_timeout_ms=0)
# Few records that another role waits for.
PRODUCER_LATENCY = _frozen(FAILOVER, _PRODUCER_BASE, linger_ms=0, queue_buffering_max_kbytes=65_536)
# Large incompressible records, several at once. The writer waits for the first one on a partition: see `BlobWriter`.
PRODUCER_BLOBS = _frozen(
    FAILOVER,
    _PRODUCER_BASE,
    linger_ms=0,
    batch_size=1_000_000,
    queue_buffering_max_kbytes=131_072,
    # The most for an idempotent producer.
    max_in_flight_requests_per_connection=5,
)
# The transaction's time-out is above the longest fail-over, and the delivery's below it, as librdkafka requires. A longer one would delay
# readers behind an abandoned transaction.
TRANSACTIONAL = _frozen(PRODUCER_LATENCY, transaction_timeout_ms=60_000, delivery_timeout_ms=45_000)
# For commands that write much beside a run: batches fill until the commit. If the command is killed, its open transaction delays readers no
# longer than this.
BRIEF_TRANSACTIONS = _frozen(PRODUCER_THROUGHPUT, transaction_timeout_ms=15_000, delivery_timeout_ms=12_000)

_CONSUMER_BASE = _frozen(
    enable_auto_commit=False,
    enable_auto_offset_store=False,
    enable_partition_eof=False,
    allow_auto_create_topics=False,
    fetch_min_bytes=1,
    fetch_wait_max_ms=500,
    # With the default of one second a full client queue stalls three times longer than the reader needs.
    fetch_queue_backoff_ms=10,
    fetch_error_backoff_ms=50,
    # Most memory of a stalled reader: librdkafka stops fetching at this size.
    queued_max_messages_kbytes=32_768,
    isolation_level="read_committed",
)

GROUP_CONSUMER = _frozen(
    FAILOVER,
    _CONSUMER_BASE,
    partition_assignment_strategy="cooperative-sticky",
    auto_offset_reset="earliest",
    session_timeout_ms=10_000,
    # Members learn of a rebalance at a heartbeat; with the default of 3 s moved partitions stall that long.
    heartbeat_interval_ms=1_000,
    # Nothing blocks the poll thread, so a long interval only guards against a process that hangs.
    max_poll_interval_ms=300_000,
)
# For groups whose members leave and return on orders: a returning member waits for two heartbeats of the others.
PROMPT_HEARTBEAT = _frozen(heartbeat_interval_ms=300)
# KIP-848: the broker sets session, heartbeat and assignor.
NEXT_GENERATION_GROUP = _frozen(
    FAILOVER, _CONSUMER_BASE, group_protocol="consumer", auto_offset_reset="earliest", max_poll_interval_ms=300_000
)


def group_properties(
    group: str, *, client_id: str, next_generation: bool = False, static_member: str | None = None, is_prompt: bool = False
) -> dict[str, Any]:
    """The client's properties for a member of `group`: cooperative-sticky, or KIP-848 with `next_generation`.

    `static_member` is a name that survives restarts: a process that was killed and restarted has its partitions at once, not only when its
    old session ends (KIP-345). Of two processes under one name the later one stays. With KIP-848 the broker refuses a restarted member
    until its old session ends, so the name is not used there. `is_prompt`: three times as many heartbeats, so that members learn of
    changes in a third of the time; with KIP-848 the broker sets the heartbeats.
    """
    properties = {**(NEXT_GENERATION_GROUP if next_generation else GROUP_CONSUMER), "group.id": group, "client.id": client_id}
    if static_member is not None and not next_generation:
        properties["group.instance.id"] = static_member
    if is_prompt and not next_generation:
        properties |= PROMPT_HEARTBEAT
    return properties


# No group: the caller keeps positions, and a position that the log no longer holds is an error.
READER = _frozen(FAILOVER, _CONSUMER_BASE, auto_offset_reset="error")
# For a reader that is closed at the end of the log. The end behind a transaction's marker shows in an empty fetch, and other requests wait
# behind that fetch; with the wait of a following reader each would take half a second.
LOOK = _frozen(READER, fetch_wait_max_ms=10)
# For a few records from the middle of a long log. Fetching a megabyte of each partition ahead costs more than the records themselves: 250
# records of each of eight partitions of a log of 40,000 took 0.4 s with it and 0.03 s without.
GLIMPSE = _frozen(LOOK, max_partition_fetch_bytes=65_536, queued_min_messages=100)
# For a reader that stays at the end of a quiet topic and makes no other requests. New records still come at once, and the broker gets a few
# requests a second less. The wait must stay below the socket's time-out.
WATCHER = _frozen(READER, fetch_wait_max_ms=2_500)
# For a steady stream that is not urgent: a fetch returns when it is full or after a moment, not for every few records, because each request
# costs the broker and the clients.
GATHERING_MIN_BYTES, GATHERING_WAIT_MS = 1_000_000, 100
GATHERING_READER = _frozen(READER, fetch_min_bytes=GATHERING_MIN_BYTES, fetch_wait_max_ms=GATHERING_WAIT_MS)
# For blobs: large sequential fetches.
BLOB_READER = _frozen(READER, fetch_max_bytes=67_108_864, max_partition_fetch_bytes=67_108_864, queued_max_messages_kbytes=131_072)
