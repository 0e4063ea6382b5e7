"""A log that is not what the checkpoint goes on from: recognised, the lost seqs named, and gone on from only when told to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.clock import ManualClock, SystemClock
from echo_learner.commit.session import identities
from echo_learner.start.log_changes import examine_log, ranges
from echo_memory import MemoryCluster
from echo_schemas.columns import OFFSET_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import DropReason, SessionClaim, Trajectory
from echo_schemas.topics import REQUESTS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, Topic
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import NUM_PARTITIONS, WAIT_S, Pipeline, fill
from tests.unit.learner.test_mode_switch import request

pytestmark = pytest.mark.slow

OPEN = 4
"""The seq that waits for a reward while steps 1 and 2 are trained from the seqs before it."""


def trained(pipeline: Pipeline) -> None:
    """Two steps, and a group that is open in their checkpoints: a member of it has no reward."""
    fill(pipeline, 2)
    pipeline.write_group(OPEN, values=(0.0, None))
    pipeline.train(NumpyTrainer(), steps=2)


def answer(pipeline: Pipeline, *futures: dict[Any, Any]) -> None:
    for answers in futures:
        for future in answers.values():
            future.result(WAIT_S)


def delete_all(pipeline: Pipeline, topic: Topic) -> None:
    """Retention has removed what the topic holds."""
    places = [TopicPartition(pipeline.namespace.topic(topic), partition, -1) for partition in range(NUM_PARTITIONS)]
    answer(pipeline, pipeline.cluster.admin().delete_records(places))


def make_anew(pipeline: Pipeline, topic: Topic, partitions: int = NUM_PARTITIONS) -> None:
    admin, name = pipeline.cluster.admin(), pipeline.namespace.topic(topic)
    answer(pipeline, admin.delete_topics([name]), admin.create_topics([NewTopic(name, partitions, 1)]))


def grow(pipeline: Pipeline, *topics: Topic) -> None:
    wanted = [NewPartitions(pipeline.namespace.topic(topic), NUM_PARTITIONS + 1) for topic in topics]
    answer(pipeline, pipeline.cluster.admin().create_partitions(wanted))


def finish_requests(pipeline: Pipeline, num_finished: int, num_asked: int) -> None:
    """So many seqs were asked for, in order, and the workers have committed the first."""
    pipeline.write(REQUESTS, *(request(seq) for seq in range(num_asked)), partition=0)
    with closing(pipeline.cluster.consumer({"group.id": pipeline.namespace.group("worker")})) as consumer:
        consumer.commit(offsets=[TopicPartition(pipeline.namespace.topic(REQUESTS), 0, num_finished)], asynchronous=False)


def refusal(pipeline: Pipeline, *, skip: bool = False) -> str:
    """What a learner says that has changed nothing."""
    claims, kept = pipeline.read(STEPS, SessionClaim), pipeline.store.ids()
    trainer = NumpyTrainer()
    with pytest.raises(UserError) as refused:
        pipeline.train(trainer, steps=5, takeover=True, skip=skip)
    assert not trainer.batches
    assert (pipeline.read(STEPS, SessionClaim), pipeline.store.ids()) == (claims, kept)
    return str(refused.value)


def lost(pipeline: Pipeline) -> list[int]:
    """Seqs that were closed because the log lost them."""
    return [drop.seq for drop in pipeline.drops() if drop.why is DropReason.LOST and drop.what is None]


def assert_goes_on_once_told(pipeline: Pipeline, seqs: list[int]) -> None:
    """With --skip: the lost seqs are drops, later ones are trained; and the start after that needs no telling and closes nothing again."""
    fill(pipeline, 4, start=3)
    pipeline.train(NumpyTrainer(), steps=3, takeover=True, skip=True)
    assert lost(pipeline) == seqs
    fill(pipeline, 5, start=4)
    for seq in seqs:
        pipeline.write_group(seq, attempt="late")
    pipeline.train(NumpyTrainer(), steps=4, takeover=True)
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4]
    assert lost(pipeline) == seqs


def test_records_that_were_open_are_gone(pipeline: Pipeline) -> None:
    trained(pipeline)
    delete_all(pipeline, TRAJECTORIES)
    said = refusal(pipeline)
    assert "The log is not the one that the checkpoint v2-" in said
    assert "were still needed. Lost seqs: 4 (1 in all)." in said
    assert "Start once more with --skip" in said
    assert "`echoswarm fork demo-2 --version 2`" in said
    assert_goes_on_once_told(pipeline, [OPEN])
    (late,) = {drop.why for drop in pipeline.drops() if drop.what is not None and drop.seq == OPEN}
    assert late is DropReason.DUPLICATE, "a lost seq stays closed, whatever comes of it later"


def test_records_that_nobody_read_are_gone(pipeline: Pipeline) -> None:
    """Seqs 5 to 7 were asked for; a worker has answered 5 and 6, and only 6's records are left, which comes later in the log."""
    trained(pipeline)
    pipeline.write_group(5)
    delete_all(pipeline, TRAJECTORIES)
    pipeline.write_group(6)
    finish_requests(pipeline, 7, 8)
    assert "Lost seqs: 4-5 (2 in all)." in refusal(pipeline)
    fill(pipeline, 4, start=3)
    fill(pipeline, 5, start=4)
    pipeline.train(NumpyTrainer(), steps=3, takeover=True, skip=True)
    assert lost(pipeline) == [4, 5]
    (report,) = [report for report in pipeline.reports() if report.version == 3]
    assert report.batch is not None


