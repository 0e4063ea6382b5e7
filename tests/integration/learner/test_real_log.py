"""What a real Kafka tells of its log: identities, bounds, the broker's clock; and forks through it. The trainer is a few bytes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_learner.commit.session import READ_S, read_tip
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.records import DropReason
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import NUM_PARTITIONS, WAIT_S, Pipeline, fill
from tests.unit.learner.test_fork import fill_fork, fork, manifests_of, train_fork

if TYPE_CHECKING:
    from echo_memory import MemoryCluster

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture
def real(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Pipeline:
    # The same seam; what only the one in memory has is not used here.
    pipeline = Pipeline(tmp_path / "run", cluster=cast("MemoryCluster", KafkaCluster(kafka_bootstrap)), namespace=namespace)
    timestamps = ConfigEntry("message.timestamp.type", "LogAppendTime", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, namespace.topic(STEPS), incremental_configs=[timestamps])
    # Kept until the answer is there: it comes from a thread of the client's.
    admin = pipeline.cluster.admin()
    eventually(lambda: [future.result(WAIT_S) for future in admin.incremental_alter_configs([resource]).values()], "the topic to be known")
    return pipeline


def eventually(attempt: Callable[[], object], what: str) -> None:
    """A cluster says no while it is still at the last change."""
    deadline = Deadline.after(WAIT_S)
    while True:
        try:
            attempt()
        except KafkaException:
            assert not deadline.expired(), f"waited for {what}"
        else:
            return


def refusal(pipeline: Pipeline) -> str:
    with pytest.raises(UserError) as refused:
        pipeline.train(NumpyTrainer(), steps=9, takeover=True)
    return str(refused.value)


def lost(pipeline: Pipeline) -> list[int]:
    return [drop.seq for drop in pipeline.drops() if drop.why is DropReason.LOST and drop.what is None]


def test_a_log_that_loses_records_grows_and_is_made_anew(real: Pipeline) -> None:
    admin, trajectories = real.cluster.admin(), real.namespace.topic(TRAJECTORIES)
    fill(real, 1)
    real.write_group(2, values=(0.0, None))
    metrics = real.train(NumpyTrainer(), steps=1)
    skew_s = metrics.registry.get_sample_value("echo_learner_clock_skew_seconds")
    assert skew_s is not None
    assert abs(skew_s) < READ_S, "one machine has one clock"

    for future in admin.delete_records([TopicPartition(trajectories, partition, -1) for partition in range(NUM_PARTITIONS)]).values():
        future.result(WAIT_S)
    assert "were still needed. Lost seqs: 2 (1 in all)." in refusal(real)
    real.write_group(3)
    real.write_group(4)
    real.train(NumpyTrainer(), steps=2, takeover=True, skip=True)
    assert lost(real) == [2]

    for topic in (TRAJECTORIES, REWARDS):
        for future in admin.create_partitions([NewPartitions(real.namespace.topic(topic), NUM_PARTITIONS + 1)]).values():
            future.result(WAIT_S)
    assert "trajectories has 3 partitions and had 2" in refusal(real)
    # A producer that is open learns of new partitions minutes later.
    real = replace(real)
    real.write_group(5, version=1)
    real.write_group(6, version=1)
    real.train(NumpyTrainer(), steps=3, takeover=True, skip=True)

    for future in admin.delete_topics([trajectories]).values():
        future.result(WAIT_S)
    assert "topics that are not there: trajectories" in refusal(real)
    eventually(
        lambda: [future.result(WAIT_S) for future in admin.create_topics([NewTopic(trajectories, NUM_PARTITIONS + 1, 1)]).values()],
        "the topic to be made anew",
    )
    assert "trajectories was made anew" in refusal(real)
    assert [report.version for report in real.reports()] == [1, 2, 3]


def test_a_fork_from_the_weights_in_the_log(real: Pipeline) -> None:
    fill(real, 2)
    real.train(NumpyTrainer(), steps=2)
    fork(real, 1, weights_only=True)
    fill_fork(real, 1, 2, version=1)
    train_fork(real, 2)
    assert [manifest.version for manifest in manifests_of(real)] == [1, 2]
    assert read_tip(real.bus, "demo").version == 2
    assert read_tip(real.bus, "demo-2").version == 2


def test_a_claim_of_a_process_that_is_gone(real: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(real, 1)
    real.train(NumpyTrainer(), steps=1)
    claim = read_tip(real.bus, "demo").claim
    assert claim is not None
    ended = subprocess.Popen(["true"])
    ended.wait()
    real.write(STEPS, replace(claim, pid=ended.pid))
    monkeypatch.setattr("echo_bus.reading.view.CompactedView.wait_for", lambda *_, **__: pytest.fail("it watched for a heartbeat"))
    fill(real, 2, start=1)
    real.train(NumpyTrainer(), steps=2)
    assert [report.version for report in real.reports()] == [1, 2]
