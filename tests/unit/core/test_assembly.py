"""The assembler, rule by rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_core.assembly import GroupAssembler
from echo_core.groups import AssemblyLimits
from echo_schemas.records import DropReason, Purpose, RewardOutcome, RewardTerm
from tests.unit.core.records import EXACT, at, reward, trajectory

LIMITS = AssemblyLimits(max_open_groups=10, max_early_rewards=5, group_timeout_s=60, reward_timeout_s=30, longest_tick_s=60)


def assembler(terms: tuple[RewardTerm, ...] = EXACT, limits: AssemblyLimits = LIMITS) -> GroupAssembler:
    return GroupAssembler("demo", terms, limits)


def complete(work: GroupAssembler, seq: int = 0, first: int = 0, rewards_from: int = 100, attempt: str = "a") -> None:
    """Two samples of one attempt at offsets `first` and the next, each with its reward."""
    for index in range(2):
        work.add_trajectory(at(first + index), trajectory(seq, index, attempt=attempt))
    for index in range(2):
        work.add_reward(at(rewards_from + index), reward(at(first + index), seq, value=float(index), attempt=attempt))


def early_share(work: GroupAssembler) -> float:
    return sum(work.early_shares().values())


def reasons(work: GroupAssembler) -> list[tuple[DropReason, int | None]]:
    return [(drop.why, drop.where.offset if drop.where else None) for drop in work.drain_drops()]


def test_a_group_is_ready_when_one_attempt_and_its_rewards_are_there() -> None:
    work = assembler()
    work.add_trajectory(at(0), trajectory(0, 1))
    work.add_reward(at(0), reward(at(0), value=0.5))
    assert not work.ready
    work.add_trajectory(at(1), trajectory(0, 0))
    assert not work.ready
    work.add_reward(at(1), reward(at(1), value=0.25))
    (group,) = work.ready
    assert [member.trajectory.index for member in group.members] == [0, 1]
    assert [member.scores["exact"].value for member in group.members] == [0.25, 0.5]


def test_taking_a_group_closes_its_seq_and_yields_it_once() -> None:
    work = assembler()
    complete(work)
    assert work.take(0).seq == 0
    assert (work.num_open, work.num_ready) == (0, 0)
    with pytest.raises(KeyError):
        work.take(0)
    complete(work, first=10)
    assert reasons(work) == [(DropReason.DUPLICATE, 10), (DropReason.DUPLICATE, 11)]


def test_members_come_from_one_attempt_the_first_that_is_whole() -> None:
    work = assembler()
    work.add_trajectory(at(0), trajectory(0, 0, attempt="dead"))
    complete(work, first=1, attempt="alive")
    group = work.take(0)
    assert group.attempt == "alive"
    assert reasons(work) == [(DropReason.OTHER_ATTEMPT, 0)]


def test_a_repeated_index_of_an_attempt_is_a_duplicate_even_with_other_content() -> None:
    work = assembler()
    work.add_trajectory(at(0), trajectory(0, 0))
    work.add_trajectory(at(1), trajectory(0, 0, completion="other"))
    assert reasons(work) == [(DropReason.DUPLICATE, 1)]
    assert set(work._by_place) == {at(0)}


def test_a_reward_judges_the_record_at_its_coordinates_and_no_other() -> None:
    work = assembler()
    work.add_trajectory(at(0), trajectory(0, 0, attempt="x"))
    work.add_trajectory(at(1), trajectory(0, 0, attempt="y"))
    work.add_trajectory(at(2), trajectory(0, 1, attempt="y"))
    work.add_reward(at(0), reward(at(0), value=9.0, attempt="x"))
    assert not work.ready
    work.add_reward(at(1), reward(at(1), value=1.0, attempt="y"))
    work.add_reward(at(2), reward(at(2), value=2.0, attempt="y"))
    assert [member.scores["exact"].value for member in work.ready[0].members] == [1.0, 2.0]


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("other", [{"seq": 7}, {"attempt": "b"}], ids=["another seq", "another attempt"])
def test_a_reward_of_what_stood_there_before_judges_nothing(other: dict[str, Any], is_early: bool) -> None:
    """A topic that was made anew has other records at the old places, and rewards outlive it."""
    work = assembler()
    stray = reward(at(0), value=9.0, **other)
    if is_early:
        work.add_reward(at(90), stray)
    work.add_trajectory(at(0), trajectory(0, 0))
    work.add_trajectory(at(1), trajectory(0, 1))
    if not is_early:
        work.add_reward(at(90), stray)
    for index in range(2):
        work.add_reward(at(100 + index), reward(at(index), value=float(index)))
    assert [member.scores["exact"].value for member in work.take(0).members] == [0.0, 1.0]


def test_of_several_scored_rewards_the_lowest_offset_counts_in_any_order() -> None:
    for order in ((5, 7), (7, 5)):
        work = assembler()
        complete(work, rewards_from=100)
        work = assembler()
        for index in range(2):
            work.add_trajectory(at(index), trajectory(0, index))
        for offset in order:
            work.add_reward(at(offset), reward(at(0), value=float(offset)))
        work.add_reward(at(9), reward(at(1), value=0.0))
        assert work.take(0).members[0].scores["exact"].value == 5.0


def test_a_failed_reward_gives_way_to_a_scored_one() -> None:
    work = assembler()
    complete(work)
    work = assembler()
    for index in range(2):
        work.add_trajectory(at(index), trajectory(0, index))
        work.add_reward(at(index), reward(at(index), value=None))
    assert not work.ready
    for index in range(2):
        work.add_reward(at(10 + index), reward(at(index), value=1.0))
    assert work.num_ready == 1


def test_a_reward_may_come_before_its_trajectory() -> None:
    work = assembler()
    work.add_reward(at(0), reward(at(0)))
    work.add_reward(at(1), reward(at(1)))
    work.add_trajectory(at(0), trajectory(0, 0))
    work.add_trajectory(at(1), trajectory(0, 1))
    assert work.num_ready == 1


def test_early_rewards_are_bounded() -> None:
    work = assembler()
    for offset in range(8):
        work.add_reward(at(offset), reward(at(1_000 + offset), seq=50))
    assert early_share(work) == 1.0


def test_a_reward_for_a_record_that_does_not_exist_is_ignored() -> None:
    work = assembler()
    work.skip_to(0, 100)
    work.add_reward(at(0), reward(at(5), seq=3))
    assert (work.num_open, early_share(work)) == (0, 0.0)


def test_late_rewards_change_nothing() -> None:
    work = assembler()
    complete(work)
    before = work.take(0)
    work.add_reward(at(200), reward(at(0), value=5.0))
    assert early_share(work) == 0.0
    assert before.members[0].scores["exact"].value == 0.0


def test_other_runs_and_other_purposes_are_passed_over() -> None:
    work = assembler()
    work.add_trajectory(at(0), trajectory(0, 0, run_id="other"))
    work.add_trajectory(at(1), trajectory(0, 0, purpose=Purpose.EVAL))
    work.add_reward(at(0), reward(at(0), run_id="other"))
    assert early_share(work) == 0.0
    assert (work.num_open, reasons(work)) == (0, [])


def test_time_runs_only_for_partitions_that_are_caught_up() -> None:
    work = assembler()
    work.add_trajectory(at(0, partition=1), trajectory(0, 0))
    work.tick(0.0, {1}, {1})
    work.tick(1_000.0, {0}, {0})
    assert work.num_open == 1
    work.tick(1_050.0, {1}, {1})
    work.tick(1_061.0, {1}, {1})
    assert reasons(work) == [(DropReason.INCOMPLETE, None), (DropReason.INCOMPLETE, 0)]


def test_a_process_that_was_stopped_lets_no_more_time_pass_than_one_tick() -> None:
    """What came meanwhile lies in the log, and nobody has looked."""
    work = assembler(limits=replace(LIMITS, longest_tick_s=2.0))
    work.add_trajectory(at(0), trajectory(0, 0))
    for now_s in (0.0, 3_600.0, 7_200.0):
        work.tick(now_s, {0}, {0})
    assert work.num_open == 1
    for second in range(60):
        work.tick(7_201.0 + second, {0}, {0})
    assert work.num_open == 0


def test_a_required_reward_past_its_deadline_gets_its_default_or_is_left_out() -> None:
    for default in (0.5, None):
        work = assembler((RewardTerm(name="exact", weight=1.0, default=default, deadline_s=5.0),))
        work.add_trajectory(at(0), trajectory(0, 0))
        work.add_trajectory(at(1), trajectory(0, 1))
        work.add_reward(at(0), reward(at(0), value=1.0))
        work.tick(0.0, {0}, {0})
        work.tick(5.0, {0}, {0})
        assert not work.ready
        work.tick(6.0, {0}, {0})
        (group,) = work.ready
        assert group.members[0].scores["exact"].defaulted is False
        if default is None:
            assert "exact" not in group.members[1].scores
        else:
            assert group.members[1].scores["exact"].defaulted is True


def test_a_stale_verdict_of_the_filter_ends_the_wait() -> None:
    work = assembler()
    for index in range(2):
        work.add_trajectory(at(index), trajectory(0, index))
        work.add_reward(at(index), reward(at(index), value=None, outcome=RewardOutcome.STALE))
    assert work.num_ready == 1


def test_optional_rewards_are_not_waited_for_but_taken_along() -> None:
    work = assembler((RewardTerm(name="shadow", weight=0.0, required=False), *EXACT))
    complete(work)
    work.add_reward(at(300), reward(at(0), name="shadow", value=7.0))
    assert work.take(0).members[0].scores["shadow"].value == 7.0


def test_beyond_the_limit_the_oldest_group_is_evicted_as_a_drop() -> None:
    work = assembler()
    for seq in range(11):
        work.add_trajectory(at(seq), trajectory(seq, 0))
    assert work.num_open == 10
    assert reasons(work) == [(DropReason.EVICTED, None), (DropReason.EVICTED, 0)]


def test_whole_groups_that_wait_for_rewards_are_not_evicted() -> None:
    work = assembler()
    for seq in range(20):
        for index in range(2):
            work.add_trajectory(at(2 * seq + index), trajectory(seq, index))
    for seq in range(20, 31):
        work.add_trajectory(at(20 + seq), trajectory(seq, 0))
    assert (work.num_open, work.num_whole) == (30, 20)
    assert reasons(work) == [(DropReason.EVICTED, None), (DropReason.EVICTED, 40)], "the oldest of those that are not whole"
    for index in range(2):
        work.add_reward(at(index), reward(at(index)))
    work.take(0)
    assert work.num_whole == 19


def test_the_time_of_a_whole_group_runs_while_trajectories_are_not_read() -> None:
    work = assembler()
    for seq, num_members in ((0, 2), (1, 1)):
        for index in range(num_members):
            work.add_trajectory(at(2 * seq + index), trajectory(seq, index))
    for now_s in (0.0, 31.0, 62.0):
        work.tick(now_s, set(), {0})
    assert [group.seq for group in work.ready] == [0], "its rewards are past their deadline"
    assert work.num_open == 2, "the rest of the other group may lie in the log"


def test_members_left_out_of_a_batch_become_drops() -> None:
    work = assembler()
    complete(work)
    work.take(0, dropped=[(at(1), DropReason.STALE)])
    assert reasons(work) == [(DropReason.STALE, 1)]


def test_a_seq_can_be_closed_before_any_of_its_records_came() -> None:
    work = assembler()
    work.drop_group(4, DropReason.EXPIRED)
    work.drop_group(4, DropReason.EXPIRED)
    work.add_trajectory(at(0), trajectory(4, 0))
    assert reasons(work) == [(DropReason.EXPIRED, None), (DropReason.DUPLICATE, 0)]


def test_a_new_reward_specification_makes_groups_wait_again() -> None:
    work = assembler()
    complete(work)
    work.set_terms((*EXACT, RewardTerm(name="brevity", weight=0.2)))
    assert work.num_ready == 0
    for index in range(2):
        work.add_reward(at(300 + index), reward(at(index), name="brevity"))
    assert work.num_ready == 1


def test_ready_groups_come_oldest_first_whatever_their_order_of_arrival() -> None:
    work = assembler()
    for place, (seq, version) in enumerate([(3, 5), (1, 5), (2, 4)]):
        for index in range(2):
            where = at(2 * place + index)
            work.add_trajectory(where, trajectory(seq, index, version=version))
            work.add_reward(where, reward(where, seq))
    assert [group.seq for group in work.ready] == [2, 1, 3]


def test_a_checkpoint_keeps_the_oldest_open_record_and_reward() -> None:
    work = assembler()
    complete(work, seq=0, first=0, rewards_from=0)
    work.add_trajectory(at(2), trajectory(1, 0))
    work.add_reward(at(2), reward(at(2), 1))
    work.add_trajectory(at(3), trajectory(2, 0))
    work.take(0)
    state = work.state()
    assert (state.floor, state.closed) == (1, frozenset())
    assert state.trajectory_lows == {0: 2}
    assert state.trajectory_read_to == {0: 4}
    assert state.reward_lows == {0: 2}


def test_of_too_many_early_rewards_those_that_are_needed_last_are_forgotten() -> None:
    """The next records of the log are judged by the oldest of them; a place that nobody will ever write to is the first to go."""
    work = assembler(limits=replace(LIMITS, max_early_rewards=4))
    work.add_reward(at(0), reward(at(10**12), value=9.0))
    for index in range(5):
        work.add_reward(at(1 + index), reward(at(index), index // 2, index=index % 2))
    assert early_share(work) == 1.0
    for index in range(4):
        work.add_trajectory(at(index), trajectory(index // 2, index % 2))
    assert [group.seq for group in work.ready] == [0, 1]


def test_a_reward_that_had_no_room_is_asked_for_when_its_trajectory_is_read_and_a_restart_begins_before_it() -> None:
    work = assembler(limits=replace(LIMITS, max_early_rewards=2))
    for index in range(4):
        work.add_reward(at(10 + index), reward(at(index), index // 2, index=index % 2))
    assert work.take_forgotten() == {}, "no trajectory lacks one yet"
    assert work.state().reward_lows == {0: 10}
    for index in range(3):
        work.add_trajectory(at(index), trajectory(index // 2, index % 2))
    assert work.take_forgotten() == {0: 12}
    assert work.take_forgotten() == {}, "each is said once"
    work.add_trajectory(at(3), trajectory(1, 1))
    work.take(0)
    assert work.state().reward_lows == {0: 12}, "they are not read again yet"
    for index in range(2, 4):
        work.add_reward(at(10 + index), reward(at(index), index // 2, index=index % 2))
    assert [group.seq for group in work.ready] == [1]
    assert work.lacking_in == frozenset()


def test_rewards_of_what_is_no_trajectory_are_let_go_once_that_is_read() -> None:
    work = assembler()
    for index in range(4):
        work.add_reward(at(10 + index), reward(at(index), index // 2, index=index % 2))
    work.skip_to(0, 3)
    assert early_share(work) == 0.2
    assert work.state().reward_lows == {0: 13}


def test_of_rewards_that_are_equally_far_ahead_the_later_ones_have_no_room() -> None:
    work = assembler(limits=replace(LIMITS, max_early_rewards=1))
    work.add_reward(at(0), reward(at(5), 2, index=1))
    work.add_trajectory(at(0), trajectory(0, 0))
    work.add_reward(at(1), reward(at(6), 3, index=0))
    assert set(work._early) == {at(5)}


def test_reading_again_and_again_keeps_no_more_in_mind() -> None:
    work = assembler(limits=replace(LIMITS, max_early_rewards=2))
    for _ in range(50):
        for index in range(4):
            work.add_reward(at(10 + index), reward(at(index), index // 2, index=index % 2))
    assert len(work._early_offsets[0]) <= 2 * (2 + 2) + 1
    work.skip_to(0, 4)
    assert early_share(work) == 0.0


def test_a_reward_that_is_read_again_takes_no_more_room() -> None:
    work = assembler()
    for _ in range(2):
        work.add_reward(at(0), reward(at(5)))
    assert work.early_shares() == {0: 0.2}


def test_a_reward_of_a_record_in_another_partition_judges_nothing() -> None:
    work = assembler()
    for index in range(2):
        work.add_trajectory(at(index), trajectory(0, index))
        work.add_reward(at(index, 1), reward(at(index), index=index))
    assert not work.ready


def test_an_early_reward_keeps_what_is_trained_on_and_not_what_was_said_beside_it() -> None:
    work = assembler()
    work.add_reward(at(0), reward(at(0), components={"length": 1.0}))
    ((_, kept),) = work._early[at(0)]
    assert (kept.value, dict(kept.components)) == (1.0, {})


def test_over_the_limit_in_bytes_the_largest_group_is_let_go() -> None:
    """Attempts that are never whole grow one group, and that group pays for it."""
    work = assembler(limits=replace(LIMITS, max_open_bytes=50_000))
    complete(work, 0)
    for number in range(20):
        work.add_trajectory(at(10 + number), trajectory(1, 0, attempt=f"junk-{number}", completion="x" * 3_000))
    assert [group.seq for group in work.ready] == [0]
    assert work.is_closed(1)
    assert work.open_bytes < 10_000
    work.take(0)
    assert work.open_bytes == 0


def test_eviction_leaves_some_room_so_that_not_every_record_looks_at_every_group() -> None:
    work = assembler(limits=replace(LIMITS, max_open_groups=1_000, max_open_bytes=500_000))
    for number in range(2_000):
        work.add_trajectory(at(number), trajectory(number, 0))
        if work.has_drops:
            break
    drops = work.drain_drops()
    assert {drop.why for drop in drops} == {DropReason.EVICTED}
    assert 0.94 * 500_000 < work.open_bytes <= 0.95 * 500_000
    assert [drop.seq for drop in drops if drop.where is None] == list(range(len(drops) // 2)), "of equal ones the oldest"
