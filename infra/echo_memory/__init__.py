"""An in-memory Kafka with confluent-kafka's clients: the same calls, errors and semantics, no process and no network.

For unit tests and model checks. `tests/contract` runs one suite over this and a real broker; a difference is a bug in one of the two.
"""

from echo_memory.cluster import MemoryCluster

__all__ = ["MemoryCluster"]
