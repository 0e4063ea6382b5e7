"""The one history: every trajectory of a run with its rewards and its fate, in any range, and what retention has removed is named."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic

from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_replay.following import follow
from echo_replay.history import History, HistoryRecord
from echo_replay.near import read_near
from echo_replay.raw_log import RawLog
from echo_replay.selection import Everything, Fate, Groups, Offsets, Selection, Steps, Times, Versions, Where
from echo_replay.steps import read_batch
from echo_schemas.errors import UserError
from echo_schemas.partitioning import partition_of
from echo_schemas.records import DropReason, Purpose, StepReport
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES
from echo_streams.intake import Identity
from tests.unit.core.records import reward
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, NUM_PARTITIONS, WAIT_S, Pipeline
from tests.unit.replay.forged import STEPS_TRAINED, SoundRun, only

DEMO = "demo"


def told(pipeline: Pipeline, where: Where = Everything(), **filters: object) -> list[HistoryRecord]:  # noqa: B008  frozen
    with History(pipeline.bus, DEMO) as history:
        return list(history.read(Selection(range=where, **filters)))  # type: ignore[arg-type]  # of the fields' own types


def names(found: list[HistoryRecord]) -> list[str]:
    return sorted(each.trajectory.name for each in found if each.trajectory is not None)


def test_each_record_is_told_once_with_the_fate_that_the_audit_counts(sound: SoundRun) -> None:
    found = told(sound.pipeline)
    fates = Counter(each.fate for each in found)
    counts = sound.audit().counts
    assert len({(each.where.partition, each.where.offset) for each in found}) == len(found)
    assert fates[Fate.TRAINED] == counts["trained"] == STEPS_TRAINED * GROUPS_PER_STEP * GROUP_SIZE
    assert fates[Fate.DROPPED] == counts["dropped"] > 0
    assert fates[Fate.DEAD] == counts["dead-lettered"] > 0
    assert fates[Fate.OPEN] == counts["open"] > 0
    assert fates[Fate.EVALUATED] + fates[Fate.PROBED] == counts["not_for_training"] > 0
    assert all(each.trajectory.run_id == DEMO for each in found if each.trajectory is not None), "another run's record was told"


def test_trained_samples_have_their_step_advantage_and_rewards(sound: SoundRun) -> None:
    found = [each for each in told(sound.pipeline) if each.fate is Fate.TRAINED]
    assert {each.step for each in found} == set(range(1, STEPS_TRAINED + 1))
    for each in found:
        assert each.trajectory is not None
        assert each.rewards == {"exact": float(each.trajectory.index)}
        assert each.entry.advantage is not None
        assert (each.entry.advantage > 0) == (each.rewards["exact"] > 0.5)


def test_a_drop_says_why(sound: SoundRun) -> None:
    found = told(sound.pipeline, fates=frozenset({Fate.DROPPED}))
    reasons = {each.drop.why for each in found if each.drop is not None}
    assert {DropReason.STALE} <= reasons
    assert len(found) == sum(each.drop is not None for each in found)


def test_ranges_and_filters_are_cuts_of_the_whole(sound: SoundRun) -> None:
    whole = told(sound.pipeline)
    readable = [(each, each.trajectory) for each in whole if each.trajectory is not None]
    assert names(told(sound.pipeline, Steps(2, 3))) == names([each for each in whole if each.step in (2, 3)])
    in_versions = names([each for each, trajectory in readable if trajectory.min_version <= 2 <= trajectory.max_version])
    assert names(told(sound.pipeline, Versions(2, 2))) == in_versions
    assert names(told(sound.pipeline, Groups(frozenset({"demo/1"})))) == names([e for e, t in readable if t.group_id == "demo/1"])
    several = frozenset({"demo/0", "demo/1", "demo/2", "demo/14", "demo/eval-0"})
    assert names(told(sound.pipeline, Groups(several))) == names([each for each, t in readable if t.group_id in several])
    assert names(told(sound.pipeline, Groups(frozenset({"demo/eval-0"})))) == ["demo/eval-0/a/0"]
    assert names(told(sound.pipeline, purposes=frozenset({Purpose.PROBE}))) == names([e for e in whole if e.fate is Fate.PROBED])
    offsets = [each.where.offset for each in whole if each.where.partition == 1]
    some = told(sound.pipeline, Offsets({1: (offsets[2], offsets[5])}))
    assert [each.where.offset for each in some] == offsets[2:6]
    assert told(sound.pipeline, worker="nobody") == []
    middle = sorted(each.time_ms for each in whole)[len(whole) // 2]
    early, late = told(sound.pipeline, Times(None, middle)), told(sound.pipeline, Times(middle + 1, None))
    assert len(early) + len(late) == len(whole)


def test_by_time_is_the_same_in_another_order(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        plain, by_time = list(history.read()), list(history.read(by_time=True))
    assert [each.time_ms for each in by_time] == sorted(each.time_ms for each in plain)
    assert {(each.where, each.fate) for each in by_time} == {(each.where, each.fate) for each in plain}
    for number in range(NUM_PARTITIONS):
        order = [each.where.offset for each in by_time if each.where.partition == number]
        assert order == sorted(order), "a partition's own order is kept where its times do not go back"


def test_groups_by_time_are_the_same_in_another_order(sound: SoundRun, tmp_path: Path) -> None:
    """Also those whose records lie in several pieces of a partition: those of the books, and what the learner has not read yet."""
    copy = sound.forge(tmp_path)
    with History(copy.bus, DEMO) as history:
        members = [each.trajectory for each in history.read() if each.trajectory is not None and each.trajectory.group_id == "demo/1"]
        number = partition_of("demo/1", NUM_PARTITIONS)
        # Further than what is read in one piece.
        for seq in range(1_000, 1_600):
            copy.write(TRAJECTORIES, copy.sample(seq, 0), partition=number)
        copy.write(TRAJECTORIES, replace(members[0], attempt="later"), partition=number)
        wanted = Selection(range=Groups(frozenset({"demo/0", "demo/1", "demo/2"})))
        plain, by_time = list(history.read(wanted)), list(history.read(wanted, by_time=True))
    assert len({each.trajectory.attempt for each in plain if each.trajectory is not None}) > 1
    assert sorted(names(plain)) == sorted(names(by_time))


@pytest.mark.parametrize(
    "selection",
    [
        Selection(),
        Selection(range=Steps(2, 3)),
        Selection(range=Versions(2, 2)),
        Selection(fates=frozenset({Fate.DEAD, Fate.DROPPED})),
        Selection(purposes=frozenset({Purpose.PROBE})),
    ],
)
def test_undecoded_records_are_the_same(sound: SoundRun, selection: Selection) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        whole, undecoded = list(history.read(selection)), list(history.undecoded(selection))
    assert [(each.where, each.rewards) for each in undecoded] == [(each.where, each.rewards) for each in whole]
    for quick, each in zip(undecoded, whole, strict=True):
        if each.trajectory is not None:
            assert quick.identity == Identity.of(each.trajectory)
    unreadable = sum(each.identity is None for each in undecoded)
    assert unreadable <= sum(each.trajectory is None for each in whole)
    assert (unreadable > 0) == (selection.wants_unreadable and selection.range == Everything())


def test_two_threads_read_one_set_of_books(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        beside = history.beside()
        going = history.read(Selection(range=Steps(1, 1)))
        first = next(going)
        with pytest.raises(UserError):
            list(beside.read(Selection(range=Steps(90, 90))))
        beside.missing.append("its own")
        assert history.missing == []
        history.refresh()
        assert {each.step for each in [first, *going]} == {1}
        assert len(list(beside.read())) == len(list(history.read()))


def test_a_reward_that_was_written_later_is_not_looked_for(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        first = Selection(range=Steps(1, 1))
        assert all(each.rewards for each in history.read(first, rewards_until_ms=max(each.time_ms for each in history.read())))
        assert not any(each.rewards for each in history.read(first, rewards_until_ms=0, clock_error_ms=-MAX_CLOCK_ERROR_MS))


def test_a_reward_that_came_late_is_read_on_request(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    of_step = Selection(range=Steps(1, 1))
    with History(copy.bus, DEMO) as history:
        record = next(each for each in history.read(of_step) if each.trajectory is not None)
        assert record.trajectory is not None
        late = reward(record.where, record.trajectory.seq, value=0.25, index=record.trajectory.index, name="brevity")
        value = copy.bus.codec.encode(replace(late, run_id=DEMO, group_id=record.trajectory.group_id, attempt=record.trajectory.attempt))
        copy.cluster.producer({}).produce(
            copy.bus.namespace.topic(REWARDS),
            value,
            record.trajectory.group_id,
            record.where.partition,
            timestamp=record.time_ms + 3_600_000,
        )
        ranges = (Offsets({record.where.partition: (record.where.offset,) * 2}), Groups(frozenset({record.trajectory.group_id})))
        for selection in (of_step, *(Selection(range=each) for each in ranges)):
            near = {each.where: each.rewards for each in read_near(history, selection)}
            assert history.num_later_rewards == 1
            whole = {each.where: each.rewards for each in read_near(history, selection, late=True)}
            assert history.num_later_rewards == 0
            assert "brevity" not in near[record.where]
            assert whole == {**near, record.where: {**near[record.where], "brevity": 0.25}}
        # Of an evaluation nobody knows when it was decided.
        assert any(each.rewards for each in read_near(history, Selection(range=Versions(0, 99))))
        assert history.num_later_rewards == 0


def test_rewards_are_near_their_records_whatever_the_learners_clock_says(sound: SoundRun, tmp_path: Path) -> None:
    an_hour_behind = only(StepReport, lambda report: [replace(report, time_ms=report.time_ms - 3_600_000)])
    with History(sound.forge(tmp_path, an_hour_behind).bus, DEMO) as history:
        assert all(each.rewards for each in read_near(history, Selection(range=Steps(1, 1))))


def test_ranges_of_a_partition_are_read_without_what_lies_between(sound: SoundRun) -> None:
    cluster, physical = sound.pipeline.cluster, "demo.many"
    assert cluster.admin().create_topics([NewTopic(physical, 3)])[physical].result() is None
    producer = cluster.producer({})
    for number in range(6_000):
        producer.produce(physical, b"%d" % number, partition=number % 2)
    wanted = {0: [(0, 3), (10, 12), (10, 10), (1_200, 1_203), (2_990, 3_000)], 1: [(5, 6)], 2: []}
    found: dict[int, list[int]] = {0: [], 1: []}
    num_fetched = 0
    with RawLog(sound.pipeline.bus, physical) as log:
        for fetched in log.fetches(wanted):
            num_fetched += 1
            for raw in fetched.messages:
                found[raw.partition() or 0].append(raw.offset() or 0)
    assert all(found[number] == [offset for first, end in wanted[number] for offset in range(first, end)] for number in found)
    assert num_fetched >= 3, "the first fetch does not hold the last range"


def test_the_rewards_of_a_step_are_read_again_from_its_report(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        for step in history.log.steps:
            batch = read_batch(history.bus, step)
            assert batch.num_samples == len(step.seqs)
            assert [column.name for column in batch.rewards] == ["exact"]


def test_all_drops_stand_in_one_table(sound: SoundRun) -> None:
    with History(sound.pipeline.bus, DEMO) as history:
        table = history.fates.drops()
        dropped = {(each.where.partition, each.where.offset): each for each in history.read(Selection(fates=frozenset({Fate.DROPPED})))}
    places = list(zip(table.partitions.tolist(), table.offsets.tolist(), strict=True))
    assert {place for place in places if place[0] >= 0} <= set(dropped)
    for place, reason, version in zip(places, table.reasons.tolist(), table.versions.tolist(), strict=True):
        if place in dropped and (drop := dropped[place].drop) is not None:
            assert (list(DropReason)[reason], version) == (drop.why, drop.learner_version)


def test_a_refresh_sees_what_the_learner_has_done_since(sound: SoundRun, tmp_path: Path) -> None:
    held: list[StepReport] = []

    def keep_back(report: StepReport) -> list[StepReport]:
        """The last step is written later."""
        if report.version < STEPS_TRAINED:
            return [report]
        held.append(report)
        return []

    copy = sound.forge(tmp_path, only(StepReport, keep_back))
    with History(copy.bus, DEMO) as history:
        assert history.log.tip == STEPS_TRAINED - 1
        assert not history.refresh()
        copy.write(STEPS, *held, partition=0)
        assert history.refresh()
        assert history.log.tip == STEPS_TRAINED
        assert {each.step for each in history.read(Selection(range=Steps(STEPS_TRAINED, STEPS_TRAINED)))} == {STEPS_TRAINED}
        assert not history.refresh()


def test_what_retention_has_removed_is_named(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    gone = TopicPartition(copy.namespace.topic(TRAJECTORIES), 0, 5)
    for future in copy.cluster.admin().delete_records([gone]).values():
        future.result(WAIT_S)
    with History(copy.bus, DEMO) as history:
        found = list(history.read())
        assert history.missing == ["Retention has removed offsets 0 to 4 of partition 0 of trajectories."]
        assert min(each.where.offset for each in found if each.where.partition == 0) == 5
        list(history.read(Selection(range=Steps(1, 1))))
        assert any("samples of partition 0" in each for each in history.missing)
        with pytest.raises(UserError, match="removed offsets 0 to 3 of partition 0"):
            list(history.read(Selection(range=Offsets({0: (0, 3)}))))
        with pytest.raises(UserError, match="everything that was written up to"):
            list(history.read(Selection(range=Times(None, 1))))


@pytest.mark.parametrize(
    ("where", "says"),
    [
        (Versions(90, 99), "The versions 90 to 99 were never published"),
        (Steps(90, 90), "no report of step 90"),
        (Offsets({7: (0, 1)}), "no partition 7"),
        (Offsets({0: (10_000, 10_001)}), "no offset 10000"),
    ],
)
def test_a_range_that_is_not_there(sound: SoundRun, where: Where, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        told(sound.pipeline, where)
    assert refused.value.hint


def test_a_run_that_is_not_there(sound: SoundRun) -> None:
    with pytest.raises(UserError, match="knows no run 'nobodys'"):
        History(sound.pipeline.bus, "nobodys")


def test_what_comes_is_told_once_with_its_reward(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    with History(copy.bus, DEMO) as history:
        num_read = len(list(history.read()))
        judged = copy.sample(50, 0, purpose=Purpose.EVAL)
        (where,) = copy.write(TRAJECTORIES, judged)
        copy.write_reward(judged, where, 0.75, name="exact")
        first = next(follow(history, Selection(), hold_s=WAIT_S))
        assert (first.where, first.fate, first.rewards) == (where, Fate.EVALUATED, {"exact": 0.75})
        assert len(list(history.read())) == num_read + 1


def test_what_is_followed_is_told_after_a_while_even_without_a_fate(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    with History(copy.bus, DEMO) as history:
        list(history.read())
        (where,) = copy.write(TRAJECTORIES, copy.sample(50, 0))
        first = next(follow(history, Selection(), hold_s=0.0))
        assert (first.where, first.fate) == (where, Fate.OPEN)
        with pytest.raises(UserError, match="lie in the past"):
            next(follow(history, Selection(range=Steps(1, 2)), hold_s=0.0))
