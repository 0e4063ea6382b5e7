"""A share of a run's log, copied into a real Kafka."""

from __future__ import annotations

from collections.abc import Container

from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import Kept, SoundRun

_WAIT_S = 120.0


def copy_into(pipeline: Pipeline, sound: SoundRun, *, first: float, end: float, topics: Container[str]) -> None:
    """A share of some topics of the sound run, in order."""
    by_place: dict[tuple[str, int], list[Kept]] = {}
    for kept in sound.messages:
        if kept.topic is not None and kept.topic.name in topics:
            by_place.setdefault((kept.physical, kept.partition), []).append(kept)
    producer = pipeline.cluster.producer({})
    for (physical, partition), messages in by_place.items():
        there = physical.replace(sound.pipeline.namespace.name, pipeline.namespace.name, 1)
        for kept in messages[int(first * len(messages)) : int(end * len(messages))]:
            producer.produce(there, kept.value, kept.key, partition, headers=kept.headers)
    producer.flush(_WAIT_S)
