"""Knights and knaves: who always tells the truth and who always lies, from what they say about one another. Puzzles by reasoning-gym.

chat, text   Emma said that Liam is a knave. … So who is a knight and who is a knave?
             <answer>Emma is a knight, and Liam is a knave</answer>
brief        A:(A+>B-);B:(B+=A+)?
             A+B-

Every puzzle has one solution. The brief form is for models that know no language, such as the demo's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from echo_schemas.libraries import TASKS, require_libraries
from echo_tasks.answers import Form, Style, asked, final_answer
from echo_tasks.options import one_of, whole_number
from echo_tasks.rewards import RewardResult, ScoredSample, reward
from echo_tasks.task import Prompt, SingleTurn

DATASET = "knights_knaves"
KNIGHT, KNAVE = "+", "-"
_TRUE, _LIES = "telling-truth", "lying"
_OPERATORS = {"and": "&", "or": "|", "->": ">", "<=>": "="}
# An answer names each person once; longer text is no answer.
_MAX_LENGTH = 4_000
_BRIEF_ANSWER = re.compile(r"(?:[A-Z][+-])+")


class KnightsKnaves(SingleTurn):
    """`n_people` people, each of whom says one thing, of `depth_constraint` nested operators with `width_constraint` parts at most."""

    name = "knights-knaves"
    rewards: Sequence[str] = ("knights-knaves", "answer-format")

    def __init__(self, n_people: int = 2, depth_constraint: int = 2, width_constraint: int = 2, style: str = "chat") -> None:
        """Raises UserError for numbers that no puzzle is made of, an unknown style, or if reasoning-gym is not installed."""
        require_libraries(f"The task {self.name!r}", "reasoning_gym", install=TASKS)
        self._form = one_of("style", style, Form)
        people = whole_number("n_people", n_people, least=2, most=len(ascii_uppercase))
        self._config = {
            "n_people": people,
            "depth_constraint": whole_number("depth_constraint", depth_constraint, least=2),
            # There are no more different statements about so many people; the search for one would not end.
            "width_constraint": whole_number("width_constraint", width_constraint, least=2, most=2 * people - 1),
        }
        if self._form is Form.BRIEF:
            self.rewards = ("knights-knaves",)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The puzzle of (seed, seq); the entry holds each person's role in `roles`, and the two role names as `terms`."""
        from echo_tasks.procedural import item

        made = item(DATASET, self._config, seed, seq)
        known = made["metadata"]
        if self._form is Form.BRIEF:
            roles = dict(zip(ascii_uppercase, (KNIGHT if truthful else KNAVE for truthful in known["solution"]), strict=False))
            return Prompt(text=brief(known["statements"]), entry={"roles": roles, "terms": [KNIGHT, KNAVE]})
        terms = [known["knight_knave_terms"][term] for term in ("knight", "knave")]
        roles = {name: terms[0] if truthful else terms[1] for name, truthful in zip(known["names"], known["solution"], strict=True)}
        entry = {"dataset": DATASET, "config": {}, "answer": made["answer"], "metadata": {}, "roles": roles, "terms": terms}
        return asked(made["question"], entry, Style(self._form))


def brief(statements: Sequence[Any]) -> str:
    """Each person's statement in symbols: `B-` B is a knave, `!` not, `&` and, `|` or, `>` if … then, `=` if and only if; closed by `?`."""
    return ";".join(f"{name}:{_symbols(said)}" for name, said in zip(ascii_uppercase, statements, strict=False)) + "?"


def _symbols(said: Sequence[Any]) -> str:
    kind, *parts = said
    if kind in {_TRUE, _LIES}:
        return ascii_uppercase[parts[0]] + (KNIGHT if kind == _TRUE else KNAVE)
    if kind == "not":
        inner, *operands = parts[0]
        if inner in {_TRUE, _LIES}:
            return _symbols([_LIES if inner == _TRUE else _TRUE, *operands])
        return "!" + _symbols(parts[0])
    return "(" + _OPERATORS[kind].join(_symbols(part) for part in parts) + ")"


def read_roles(answer: str, roles: Mapping[str, str], terms: Sequence[str]) -> dict[str, set[str]]:
    """The roles that `answer` gives the people in `roles`: `Emma is a knight`, `Emma: knight`, `Emma and Liam are knights`, `Emma is not a
    knave`. Empty for an answer that is too long, and for a brief one of another form.
    """
    found: dict[str, set[str]] = {}
    if len(answer) > _MAX_LENGTH:
        return found
    if terms[0] == KNIGHT:
        compact = re.sub(r"\s", "", answer)
        if _BRIEF_ANSWER.fullmatch(compact):
            for name, role in zip(compact[::2], compact[1::2], strict=True):
                found.setdefault(name, set()).add(role)
        return found
    by_word = {name.lower(): name for name in roles}
    knight, knave = (term.lower() for term in terms)
    meant = {knight: terms[0], knave: terms[1], knight + "s": terms[0], knave + "s": terms[1]}
    other = {terms[0]: terms[1], terms[1]: terms[0]}
    subjects: list[str] = []
    is_complete = is_denied = False
    for word in re.findall(r"[a-z]+", answer.lower()):
        if word in by_word:
            if is_complete:
                subjects, is_complete = [], False
            subjects.append(by_word[word])
        elif word == "not":
            is_denied = True
        elif word in meant:
            role = other[meant[word]] if is_denied else meant[word]
            for name in subjects:
                found.setdefault(name, set()).add(role)
            is_complete, is_denied = True, False
    return found


@reward(name="knights-knaves")
def knights_knaves(sample: ScoredSample) -> RewardResult:
    """1 if the final answer gives every person their role and no other, else 0. The component `people` is the share that is right."""
    roles: Mapping[str, str] = sample.entry["roles"]
    found = read_roles(final_answer(sample.completion), roles, sample.entry["terms"])
    right = sum(found.get(name) == {role} for name, role in roles.items())
    is_right = right == len(roles) and found.keys() <= roles.keys()
    return RewardResult(value=float(is_right), components={"people": right / len(roles)})
