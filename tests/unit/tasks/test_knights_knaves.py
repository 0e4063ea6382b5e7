"""Knights and knaves: puzzles with one solution, the same everywhere, and a judge that takes no second best."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from echo_schemas.errors import UserError
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.knights_knaves import brief, knights_knaves
from tests.unit.tasks.samples import sample

ENTRY = {"roles": {"Emma": "saint", "Liam": "sinner"}, "terms": ["saint", "sinner"]}
BRIEF_ENTRY = {"roles": {"A": "+", "B": "-"}, "terms": ["+", "-"]}
OPERATIONS: Mapping[str, Callable[[list[bool]], bool]] = {
    "&": all,
    "|": any,
    ">": lambda parts: not parts[0] or parts[1],
    "=": lambda parts: parts[0] == parts[1],
}


def judged(completion: str, entry: Mapping[str, Any] = ENTRY) -> tuple[float, float]:
    """The value and the share of people."""
    result = knights_knaves(sample(completion, entry))
    return result.value, result.components["people"]


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>Emma is a saint, and Liam is a sinner.</answer>",
        "Emma is a saint, and Liam is a sinner.",
        "Suppose Emma is a sinner. No. <answer>emma is a SAINT and liam is a sinner</answer>",
        "<answer>Liam: sinner\nEmma: saint</answer>",
        "<answer>Liam is the sinner; Emma is not a sinner</answer>",
        "<answer>Emma is a saint. Emma is a saint. Liam is a sinner.</answer>",
    ],
)
def test_a_right_answer(completion: str) -> None:
    assert judged(completion) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "people"),
    [
        ("<answer>Emma is a sinner, and Liam is a saint.</answer>", 0.0),
        ("<answer>Emma is a saint.</answer>", 0.5),
        ("<answer>Emma is a saint, Liam is a saint.</answer>", 0.5),
        ("<answer>Emma and Liam are saints.</answer>", 0.5),
        ("<answer>Emma is a knight, and Liam is a knave.</answer>", 0.0),
        ("<answer>Emma is not a saint, and Liam is not a sinner.</answer>", 0.0),
        ("", 0.0),
        ("<answer></answer>", 0.0),
        ("Emma is a saint, and Liam is a sinner. <answer>I do not know.</answer>", 0.0),
    ],
)
def test_a_wrong_answer(completion: str, people: float) -> None:
    assert judged(completion) == (0.0, people)


@pytest.mark.parametrize(
    "completion",
    [
        "<answer>Emma is a saint, Emma is a sinner, Liam is a sinner, Liam is a saint</answer>",
        "<answer>Emma Liam saint sinner saint sinner</answer>",
        "<answer>" + "Emma is a saint, Liam is a sinner, " * 100_000 + "</answer>",
        "<answer>saint sinner saint sinner</answer>",
        "<answer>Emma/Liam is a saint/sinner</answer>",
        "Emma is a saint/sinner, and Liam is a saint/sinner",
    ],
)
def test_saying_everything_is_no_answer(completion: str) -> None:
    assert judged(completion)[0] == 0.0


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("A+B-", 1.0),
        ("<answer>A+ B-</answer>", 1.0),
        ("B-A+", 1.0),
        ("A+B+", 0.0),
        ("A+B-A-", 0.0),
        ("A+B-C+", 0.0),
        ("A+", 0.0),
        ("A+B-?", 0.0),
    ],
)
def test_a_brief_answer(completion: str, value: float) -> None:
    assert judged(completion, BRIEF_ENTRY)[0] == value


def truth(said: str, roles: Mapping[str, bool]) -> bool:
    """The value of one statement in symbols, by a parser of the test's own."""
    value, rest = _parsed(said, roles)
    assert not rest
    return value


def _parsed(said: str, roles: Mapping[str, bool]) -> tuple[bool, str]:
    if said[0] == "!":
        value, rest = _parsed(said[1:], roles)
        return not value, rest
    if said[0] != "(":
        return roles[said[0]] == (said[1] == "+"), said[2:]
    parts, operator, rest = [], "", said[1:]
    while True:
        value, rest = _parsed(rest, roles)
        parts.append(value)
        if rest[0] == ")":
            return OPERATIONS[operator](parts), rest[1:]
        operator, rest = rest[0], rest[1:]


