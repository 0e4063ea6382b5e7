"""Evaluations without a broker: the estimator against brute force, the tally against every order of what it hears."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_core.evaluation import (
    LEAST_DISTANCE,
    MOST_PROMPTS,
    MOST_SEED,
    EvaluationSpec,
    EvaluationTally,
    due_after_restart,
    evaluation_seq,
    held_out_seed,
    index_of,
    is_due,
    pass_at_k,
    reward_stats,
)
from echo_schemas.records import Coordinates, Purpose, Reward, RewardOutcome, Sampling, Trajectory, VersionSpan
from tests.thorough import examples
from tests.unit.core.records import reward, trajectory

SAMPLING = Sampling(max_new_tokens=4)


def spec(**changes: Any) -> EvaluationSpec:
    fields: dict[str, Any] = {
        "name": "held-out",
        "task": "letters",
        "options": {},
        "rewards": ("exact",),
        "pass_reward": "exact",
        "pass_from": 1.0,
        "pass_at": (1, 2),
        "prompts": 3,
        "samples": 2,
        "sampling": SAMPLING,
        "seed": held_out_seed(0),
        "every": 10,
        "at_start": True,
        "at_end": True,
        "patience_s": 1.0,
    }
    return EvaluationSpec(**{**fields, **changes})


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples: int, data: st.DataObject) -> None:
    num_right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    subsets = list(itertools.combinations(range(num_samples), k))
    share = sum(any(member < num_right for member in subset) for subset in subsets) / len(subsets)
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(share, abs=1e-12)


@given(st.integers(1, 100_000), st.data())
def test_pass_at_k_stays_a_probability_for_any_number_of_samples(num_samples: int, data: st.DataObject) -> None:
    num_right = data.draw(st.integers(0, min(num_samples, 200)))
    k = data.draw(st.integers(1, min(num_samples, 200)))
    value = pass_at_k(num_samples, num_right, k)
    assert 0.0 <= value <= 1.0
    assert pass_at_k(num_samples, num_right, 1) == pytest.approx(num_right / num_samples)
    if k < num_samples:
        assert pass_at_k(num_samples, num_right, k + 1) >= value - 1e-12


@pytest.mark.parametrize(("num_samples", "num_right", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_numbers_that_contradict_one_another_are_refused(num_samples: int, num_right: int, k: int) -> None:
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(num_samples, num_right, k)


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=2), min_size=2, max_size=20))
def test_the_standard_error_is_that_of_the_mean_of_the_prompts_means(by_prompt: list[list[float]]) -> None:
    means = [sum(prompt) / 2 for prompt in by_prompt]
    mean = sum(means) / len(means)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1))
    stats = reward_stats("exact", by_prompt)
    assert stats.mean == pytest.approx(mean, abs=1e-9)
    assert stats.stderr == pytest.approx(deviation / math.sqrt(len(means)), abs=1e-6)
    assert stats.minimum <= stats.mean + 1e-9 <= stats.maximum + 2e-9


def test_samples_that_agree_within_their_prompt_are_one_draw_and_not_many() -> None:
    few = reward_stats("exact", [[0.0], [1.0], [1.0], [0.0]])
    many = reward_stats("exact", [[0.0] * 50, [1.0] * 50, [1.0] * 50, [0.0] * 50])
    assert many.stderr == pytest.approx(few.stderr)
    assert reward_stats("exact", [[0.0, 1.0]]).stderr == 0.0
    with pytest.raises(ValueError, match="without samples"):
        reward_stats("exact", [[1.0], []])


def test_evaluations_come_before_the_first_step_every_so_often_and_at_the_end() -> None:
    found = [version for version in range(26) if is_due(spec(), version, is_last=version == 25)]
    assert found == [0, 10, 20, 25]
    quiet = spec(every=0, at_start=False, at_end=False)
    assert not any(is_due(quiet, version, is_last=version == 25) for version in range(26))
    assert [version for version in range(26) if is_due(replace(quiet, every=5), version, is_last=False)] == [5, 10, 15, 20, 25]


def test_a_learner_that_begins_anew_evaluates_the_start_and_what_was_due_last() -> None:
    kept = range(27)
    assert due_after_restart(spec(), 26, kept, is_complete=False) == [0, 20]
    assert due_after_restart(spec(), 26, kept, is_complete=True) == [0, 20, 26]
    assert due_after_restart(spec(at_start=False), 9, kept, is_complete=False) == []
    assert due_after_restart(spec(), 26, [24, 25, 26], is_complete=True) == [26], "only what is kept can be evaluated"
    assert due_after_restart(spec(), 15, kept, is_complete=False) == [0, 10], "what another run published later is not this one's"


@given(st.integers(0, MOST_SEED), st.integers(0, MOST_SEED), st.integers(0, LEAST_DISTANCE))
def test_no_item_of_an_evaluation_is_one_of_another_or_of_training(one: int, other: int, run_seed: int) -> None:
    """For data sets that make item i of seed + i."""
    items = range(held_out_seed(one), held_out_seed(one) + MOST_PROMPTS)
    assert items.stop <= 2**32
    if one != other:
        assert not set(range(held_out_seed(other), held_out_seed(other) + MOST_PROMPTS, MOST_PROMPTS - 1)) & set(items[:: MOST_PROMPTS - 1])
    assert run_seed + LEAST_DISTANCE - 1 < items.start


def test_a_seq_says_which_prompt_it_is() -> None:
    seqs = {evaluation_seq(version, name, index) for version in (0, 1, 7) for name in ("a", "b") for index in (0, 1, MOST_PROMPTS - 1)}
    assert len(seqs) == 18
    assert index_of(evaluation_seq(1_000_000, "held-out", 17)) == 17
    assert evaluation_seq(9_000_000, "x", MOST_PROMPTS - 1) < 2**63


# The tally

VERSION = 20


def answer(index: int, member: int, *, attempt: str = "a", version: int = VERSION, **changes: Any) -> Trajectory:
    seq = evaluation_seq(VERSION, "held-out", index)
    fields: dict[str, Any] = {"attempt": attempt, "version": version, "purpose": Purpose.EVAL, "sampling": SAMPLING}
    return trajectory(seq, member, **{**fields, **changes})


def judge(where: Coordinates, index: int, member: int, value: float | None, **changes: Any) -> Reward:
    made: Reward = reward(where, evaluation_seq(VERSION, "held-out", index), value=value, index=member)
    return replace(made, **changes)


@settings(max_examples=examples(50))
@given(st.randoms(use_true_random=False))
def test_the_result_does_not_depend_on_the_order_in_which_records_come(order: random.Random) -> None:
    values = {(0, 0): 1.0, (0, 1): 0.0, (1, 0): 1.0, (1, 1): 1.0, (2, 0): 0.0, (2, 1): 0.0}
    events: list[tuple[str, Any, Any]] = []
    for (index, member), value in values.items():
        where = Coordinates(partition=index, offset=member)
        events.append(("trajectory", where, answer(index, member)))
        events.append(("reward", Coordinates(partition=index, offset=10 + member), judge(where, index, member, value)))
        # Delivered twice, judged again with another value further on, and once without one.
        events.append(("trajectory", where, answer(index, member)))
        events.append(("reward", Coordinates(partition=index, offset=20 + member), judge(where, index, member, value)))
    order.shuffle(events)
    tally = EvaluationTally(spec(), VERSION)
    for kind, at, record in events:
        tally.add_trajectory(at, record) if kind == "trajectory" else tally.add_reward(at, record)
    assert tally.is_complete
    results = tally.results()
    assert (results.num_prompts, results.num_missing) == (3, 0)
    assert {each.k: each.value for each in results.pass_at(spec())} == pytest.approx({1: 0.5, 2: 2 / 3})
    (stats,) = results.stats()
    assert stats.mean == pytest.approx(0.5)


def whole(tally: EvaluationTally, index: int, *, attempt: str = "a", offset: int = 0, value: float | None = 1.0) -> None:
    for member in range(2):
        where = Coordinates(partition=index, offset=offset + member)
        tally.add_trajectory(where, answer(index, member, attempt=attempt))
        tally.add_reward(Coordinates(partition=index, offset=100 + offset + member), judge(where, index, member, value))


def test_attempts_are_never_mixed_and_the_first_whole_one_counts() -> None:
    tally = EvaluationTally(spec(), VERSION)
    tally.add_trajectory(Coordinates(partition=0, offset=0), answer(0, 0, attempt="died"))
    whole(tally, 0, attempt="second", offset=1, value=0.0)
    whole(tally, 0, attempt="late", offset=5, value=1.0)
    results = tally.results()
    assert results.rewards == {"exact": [[0.0, 0.0]]}
    assert results.num_missing == 2
    assert tally.unsettled() == [1, 2]


def test_a_prompt_that_cannot_be_judged_whole_is_left_out_and_not_taken_for_wrong() -> None:
    tally = EvaluationTally(spec(), VERSION)
    whole(tally, 0)
    whole(tally, 1)
    whole(tally, 2, value=None)
    assert tally.is_complete
    results = tally.results()
    assert (results.num_prompts, results.num_missing) == (2, 1)
    assert results.stats()[0].mean == 1.0


def test_a_value_beats_a_failure_before_the_prompt_is_settled() -> None:
    tally = EvaluationTally(spec(prompts=2), VERSION)
    where = [Coordinates(partition=0, offset=member) for member in range(2)]
    for member in range(2):
        tally.add_trajectory(where[member], answer(0, member))
    tally.add_reward(Coordinates(partition=0, offset=5), judge(where[0], 0, 0, None))
    tally.add_reward(Coordinates(partition=0, offset=6), judge(where[0], 0, 0, 1.0))
    tally.add_reward(Coordinates(partition=0, offset=7), judge(where[1], 0, 1, 0.0))
    assert tally.results().rewards == {"exact": [[1.0, 0.0]]}


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 19},
        {"max_version": 21, "version_spans": (VersionSpan(start=1, end=3, version=20),)},
        {"group_size": 3},
        {"sampling": Sampling(max_new_tokens=5)},
        {"entry": '{"answer": "easy"}'},
    ],
    ids=["another version", "mixed versions", "another size", "other sampling", "another entry"],
)
def test_answers_to_another_question_are_refused(changes: dict[str, Any]) -> None:
    tally = EvaluationTally(spec(), VERSION, lambda index: "{}")
    assert not tally.add_trajectory(Coordinates(partition=0, offset=0), answer(0, 0, **changes))
    assert tally.num_refused == 1


def test_records_of_training_and_of_other_evaluations_are_passed_over() -> None:
    tally = EvaluationTally(spec(), VERSION)
    where = Coordinates(partition=0, offset=0)
    other = evaluation_seq(VERSION, "another", 0)
    assert not tally.add_trajectory(where, trajectory(0, 0))
    assert not tally.add_trajectory(where, replace(answer(0, 0), seq=other))
    assert not tally.add_reward(where, reward(where, other, value=1.0))
    assert not tally.add_reward(where, judge(where, 0, 0, 1.0, name="brevity"))
    assert not tally.add_reward(where, replace(judge(where, 0, 0, None, outcome=RewardOutcome.STALE), seq=3))
    assert tally.num_refused == 0
    assert tally.unsettled() == [0, 1, 2]
