"""The reward application as its users run it: processes on a real Kafka that are added, told to end, and killed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from echo_schemas.headers import headers_of
from echo_schemas.naming import Namespace
from echo_schemas.records import Coordinates, MissingRewards, Progress, Purpose, RewardOutcome, Trajectory
from echo_schemas.topics import PROGRESS, TRAJECTORIES
from tests.examples import load_examples
from tests.integration.streams.stage import PARTITIONS, WAIT_S, Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
BREVITY = "my_rewards.py:brevity"
PATIENT = "my_rewards.py:patient"
STUBBORN = "my_rewards.py:stubborn"
GONE_S = 20.0
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")

MakeStage = Callable[..., Stage]


@pytest.fixture
def make_stage(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Iterator[MakeStage]:
    made: list[Stage] = []

    def make(*rewards: str) -> Stage:
        made.append(Stage(tmp_path, kafka_bootstrap, namespace, dict.fromkeys(rewards, 1.0)))
        return made[-1]

    yield make
    for stage in made:
        stage.close()


def samples(first: int, count: int, completion: str = "four", version: int = 9) -> list[Trajectory]:
    """`count` trajectories, each of its own seq, so that they spread over the partitions."""
    return [trajectory(seq, completion=completion, version=version) for seq in range(first, first + count)]


def learner_is_at(stage: Stage, version: int) -> None:
    publisher = stage.bus.publisher()
    progress = load_examples(PROGRESS)["progress.json"]
    assert isinstance(progress, Progress)
    publisher.publish(PROGRESS, replace(progress, run_id="demo", version=version, published=version))
    publisher.close()


def test_what_somebody_else_committed_unseen_is_scored_when_the_learner_misses_it(make_stage: MakeStage) -> None:
    stage = make_stage(BREVITY)
    lost = stage.publish(samples(0, 8))
    commit_unseen(stage, lost)
    stage.start("1")
    seen = stage.publish(samples(100, 8))
    stage.wait_for(seen)
    assert not stage.judged() & set(lost)
    publisher = stage.bus.publisher()
    missing = MissingRewards(run_id="demo", session="s", rewards=(BREVITY,), where=tuple(lost), time_ms=1)
    publisher.publish(PROGRESS, missing)
    publisher.close()
    stage.wait_for(lost)


def commit_unseen(stage: Stage, places: list[Coordinates]) -> None:
    """As the reward process of another run does that shares the group."""
    ends: dict[int, int] = {}
    for where in places:
        ends[where.partition] = max(ends.get(where.partition, 0), where.offset + 1)
    consumer = stage.bus.cluster.consumer({"group.id": stage.namespace.group("reward", "main"), "enable.auto.commit": False})
    topic = stage.namespace.topic(TRAJECTORIES)
    consumer.commit(offsets=[TopicPartition(topic, partition, end) for partition, end in ends.items()], asynchronous=False)
    consumer.close()


def test_everything_that_is_written_is_answered_and_a_request_to_end_drains(make_stage: MakeStage) -> None:
    stage = make_stage(BREVITY, PATIENT)
    learner_is_at(stage, 10)
    aborted = publish_and_abort(stage, samples(700, 4))
    places = {codec: stage.publish(samples(100 * n, 8), compression_codec=codec) for n, codec in enumerate(CODECS)}
    stale = stage.publish(samples(600, 4, version=1))
    unanswered = stage.publish([trajectory(1, purpose=Purpose.PROBE, version=9), trajectory(1, run_id="other", version=9)])
    broken = publish_bytes(stage, trajectory(800, version=9), b"not avro at all")

    child = stage.start("1")
    stage.wait_for([place for found in places.values() for place in found], BREVITY)
    stage.wait_for(stale, PATIENT)
    stage.wait(lambda: stage.outstanding() == 0, "offsets that are committed")
    by_place = {(reward.of, reward.name): reward for reward in stage.rewards}
    for codec, found in places.items():
        assert {by_place[place, BREVITY].value for place in found} == {0.2}, codec
        assert {by_place[place, PATIENT].value for place in found} == {1.0}, codec
    assert {by_place[place, BREVITY].outcome for place in stale} == {RewardOutcome.STALE}
    assert not stage.judged() & {*unanswered, *aborted, broken}
    assert {(reward.name, reward.code_version) for reward in stage.rewards} == {(BREVITY, "2"), (PATIENT, "1")}
    letter = read_dead_letter(stage)
    assert letter == (b"demo/800", b"not avro at all")

    stage.wait(
        lambda: child.metric("echo_streams_lag", "0") == 0 and child.metric("echo_streams_partitions_assigned") == PARTITIONS, "lag 0"
    )
    assert child.metric("echo_streams_rewards_total", BREVITY, "scored") == 40
    assert child.metric("echo_streams_rewards_total", BREVITY, "stale") == 4
    assert child.metric("echo_streams_trajectories_passed_total", "probe") == 1
    assert child.metric("echo_streams_trajectories_passed_total", "other_run") == 1

    slow = stage.publish(samples(900, 3, completion="slow"))
    stage.wait((stage.folder / "begun").exists, "a judge that was asked")
    child.terminate()
    (stage.folder / "gate").touch()
    assert child.ended() == 0
    stage.wait_for(slow, PATIENT)
    assert stage.outstanding() == 0
    assert stage.num_members() == 0
    # Drained, not repeated.
    assert len(stage.rewards) == len({(reward.of, reward.name) for reward in stage.rewards})


def test_a_kill_repeats_work_and_loses_none(make_stage: MakeStage) -> None:
    stage = make_stage(PATIENT)
    killed = stage.start("1")
    done = stage.publish(samples(0, 8))
    stage.wait_for(done)
    slow = stage.publish(samples(100, 8, completion="slow"))
    stage.wait((stage.folder / "begun").exists, "a judge that was asked")
    beside = stage.publish(samples(200, 8))
    stage.wait_for(beside)
    killed.process.kill()
    assert not stage.judged() & set(slow)

    (stage.folder / "gate").touch()
    stage.start("1")
    stage.wait_for(slow)
    stage.wait(lambda: stage.outstanding() == 0, "offsets that are committed")
    # What was delivered beside the slow ones lay above them, so it was judged again: the same places, the same values.
    assert stage.judged() == {*done, *slow, *beside}
    assert {reward.value for reward in stage.rewards} == {1.0}
    assert len(stage.rewards) > len(stage.judged())


def test_a_request_to_end_in_the_middle_of_a_slow_function_is_obeyed_and_the_next_process_judges(make_stage: MakeStage) -> None:
    stage = make_stage(PATIENT)
    told = stage.start("1")
    done = stage.publish(samples(0, 8))
    stage.wait_for(done)
    slow = stage.publish(samples(100, 8, completion="slow"))
    stage.wait((stage.folder / "begun").exists, "a judge that was asked")
    told_s = time.monotonic()
    told.terminate()
    # 128 + 15: the limit came first, as on a machine that has no time for Faust's way out.
    assert told.ended() in {0, 128 + signal.SIGTERM}
    # The drain's own limit, Faust's second of sleep, and what a crowded machine adds.
    assert time.monotonic() - told_s < GONE_S, told.log
    stage.forget(told)
    assert not stage.judged() & set(slow)
    (stage.folder / "gate").touch()
    stage.start("2")
    stage.wait_for(slow)
    stage.wait(lambda: stage.outstanding() == 0, "offsets that are committed")


def test_what_waits_is_counted_while_a_function_holds_the_loop_up(make_stage: MakeStage) -> None:
    stage = make_stage(STUBBORN)
    child = stage.start("1")
    stage.wait(lambda: child.metric("echo_streams_partitions_assigned") == PARTITIONS, "its partitions")
    places = stage.publish(samples(0, 1, completion="slow"))
    stage.wait((stage.folder / "begun").exists, "a judge that was asked")
    places += stage.publish(samples(100, 40))

    def lag() -> float:
        return sum(child.metric("echo_streams_lag", str(partition)) for partition in range(PARTITIONS))

    stage.wait(lambda: lag() == 41, "all of them to be counted")
    (stage.folder / "gate").touch()
    stage.wait_for(places)
    stage.wait(lambda: lag() == 0, "lag 0")


def test_processes_share_the_work_and_another_application_joins_a_run_that_goes_on(make_stage: MakeStage) -> None:
    stage = make_stage(PATIENT)
    early = stage.publish(samples(0, 20))
    # Without a name it is a member as those of earlier releases are.
    first, second = stage.start("1"), stage.start("2", is_named=False)
    assigned = "echo_streams_partitions_assigned"
    stage.wait(lambda: first.metric(assigned) == second.metric(assigned) == PARTITIONS / 2, "two partitions for each")
    shared = stage.publish(samples(100, 40))
    stage.wait_for([*early, *shared], PATIENT)
    stage.wait(
        lambda: first.metric("echo_streams_trajectories_total") > 0 < second.metric("echo_streams_trajectories_total"), "work for both"
    )
    # A rebalance may repeat what was not committed, here only what came before both were there.
    assert sum(reward.of in set(shared) for reward in stage.rewards) == len(shared)

    beside = stage.start("3", "--application", "shadow", "--reward", BREVITY)
    first.terminate()
    assert first.ended() == 0
    # It has left: nobody waits for its session.
    assert stage.num_members() == 1
    stage.wait(lambda: second.metric(assigned) == PARTITIONS, "all partitions for the one that is left")
    late = stage.publish(samples(200, 20))
    stage.wait_for([*early, *shared, *late], PATIENT)
    stage.wait_for([*early, *shared, *late], BREVITY)
    assert {reward.value for reward in stage.rewards if reward.name == BREVITY} == {0.2}
    beside.terminate()
    assert beside.ended() == 0
    assert stage.outstanding("shadow") == 0
    assert second.process.poll() is None


def test_of_two_processes_under_one_name_the_first_ends_with_a_sentence_and_the_second_goes_on(make_stage: MakeStage) -> None:
    """The group cannot tell a process that was killed from one that lives: whoever comes under its name has its partitions at once."""
    stage = make_stage(BREVITY)
    first = stage.start("1")
    stage.wait_for(stage.publish(samples(0, 8)))
    second = stage.start("1")
    stage.forget(first)
    try:
        # Two members would have half of the partitions each.
        stage.wait(lambda: second.metric("echo_streams_partitions_assigned") == PARTITIONS, "all partitions for the second")
        assert first.ended() == 1
        assert "Two processes have the same name. Stop one of them, or give each its own (--name)." in first.log
        assert "Traceback" not in first.log
        stage.wait_for(stage.publish(samples(100, 8)))
        stage.wait(lambda: stage.outstanding() == 0, "offsets that are committed")
        assert second.process.poll() is None
    finally:
        first.process.kill()
        first.ended()


def publish_bytes(stage: Stage, record: Trajectory, value: bytes) -> Coordinates:
    """The record's key and headers around other bytes."""
    publisher = stage.bus.publisher()
    headers = headers_of(record, source="tester", time_ms=1)
    receipt = publisher.publish_bytes(stage.namespace.topic(TRAJECTORIES), value, key=record.group_id.encode(), headers=headers)
    publisher.close()
    return receipt.wait(WAIT_S)


