"""Kafka's default rule from key to partition, as in Faust, Java and librdkafka, so that readers can check a record's partition."""

from __future__ import annotations

import functools

_SEED = 0x9747B28C
_M = 0x5BD1E995
_MASK = 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Kafka's 32-bit murmur2 (org.apache.kafka.common.utils.Utils.murmur2), as an unsigned number."""
    length = len(data)
    h = (_SEED ^ length) & _MASK
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little")
        k = (k * _M) & _MASK
        k ^= k >> 24
        k = (k * _M) & _MASK
        h = (h * _M) & _MASK
        h ^= k
    rest = data[whole:]
    if rest:
        h ^= int.from_bytes(rest, "little")
        h = (h * _M) & _MASK
    h ^= h >> 13
    h = (h * _M) & _MASK
    return h ^ (h >> 15)


# More than the groups under way at a time; each reading process keeps so many.
@functools.lru_cache(maxsize=8_192)
def partition_of(key: str, num_partitions: int) -> int:
    """The partition of a key. Cached: the members of a group share their key."""
    return (murmur2(key.encode()) & 0x7FFFFFFF) % num_partitions