@pytest.mark.parametrize("options", [{}, {"n_people": 3, "depth_constraint": 3, "width_constraint": 3}], ids=["2 people", "3 people"])
def test_a_brief_puzzle_has_one_solution_and_it_is_the_entrys(options: dict[str, int]) -> None:
    task = load_task("knights-knaves", {"style": "brief", **options})
    for seq in range(60):
        prompt = task.prompt(3, seq)
        statements = dict(part.split(":") for part in prompt.text.removesuffix("?").split(";"))
        solutions = [
            roles
            for roles in (dict(zip(statements, truths, strict=True)) for truths in itertools.product([True, False], repeat=len(statements)))
            if all(truth(said, roles) == roles[name] for name, said in statements.items())
        ]
        assert solutions == [{name: role == "+" for name, role in prompt.entry["roles"].items()}]
        answer = "".join(name + role for name, role in prompt.entry["roles"].items())
        assert judged(answer, prompt.entry) == (1.0, 1.0)


def test_what_is_said_in_symbols() -> None:
    lie, true = ["lying", 0], ["telling-truth", 1]
    assert brief([["and", lie, true, ["not", ["or", lie, true]]], ["not", lie]]) == "A:(A-&B+&!(A-|B+));B:A+?"


def test_a_puzzle_in_words_is_answered_by_its_own_solution() -> None:
    task = load_task("knights-knaves", {"n_people": 4})
    for seq in range(40):
        prompt = task.prompt(1, seq)
        assert all(name in prompt.messages[0].content for name in prompt.entry["roles"])
        assert judged(f"So: <answer>{prompt.entry['answer']}</answer>", prompt.entry) == (1.0, 1.0)
        others = {name: prompt.entry["terms"][role == prompt.entry["terms"][0]] for name, role in prompt.entry["roles"].items()}
        assert judged(", ".join(f"{name} is a {role}" for name, role in others.items()), prompt.entry) == (0.0, 0.0)


def test_prompts_are_those_that_were_published() -> None:
    """Pinned: a run that is resumed or replayed by another release must ask the same."""
    task = load_task("knights-knaves", {"style": "brief"})
    assert [task.prompt(0, seq).text for seq in range(3)] == ["A:(A+>B-);B:(B+=A+)?", "A:B+;B:(A+>B+)?", "A:(A+>B+);B:(B+|A-)?"]
    assert (
        json.loads(json.dumps(task.prompt(0, 0).entry)) == task.prompt(0, 0).entry == {"roles": {"A": "+", "B": "-"}, "terms": ["+", "-"]}
    )


def test_neither_neighbouring_seeds_nor_signs_share_puzzles() -> None:
    task = load_task("knights-knaves", {"n_people": 5, "depth_constraint": 3, "style": "brief"})
    texts = [task.prompt(seed, seq).text for seed in (-7, 6, 7, 8) for seq in range(5)]
    assert len(set(texts)) == len(texts)


def test_the_rewards_that_it_suggests_are_there() -> None:
    for style in ("chat", "brief"):
        task = load_task("knights-knaves", {"style": style})
        assert [load_reward(name).name for name in task.rewards] == list(task.rewards)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"n_people": 1}, r"n_people = 1 is no whole number from 2 to 26"),
        ({"depth_constraint": 1}, r"depth_constraint = 1 is no whole number of at least 2"),
        ({"width_constraint": 4}, r"width_constraint = 4 is no whole number from 2 to 3"),
        ({"style": "breif"}, r"style = 'breif' is none of its values.*Did you mean 'brief'"),
        ({"n_peple": 3}, r"cannot be made with the options \['n_peple'\].*Did you mean 'n_people'"),
        ({"zzz": 3}, r"There are: n_people, depth_constraint, width_constraint, style"),
    ],
)
def test_options_that_make_no_puzzle(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task("knights-knaves", options)