def test_records_that_nobody_needs_any_more_may_go(pipeline: Pipeline, uninterrupted: Callable[..., bytes]) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2)
    delete_all(pipeline, TRAJECTORIES)
    delete_all(pipeline, REWARDS)
    fill(pipeline, 3, start=2)
    second = NumpyTrainer()
    pipeline.train(second, steps=3, takeover=True)
    assert second.weights == uninterrupted(3)
    assert not pipeline.drops()


def test_rewards_that_were_still_needed_are_gone(pipeline: Pipeline) -> None:
    trained(pipeline)
    delete_all(pipeline, REWARDS)
    said = refusal(pipeline)
    assert "rewards[" in said
    assert "Lost seqs: 4 (1 in all)." in said
    assert_goes_on_once_told(pipeline, [OPEN])


@pytest.mark.parametrize("topic", [TRAJECTORIES, REWARDS], ids=lambda topic: topic.name)
def test_a_topic_of_records_made_anew(pipeline: Pipeline, topic: Topic) -> None:
    trained(pipeline)
    make_anew(pipeline, topic)
    said = refusal(pipeline)
    assert f"{topic.name} was made anew, without the records that were in it. Lost seqs: 4 (1 in all)." in said
    assert_goes_on_once_told(pipeline, [OPEN])


def test_rewards_of_records_that_are_gone_judge_none_that_stand_in_their_place(pipeline: Pipeline) -> None:
    """The reward that seq 4's first member has got names an offset at which the topic that was made anew has another record."""
    trained(pipeline)
    (old,) = pipeline.store.load(pipeline.reports()[-1].checkpoint).assembly.open[OPEN]
    make_anew(pipeline, TRAJECTORIES)
    seqs = range(OPEN + 1, 30)
    places = {where: seq for seq in seqs for where in pipeline.write_group(seq, version=2, values=(None, None))}
    unjudged = places[old]
    for where, member in pipeline.placed(TRAJECTORIES, Trajectory):
        if where != old:
            pipeline.write_reward(member, where, 1.0)
    running = pipeline.start(NumpyTrainer(), takeover=True, skip=True, learner={"steps": 6})
    running.join()
    trained_seqs = [seq for report in pipeline.reports() if report.batch for seq in np.frombuffer(report.batch.seqs, OFFSET_DTYPE).tolist()]
    assert unjudged < max(trained_seqs)
    assert unjudged not in trained_seqs, "an old reward was taken for a new record's"


def test_partitions_were_added(pipeline: Pipeline) -> None:
    trained(pipeline)
    grow(pipeline, TRAJECTORIES)
    assert "trajectories has 3 partitions and rewards 2" in refusal(pipeline, skip=True)
    grow(pipeline, REWARDS)
    assert "trajectories has 3 partitions and had 2. rewards has 3 partitions and had 2. No seq is lost by it." in refusal(pipeline)
    assert_goes_on_once_told(pipeline, [])


