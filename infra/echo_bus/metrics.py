"""Every metric of the bus: name, labels, and one line of meaning. The operator's page is generated from this file."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

# Seconds from under a millisecond (a warm local broker) to a minute (a fail-over).
LATENCY_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Values of one label; Prometheus keeps a series for each of them until the process ends.
_MOST_VALUES = 200
_MOST_CHARACTERS = 100


class BoundedLabel:
    """A label with values from outside, such as workers' names: the first 200, cut to 100 characters; others share one. Thread-safe."""

    def __init__(self, most: int = _MOST_VALUES) -> None:
        self._most = most
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def of(self, text: str) -> str:
        """The label's value for `text`."""
        value = text[:_MOST_CHARACTERS]
        with self._lock:
            if value in self._known or len(self._known) < self._most:
                self._known.add(value)
                return value
        return "(others)"


def makers(prefix: str, registry: CollectorRegistry) -> tuple[partial[Counter], partial[Gauge], partial[Histogram]]:
    """What makes a collector of each kind against `registry`, with `prefix` before its name: (name, meaning, names of labels)."""
    shared: dict[str, Any] = {"namespace": prefix, "registry": registry}
    return partial(Counter, **shared), partial(Gauge, **shared), partial(Histogram, **shared)


class BusMetrics:
    """The collectors, made against `registry`: one per process, or one per test."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry = CollectorRegistry() if registry is None else registry
        counter, gauge, histogram = makers("echo_bus", registry)
        histogram = partial(histogram, buckets=LATENCY_BUCKETS)
        self.records_published = counter("records_published", "Records handed to the producer.", ["topic"])
        self.bytes_published = counter("bytes_published", "Bytes of values handed to the producer, before compression.", ["topic"])
        self.publish_seconds = histogram(
            "publish_seconds", "From hand-over to acknowledgement by all in-sync replicas; one record in sixteen.", ["topic"]
        )
        self.publish_failures = counter("publish_failures", "Records that were not acknowledged.", ["topic", "error"])
        self.publish_blocked_seconds = counter(
            "publish_blocked_seconds", "Seconds publishers waited because the buffer was full.", ["topic"]
        )

        self.records_read = counter("records_read", "Messages taken from the client, before any check.", ["topic"])
        self.bytes_read = counter("bytes_read", "Bytes of values read.", ["topic"])
        self.records_accepted = counter("records_accepted", "Messages that a handler accepted.", ["topic"])
        self.records_invalid = counter("records_invalid", "Messages that can never be accepted.", ["topic", "reason"])
        self.records_over_budget = counter(
            "records_over_budget", "Messages that can never be accepted, above [dead_letters] per_writer or per_minute.", ["topic"]
        )
        self.records_busy = counter("records_busy", "Times a handler was busy for a message, which then waited.", ["topic"])
        self.records_ignored = counter("records_ignored", "Messages passed over on purpose.", ["topic", "reason"])
        self.dead_letters = counter("dead_letters", "Messages written to a dead-letter topic.", ["topic", "reason"])
        self.records_in_flight = gauge("records_in_flight", "Messages read and not yet done.", ["topic"])
        self.partitions_paused = gauge("partitions_paused", "Partitions paused for back-pressure.", ["topic"])
        self.partitions_assigned = gauge("partitions_assigned", "Partitions assigned to this process.", ["topic"])
        self.rebalances = counter("rebalances", "Changes of assignment.", ["group", "kind"])
        self.commits = counter("commits", "Offset commits.", ["group", "outcome"])
        self.lag = gauge("lag", "End offset minus next offset to be done.", ["topic", "partition"])

        self.replies_cached = counter("replies_cached", "Repeated requests answered from the server's cache.")

        self.blob_bytes = counter("blob_bytes", "Bytes of blobs.", ["direction"])
        self.blob_seconds = histogram("blob_seconds", "Seconds for a whole blob.", ["direction"])
        self.blob_failures = counter("blob_failures", "Blobs that could not be read or written.", ["direction", "reason"])

        self.throttled_seconds = counter(
            "throttled_seconds", "Seconds that a client quota held requests back: producer, consumer, admin.", ["client"]
        )

        self.transactions = counter("transactions", "Transactions by outcome: committed, aborted, fenced.", ["outcome"])
        self.transaction_seconds = histogram("transaction_seconds", "From begin to the end of commit.")

        self.view_updates = counter("view_updates", "Records applied to a view of a compacted topic.", ["topic"])
        self.view_entries = gauge("view_entries", "Keys in a view.", ["topic"])
