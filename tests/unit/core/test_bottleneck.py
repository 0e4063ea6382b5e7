"""Who holds the run back."""

from __future__ import annotations

import pytest

from echo_core.bottleneck import Bottleneck, Place, PlaceUse, between, describe, find_bottleneck


def use(busy: float, empty: float = 0.0, blocked: float = 0.0) -> PlaceUse:
    return PlaceUse(busy_s=busy, empty_s=empty, blocked_s=blocked)


def test_the_busiest_working_place_is_the_bottleneck_and_the_learner_waits_for_it() -> None:
    found = find_bottleneck({Place.GENERATION: use(9.7, 0.3), Place.REWARD: use(2, 8), Place.TRAIN: use(7.7, 2.3)})
    assert found.place is Place.GENERATION
    assert found.busy_share == pytest.approx(0.97)
    assert found.learner_waits == pytest.approx(0.23)


def test_a_queue_that_is_never_empty_is_no_bottleneck() -> None:
    assert find_bottleneck({Place.QUEUE: use(10), Place.TRAIN: use(8, 2)}).place is Place.TRAIN


def test_equals_are_settled_by_the_order_of_the_pipeline() -> None:
    assert find_bottleneck({Place.TRAIN: use(5, 5), Place.GENERATION: use(5, 5)}).place is Place.GENERATION


def test_a_place_that_was_hardly_seen_is_not_judged() -> None:
    assert find_bottleneck({Place.GENERATION: use(0.9), Place.TRAIN: use(0.1, 9.0)}).place is Place.TRAIN
    assert find_bottleneck({}) == Bottleneck(place=None, busy_share=0.0, learner_waits=0.0)


def test_nothing_is_said_about_a_learner_that_was_hardly_seen() -> None:
    found = find_bottleneck({Place.REWARD: use(1, 9), Place.TRAIN: use(0.3)})
    assert describe(found) == "Too little was seen to say what the run waits for."


def test_blocked_time_counts_against_the_busy_share() -> None:
    assert use(5, 0, 5).busy_share == 0.5
    assert use(0).busy_share == 0.0


def test_between_two_readings_only_the_growth_counts() -> None:
    earlier = {Place.TRAIN: use(10, 5)}
    later = {Place.TRAIN: use(12, 6), Place.REWARD: use(3)}
    assert between(earlier, later) == {Place.TRAIN: use(2, 1), Place.REWARD: use(3)}


def test_a_counter_that_began_anew_counts_from_its_new_beginning() -> None:
    assert between({Place.TRAIN: use(10)}, {Place.TRAIN: use(1)}) == {Place.TRAIN: use(1)}


def test_uses_of_several_processes_add_up() -> None:
    assert use(1, 2, 3) + use(4, 5, 6) == use(5, 7, 9)


@pytest.mark.parametrize(
    ("bottleneck", "sentence"),
    [
        (Bottleneck(place=None, busy_share=0.0, learner_waits=0.0), "Too little was seen to say what the run waits for."),
        (
            Bottleneck(place=Place.TRAIN, busy_share=0.98, learner_waits=0.01),
            "The learner never waits; the bottleneck is training, busy 98%.",
        ),
        (
            Bottleneck(place=Place.GENERATION, busy_share=0.97, learner_waits=0.23),
            "The learner waits for rollouts 23% of its time; the bottleneck is generation, busy 97%.",
        ),
    ],
)
def test_the_answer_is_one_sentence(bottleneck: Bottleneck, sentence: str) -> None:
    assert describe(bottleneck) == sentence