def test_partitions_are_added_while_the_learner_reads(pipeline: Pipeline) -> None:
    """Workers write to them at once, so groups would be asked for again and again, and never come."""
    pipeline.clock = clock = ManualClock()
    running = pipeline.start(NumpyTrainer())
    fill(pipeline, 2)
    pipeline.wait_for_manifest(2)
    grow(pipeline, TRAJECTORIES, REWARDS)
    with pytest.raises(UserError, match="Somebody added partitions: trajectories had 2 when"):
        running.wait_until(lambda: clock.advance(1.0), "the learner notices")
    running.end()
    pipeline.clock = SystemClock()
    assert_goes_on_once_told(pipeline, [])


@pytest.mark.parametrize("topic", [STEPS, WEIGHTS], ids=lambda topic: topic.name)
def test_without_the_pointer_there_is_only_the_fork(pipeline: Pipeline, topic: Topic) -> None:
    """All checkpoints are kept, so that the run could seem never to have been public."""
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2, checkpoint={"keep": 9})
    make_anew(pipeline, topic, 1)
    for skip in (False, True):
        said = refusal(pipeline, skip=skip)
        assert f"belongs to another log: {topic.name} is not the one" in said
        assert "`echoswarm fork demo-2 --version 2`" in said


def test_another_cluster(pipeline: Pipeline) -> None:
    fill(pipeline, 2)
    pipeline.train(NumpyTrainer(), steps=2, checkpoint={"keep": 9})
    elsewhere = Pipeline(pipeline.folder, cluster=MemoryCluster())
    assert "belongs to another log: cluster, steps, weights are not the one" in refusal(elsewhere, skip=True)


def test_a_topic_that_is_missing(pipeline: Pipeline) -> None:
    trained(pipeline)
    answer(pipeline, pipeline.cluster.admin().delete_topics([pipeline.namespace.topic(REWARDS)]))
    said = refusal(pipeline, skip=True)
    assert "goes on from topics that are not there: rewards." in said
    assert "echoswarm topics apply" in said


def test_a_log_whose_end_was_cut_off(pipeline: Pipeline) -> None:
    """As an unclean election of a leader leaves it: the learner has read what the log does not have any more."""
    trained(pipeline)
    state = pipeline.store.load(pipeline.reports()[-1].checkpoint)
    (where,) = state.assembly.open[OPEN]
    ahead = {**state.assembly.trajectory_read_to, where.partition: state.assembly.trajectory_read_to[where.partition] + 5}
    cut = replace(state, assembly=replace(state.assembly, trajectory_read_to=ahead))
    change = examine_log(pipeline.bus, cut, identities(pipeline.bus))
    (sentence,) = change.what
    assert f"trajectories[{where.partition}] ends at offset" in sentence
    assert "its end was cut off" in sentence
    assert change.lost == (OPEN,)
    assert change.state.assembly.trajectory_read_to == state.assembly.trajectory_read_to
    rewards = {partition: low + 99 for partition, low in state.assembly.reward_lows.items()}
    change = examine_log(pipeline.bus, replace(state, assembly=replace(state.assembly, reward_lows=rewards)), identities(pipeline.bus))
    assert len(change.what) == NUM_PARTITIONS
    assert change.lost == (OPEN,)


def test_who_dies_after_skipping_and_before_a_checkpoint_has_closed_nothing(pipeline: Pipeline) -> None:
    """The drops are durable with the next checkpoint, and until then a start must be told again."""
    trained(pipeline)
    delete_all(pipeline, TRAJECTORIES)
    running = pipeline.start(NumpyTrainer(), takeover=True, skip=True)
    pipeline.wait_for(STEPS, SessionClaim, lambda claim: claim.tip_version == 2, "the claim of the one that skips")
    running.wait_for_value("echo_learner_version", 2)
    running.stop()
    assert not lost(pipeline)
    assert "Lost seqs: 4 (1 in all)." in refusal(pipeline)
    assert_goes_on_once_told(pipeline, [OPEN])


def test_ranges() -> None:
    assert ranges([]) == ""
    assert ranges([3, 5, 6, 7, 9]) == "3, 5-7, 9"
