"""reasoning-gym by name: items of (seed, seq) that no other seed has, and its scorers behind a guard."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from echo_schemas.errors import UserError
from echo_tasks import procedural, reasoning_scorer
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.procedural import dataset_names, item, number_of
from echo_tasks.reasoning_scorer import EVALUATED, only_computes, reasoning_gym_score
from tests.unit.tasks.samples import sample


def judged(completion: str, entry: Any) -> float:
    return float(reasoning_gym_score(sample(completion, entry)).value)


@pytest.mark.parametrize("dataset", ["chain_sum", "number_sorting", "rearc", "sokoban", "pool_matrix", "countdown", "n_queens"])
def test_the_reference_answer_of_an_item_is_worth_everything_and_none_nothing_like_it(dataset: str) -> None:
    task = load_task("reasoning-gym", {"dataset": dataset})
    for seq in range(3):
        prompt = task.prompt(0, seq)
        entry = json.loads(json.dumps(prompt.entry))
        assert entry == prompt.entry, "the entry travels as JSON"
        assert entry["question"] in prompt.messages[0].content
        assert judged(f"Well. <answer>{entry['answer']}</answer>", entry) == 1.0
        assert judged("<answer>I do not know.</answer>", entry) < 0.5
        assert judged("", entry) < 0.5


def test_the_configuration_reaches_the_data_set_and_its_scorer() -> None:
    task = load_task("reasoning-gym", {"dataset": "chain_sum", "min_terms": 7, "max_terms": 7, "style": "text"})
    prompt = task.prompt(0, 0)
    assert len(prompt.entry["question"].split("+")) + prompt.entry["question"].count("-") >= 7
    assert prompt.entry["config"] == {"min_terms": 7, "max_terms": 7}
    assert prompt.text.startswith(prompt.entry["question"])


def test_no_two_seeds_share_an_item_and_no_two_seqs() -> None:
    numbers = [
        number_of("chain_sum", seed, seq, attempt)
        for seed, seq, attempt in itertools.product(range(-4, 5), [0, 1, 2**62, 2**63 - 1], range(3))
    ]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0
    questions = [item("chain_sum", {"min_digits": 8, "max_digits": 8}, seed, seq)["question"] for seed in (6, 7, 8) for seq in range(20)]
    assert len(set(questions)) == 60


def test_a_data_set_of_narrow_seeds_gets_them() -> None:
    assert {number_of("pool_matrix", seed, seq) < 2**32 for seed in (0, 9**30) for seq in range(50)} == {True}
    assert len({number_of("pool_matrix", 0, seq) for seq in range(1_000)}) == 1_000


def test_an_offset_is_another_seed() -> None:
    plain = load_task("reasoning-gym", {"dataset": "chain_sum"})
    shifted = load_task("reasoning-gym", {"dataset": "chain_sum", "seed_offset": 5})
    assert shifted.prompt(2, 3) == plain.prompt(7, 3) != plain.prompt(2, 3)


def test_a_number_of_which_no_item_can_be_made_is_replaced_and_in_the_end_the_configuration_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def refuses(_name: str, _config: Any, number: int) -> Any:
        asked.append(number)
        if len(asked) == 3:
            return [{"question": "q", "answer": "a", "metadata": {}}]
        raise ValueError("no puzzle")

    monkeypatch.setattr(procedural, "_made", refuses)
    assert item("chain_sum", {}, 1, 2)["question"] == "q"
    assert asked == [number_of("chain_sum", 1, 2, attempt) for attempt in range(3)]
    with pytest.raises(UserError, match=r"The data set 'chain_sum' makes no items with \{'min_terms': 2\}: ValueError: no puzzle"):
        item("chain_sum", {"min_terms": 2}, 0, 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, r"cannot be made with the options \[\].*dataset"),
        ({"dataset": "knight_knaves"}, r"no data set 'knight_knaves' .*Did you mean 'knights_knaves'"),
        ({"dataset": "composite"}, r"no data set 'composite' that can be asked for by name"),
        ({"dataset": "chain_sum", "min_term": 3}, r"The data set 'chain_sum' has no field 'min_term'.*Did you mean 'min_terms'"),
        ({"dataset": "chain_sum", "seed": 3}, r"has no field 'seed'"),
        ({"dataset": "chain_sum", "size": 3}, r"has no field 'size'"),
        ({"dataset": "chain_sum", "min_terms": 9, "max_terms": 3}, r"The data set 'chain_sum' refuses .*: AssertionError"),
        ({"dataset": "chain_sum", "style": "x"}, r"style = 'x' is none of its values"),
    ],
)
def test_options_that_make_no_task(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task("reasoning-gym", options)


def test_knights_and_knaves_may_be_scored_by_the_data_set_too() -> None:
    entry = load_task("knights-knaves").prompt(0, 0).entry
    assert judged(f"<answer>{entry['answer']}</answer>", entry) == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "x**2/2 + C",
        "log(x) - 3.5*sin(2*x) + exp(-x) + sqrt(x)",
        "(1 + 2) * 3 - 4",
        "[[0, 1], [1, 0]]",
        '["A", "B"]',
        "_ Q _ _\nQ _ _ _",
        "9**9**9",
    ],
)
def test_what_computes_is_handed_on(answer: str) -> None:
    assert only_computes(answer)


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')",
        "exec('1')",
        "eval ('1')",
        "eval\\\n('1')",
        "(eval)('1')",
        "[eval][0]('1')",
        "(eval #\n)('1')",
        "x.func(1)",
        "''.join(['a'])",
        "(lambda: 1)",
        "[x for x in '1']",
        "1 if 2 else 3",
        "ｅｖａｌ('1')",
        "{}",
        "f'{exec}'",
        "open\n('x')",
        "print(1)",
        "x := 1",
    ],
)
def test_what_could_do_more_is_not(answer: str) -> None:
    assert not only_computes(answer)


def test_the_guarded_scorers_are_those_that_evaluate_answers() -> None:
    """By their sources: a new release may bring more of them."""
    from reasoning_gym.factory import DATASETS

    evaluating = set()
    for name in dataset_names():
        source = Path(str(sys.modules[DATASETS[name][0].__module__].__file__)).read_text(encoding="utf-8")
        if any(call in source for call in ("eval(answer", "parse_expr(answer", "sympify(answer", "exec(answer")):
            evaluating.add(name)
    assert evaluating == EVALUATED


# The signal that ends it may be heard in a callback of the garbage collector, which loses what it raises; the next one is not lost.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_hostile_answers_cost_their_bound_and_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_task("reasoning-gym", {"dataset": "countdown"}).prompt(0, 0).entry
    victim = tmp_path / "victim"
    for answer in (f"open('{victim}', 'w')", f"__import__('pathlib').Path('{victim}').touch()", "9" * 100_000):
        found = reasoning_gym_score(sample(f"<answer>{answer}</answer>", entry))
        assert (found.value, found.components) == (0.0, {"refused": 1.0, "ended": 0.0})
    assert not victim.exists()
    monkeypatch.setattr(reasoning_scorer, "CPU_S", 0.2)
    assert judged("<answer>9**9**9**9</answer>", entry) <= 0.05
    assert judged(f"<answer>{entry['answer']}</answer>", entry) == 1.0


def test_a_scorer_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(*_: object) -> float:
        while True:
            pass

    monkeypatch.setattr(reasoning_scorer, "CPU_S", 0.05)
    monkeypatch.setattr(reasoning_scorer, "score", endless)
    found = reasoning_gym_score(sample("1", {"dataset": "chain_sum", "config": {}}))
    assert (found.value, found.components["ended"]) == (0.0, 1.0)


def test_it_runs_where_it_can_be_ended_and_an_end_is_a_wrong_answer() -> None:
    found = load_reward("reasoning-gym")
    assert (found.isolated, found.at_timeout) == (True, 0.0)
