"""The one history on a real Kafka: transactions, time index, retention, and records written again byte for byte."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from confluent_kafka.admin import NewTopic

from echo_bus.client.kafka import KafkaCluster
from echo_memory import MemoryCluster
from echo_replay.audit import audit_run
from echo_replay.history import History
from echo_replay.selection import Everything, Fate, Groups, Selection, Steps, Times, Versions
from echo_replay.sinks import REPLAYED_FROM, open_sink, replay
from echo_schemas.naming import Namespace
from echo_schemas.topics import TRAJECTORIES
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, WAIT_S, Pipeline

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
NUM_STEPS = 3


@pytest.fixture
def trained(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Pipeline:
    """Three steps of a learner on the real broker, a group more that nobody has read, and a second attempt."""
    # The same seam; what only the cluster in memory has is not used here.
    pipeline = Pipeline(tmp_path / "run", cluster=cast("MemoryCluster", KafkaCluster(kafka_bootstrap)), namespace=namespace)
    for seq in range(NUM_STEPS * GROUPS_PER_STEP):
        pipeline.write_group(seq)
    pipeline.write_group(1, attempt="again")
    pipeline.train(NumpyTrainer(), steps=NUM_STEPS)
    pipeline.write_group(40, version=NUM_STEPS)
    return pipeline


def test_the_past_of_a_real_log(trained: Pipeline, tmp_path: Path) -> None:
    bus = replace(trained.bus, role="operator")
    with History(bus, "demo") as history:
        whole = list(history.read())
        fates = Counter(each.fate for each in whole)
        counts = audit_run(bus, "demo").counts
        assert fates[Fate.TRAINED] == counts["trained"] == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
        assert (fates[Fate.DROPPED], fates[Fate.OPEN]) == (counts["dropped"], counts["open"])
        assert all(each.rewards == {"exact": float(each.trajectory.index)} for each in whole if each.trajectory is not None)
        by_time = list(history.read(by_time=True))
        assert [each.time_ms for each in by_time] == sorted(each.time_ms for each in whole)
        step = list(history.read(Selection(range=Steps(2, 2))))
        assert {each.step for each in step} == {2}
        assert len(step) == GROUPS_PER_STEP * GROUP_SIZE
        group = list(history.read(Selection(range=Groups(frozenset({"demo/1"})))))
        assert {each.trajectory.attempt for each in group if each.trajectory is not None} == {"a", "again"}
        assert len(list(history.read(Selection(range=Versions(NUM_STEPS, NUM_STEPS))))) == GROUP_SIZE
        middle = sorted(each.time_ms for each in whole)[len(whole) // 2]
        early, late = (list(history.read(Selection(range=cut))) for cut in (Times(None, middle), Times(middle + 1, None)))
        assert len(early) + len(late) == len(whole)

        # Kept until it has answered: the answer comes from a thread of its own.
        admin = bus.cluster.admin()
        for future in admin.create_topics([NewTopic(f"{trained.namespace.name}-mine", 3, 1)]).values():
            future.result(WAIT_S)
        assert replay(iter(step), open_sink(bus, f"{trained.namespace.name}-mine", io.StringIO(), {})) == len(step)
        expected = {(each.where.partition, each.where.offset): (each.raw.key(), each.raw.value(), each.time_ms) for each in step}
        assert replayed(trained, f"{trained.namespace.name}-mine", len(step)) == expected

        file = tmp_path / "step.jsonl"
        replay(iter(step), open_sink(bus, str(file), io.StringIO(), {}))
        assert [json.loads(line)["step"] for line in file.read_text(encoding="utf-8").splitlines()] == [2] * len(step)

        gone = TopicPartition(trained.namespace.topic(TRAJECTORIES), whole[0].where.partition, whole[0].where.offset + 1)
        for removed in admin.delete_records([gone]).values():
            removed.result(WAIT_S)
        assert len(list(history.read(Selection(range=Everything())))) == len(whole) - 1
        assert len(history.missing) == 1


def replayed(pipeline: Pipeline, topic: str, count: int) -> dict[tuple[int, int], tuple[bytes | None, bytes | None, int]]:
    """Key, value and timestamp of each record of a topic, by where it says it comes from."""
    found: dict[tuple[int, int], tuple[bytes | None, bytes | None, int]] = {}
    consumer = pipeline.cluster.consumer({"group.id": f"{topic}.look"})
    consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(3)])
    while len(found) < count:
        raw = consumer.poll(WAIT_S)
        assert raw is not None, f"waited for {count} records of {topic}, and {len(found)} came"
        if raw.error() is None:
            origin = dict(raw.headers() or [])[REPLAYED_FROM].decode().split("/")
            found[int(origin[1]), int(origin[2])] = (raw.key(), raw.value(), raw.timestamp()[1])
    consumer.close()
    return found
