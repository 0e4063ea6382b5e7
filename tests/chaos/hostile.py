"""Records that no role of ours writes: bytes of nobody, unknown schemas, cut, oversized, forged."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

from confluent_kafka import KafkaError, Message, Producer

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.reading.reader import From
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Coordinates, Reward, RewardOutcome, Trajectory
from echo_schemas.topics import CONTROL, PROGRESS, REQUESTS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS, Topic

_WAIT_S = 60.0
_ATTACKED = (TRAJECTORIES, REWARDS, REQUESTS, STEPS, PROGRESS, WORKERS, CONTROL, WEIGHTS)
# The cluster's limit is 1,048,588 bytes with the batch's own overhead.
_OVERSIZED_BYTES = 1_000_000
_UNKNOWN_SCHEMA = (7).to_bytes(4, "big")
_NO_OFFSET = 10**12
_ANY_PARTITION = -1
_FORGED_VALUE = 1e6

Forged = tuple[Topic, bytes, bytes, int | None]
"""Topic, key, value, partition."""


def inject_hostile(bus: Bus, bootstrap: str, rng: random.Random) -> int:
    """Write some of everything, acknowledged; how many records that was."""
    producer = Producer({"bootstrap.servers": bootstrap, "message.max.bytes": 2_000_000, "linger.ms": 0, "log_level": 0})
    refused: list[KafkaError] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        del message
        if error is not None:
            refused.append(error)

    forged = [*_noise(bus, rng), *_forgeries(bus, rng)]
    for topic, key, value, partition in forged:
        producer.produce(bus.namespace.topic(topic), value, key, _ANY_PARTITION if partition is None else partition, delivered)
    assert producer.flush(_WAIT_S) == 0, "waited for the acknowledgement of hostile records"
    assert not refused, f"the cluster itself refused: {refused[0]}"
    return len(forged)


def _noise(bus: Bus, rng: random.Random) -> Iterator[Forged]:
    """Of each topic: random bytes, a schema that nobody knows, nothing at all after a known one."""
    known = bus.codec.encode(_reward(bus, seq=0, index=0, of=Coordinates(partition=0, offset=0), value=0.0))
    for topic in _ATTACKED:
        key = f"{bus.run_id}/current".encode() if topic is WEIGHTS else str(bus.run_id).encode()
        partition = 0 if topic in (STEPS, WEIGHTS) else None
        yield topic, key, rng.randbytes(rng.randrange(1, 200)), partition
        yield topic, key, b"\0" + _UNKNOWN_SCHEMA + rng.randbytes(50), partition
        yield topic, key, known[: rng.randrange(5, len(known))], partition
    yield TRAJECTORIES, b"huge", rng.randbytes(_OVERSIZED_BYTES), None


def _forgeries(bus: Bus, rng: random.Random) -> Iterator[Forged]:
    """Well-formed lies: samples told a second time with other tokens, rewards of what does not exist, another opinion on what does."""
    samples = _last_samples(bus)
    for where, sample in rng.sample(samples, min(4, len(samples))):
        tokens = sample.tokens.copy()
        tokens[-1] = int(tokens[0])
        twin = replace(sample, token_ids=pack_tokens(tokens), completion="forged")
        yield TRAJECTORIES, sample.group_id.encode(), bus.codec.encode(twin), where.partition
        other = _reward(bus, seq=sample.seq, index=sample.index, of=where, value=_FORGED_VALUE, like=sample)
        yield REWARDS, sample.group_id.encode(), bus.codec.encode(other), where.partition
        nobody = Coordinates(partition=where.partition, offset=_NO_OFFSET)
        unknown = _reward(bus, seq=sample.seq, index=sample.index, of=nobody, value=_FORGED_VALUE, like=sample)
        yield REWARDS, sample.group_id.encode(), bus.codec.encode(unknown), where.partition


def _last_samples(bus: Bus) -> list[tuple[Coordinates, Trajectory]]:
    """What workers wrote, as far as the log goes now."""
    with closing(bus.reader([TRAJECTORIES])) as reader:
        reader.start(otherwise=From.BEGINNING)
        messages = [message for batch in reader.read_to_end(Deadline.after(_WAIT_S)) for message in batch]
    return [(message.coordinates, message.record) for message in messages if isinstance(message.record, Trajectory)][-64:]


def _reward(bus: Bus, *, seq: int, index: int, of: Coordinates, value: float, like: Trajectory | None = None) -> Reward:
    return Reward(
        run_id=str(bus.run_id),
        group_id=f"{bus.run_id}/{seq}" if like is None else like.group_id,
        seq=seq,
        attempt="forged" if like is None else like.attempt,
        index=index,
        of=of,
        name="exact",
        code_version="1",
        outcome=RewardOutcome.SCORED,
        value=value,
        time_ms=bus.clock.time_ms(),
    )
