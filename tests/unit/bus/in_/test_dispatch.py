"""The requester writes where the least work lies, and not at all while everybody has enough."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_bus.client.publisher import Receipt
from echo_bus.errors import DeliveryFailed
from echo_bus.requests.dispatch import LeastLagChooser, PartitionOwner, PartitionWork
from echo_schemas.errors import UserError
from echo_schemas.records import Coordinates


def test_the_partition_with_the_least_outstanding_work_is_chosen() -> None:
    chooser = LeastLagChooser(3, depth=10)
    chooser.observe({0: PartitionWork(0, 5), 1: PartitionWork(3, 5), 2: PartitionWork(0, 9)})
    assert [chooser.choose() for _ in range(4)] == [1, 1, 1, 0]


def test_idle_partitions_are_served_in_turn() -> None:
    chooser = LeastLagChooser(3, depth=2)
    assert [chooser.choose() for _ in range(7)] == [0, 1, 2, 0, 1, 2, None]
    assert chooser.outstanding == 6


def test_work_that_is_done_makes_room() -> None:
    chooser = LeastLagChooser(1, depth=1)
    assert chooser.choose() == 0
    chooser.acknowledged(0, 41)
    chooser.observe({0: PartitionWork(first_open=41, end=42)})
    assert chooser.choose() is None
    chooser.observe({0: PartitionWork(first_open=42, end=42)})
    assert chooser.choose() == 0


def test_a_request_that_was_not_written_makes_room() -> None:
    chooser = LeastLagChooser(1, depth=1)
    assert chooser.choose() == 0
    chooser.failed(0)
    assert chooser.outstanding == 0
    assert chooser.choose() == 0


def test_an_older_answer_does_not_undo_an_acknowledgement() -> None:
    chooser = LeastLagChooser(1, depth=1)
    chooser.observe({0: PartitionWork(5, 5)})
    assert chooser.choose() == 0
    chooser.acknowledged(0, 5)
    chooser.observe({0: PartitionWork(4, 5)})
    assert chooser.outstanding == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_receipt_settles_its_choice(fails: bool) -> None:
    chooser, receipt = LeastLagChooser(1, depth=1), Receipt(threading.Condition())
    assert chooser.choose() == 0
    chooser.follow(0, receipt)
    if fails:
        receipt.settle(None, DeliveryFailed("The broker said no."))
    else:
        receipt.settle(Coordinates(partition=0, offset=0), None)
    assert chooser.outstanding == (0 if fails else 1)


def test_no_room_at_all_is_refused() -> None:
    for partitions, depth in ((0, 1), (1, 0)):
        with pytest.raises(UserError, match="no room for work"):
            LeastLagChooser(partitions, depth=depth)


@given(speeds=st.lists(st.integers(1, 8), min_size=2, max_size=4), seed=st.integers(0, 1_000))
def test_unequal_workers_all_stay_busy_and_none_builds_a_queue(speeds: list[int], seed: int) -> None:
    """Workers own four partitions each and finish `speed` requests a round, in a random order of their partitions."""
    random, per_worker, depth = Random(seed), 4, 8
    num_partitions = per_worker * len(speeds)
    chooser = LeastLagChooser(num_partitions, depth=depth)
    end, done = [0] * num_partitions, [0] * num_partitions
    finished = [0] * len(speeds)
    rounds = 30
    for _ in range(rounds):
        while (partition := chooser.choose()) is not None:
            chooser.acknowledged(partition, end[partition])
            end[partition] += 1
        assert max(e - d for e, d in zip(end, done, strict=True)) <= depth
        for worker, speed in enumerate(speeds):
            mine = list(range(worker * per_worker, (worker + 1) * per_worker))
            for _ in range(speed):
                waiting = [partition for partition in mine if done[partition] < end[partition]]
                done[random.choice(waiting)] += 1
                finished[worker] += 1
        chooser.observe({partition: PartitionWork(done[partition], end[partition]) for partition in range(num_partitions)})
    assert finished == [speed * rounds for speed in speeds]


def owner(partitions: set[int], rate: float, capacity: int = 0) -> PartitionOwner:
    return PartitionOwner(partitions=frozenset(partitions), groups_per_s=rate, capacity=capacity)


def choices(chooser: LeastLagChooser) -> Counter[int | None]:
    """What is chosen until nothing more is."""
    found: Counter[int | None] = Counter()
    while (chosen := chooser.choose()) is not None:
        found[chosen] += 1
    return found


def test_work_is_shared_by_speed_over_the_partitions_that_each_worker_has() -> None:
    chooser = LeastLagChooser(4, depth=10)
    chooser.share([owner({0, 1}, 20.0), owner({2, 3}, 4.0)])
    found = choices(chooser)
    assert (found[0] + found[1], found[2] + found[3]) == (40, 8)


def test_a_known_worker_gets_its_records_in_rows_of_one_partition() -> None:
    chooser = LeastLagChooser(32, depth=3)
    chooser.share([owner(set(range(32)), 20.0)])
    chosen = [chooser.choose() for _ in range(32)]
    assert [len(list(row)) for _, row in itertools.groupby(chosen)] == [8, 8, 8, 8]
    assert len(set(chosen)) == 4


def test_partitions_that_nobody_works_on_get_nothing_and_all_do_while_no_worker_is_known() -> None:
    chooser = LeastLagChooser(4, depth=1)
    chooser.share([owner({1}, 5.0)], alone=True)
    assert choices(chooser) == {1: 4}
    chooser.share([])
    assert choices(chooser) == {0: 1, 2: 1, 3: 1}


def test_what_moves_to_another_worker_counts_as_its_work() -> None:
    chooser = LeastLagChooser(2, depth=8)
    chooser.share([owner({0, 1}, 8.0), owner(set(), 0.0)])
    assert choices(chooser) == {0: 8, 1: 8}
    # The newcomer has taken over what it would not have been given: it gets nothing more before that is done.
    chooser.share([owner({0}, 8.0), owner({1}, 0.0)])
    assert choices(chooser) == {0: 8}


def test_a_partition_that_does_not_exist_is_nobodys() -> None:
    chooser = LeastLagChooser(2, depth=4)
    chooser.share([PartitionOwner(partitions=frozenset({-1, -7, 9}), groups_per_s=1.0, capacity=8)])
    assert chooser.choose() == 0


def test_of_two_that_claim_a_partition_the_later_one_has_it() -> None:
    chooser = LeastLagChooser(2, depth=1)
    chooser.share([owner({0, 1}, 1.0, capacity=1), owner({1}, 1.0, capacity=1)])
    assert choices(chooser) == {0: 1, 1: 1}