def publish_and_abort(stage: Stage, records: list[Trajectory]) -> list[Coordinates]:
    """Trajectories in a transaction that never was."""
    places: list[Coordinates] = []
    producer = Producer(
        {
            "bootstrap.servers": stage.settings.kafka.bootstrap,
            "transactional.id": f"{stage.namespace.name}.aborting",
            "partitioner": "murmur2",
        }
    )
    producer.init_transactions(WAIT_S)
    producer.begin_transaction()
    for record in records:
        producer.produce(
            stage.namespace.topic(TRAJECTORIES),
            stage.bus.codec.encode(record),
            key=record.group_id,
            headers=[*headers_of(record, source="tester", time_ms=1)],
            on_delivery=lambda _, sent: places.append(Coordinates(partition=sent.partition() or 0, offset=sent.offset() or 0)),
        )
    producer.flush(WAIT_S)
    producer.abort_transaction(WAIT_S)
    assert len(places) == len(records)
    return places


def read_dead_letter(stage: Stage) -> tuple[bytes | None, bytes | None]:
    """Key and value of the only one."""
    topic = stage.namespace.dead_letters(TRAJECTORIES)
    consumer = Consumer({"bootstrap.servers": stage.settings.kafka.bootstrap, "group.id": "unused", "auto.offset.reset": "earliest"})
    try:
        assert sum(consumer.get_watermark_offsets(TopicPartition(topic, number), WAIT_S)[1] for number in range(partitions(stage))) == 1
        consumer.assign([TopicPartition(topic, number, 0) for number in range(partitions(stage))])
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert message.error() is None
        return message.key(), message.value()
    finally:
        consumer.close()


def partitions(stage: Stage) -> int:
    """Of the dead letters."""
    topic = stage.namespace.dead_letters(TRAJECTORIES)
    return len(stage.bus.cluster.admin().list_topics(topic, timeout=WAIT_S).topics[topic].partitions)
