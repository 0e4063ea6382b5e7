"""Each single-turn example from its file to its rewards: prompts, right, wrong and hostile answers, as processes on a real Kafka."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo_schemas.naming import Namespace
from echo_schemas.records import RewardOutcome
from tests.installed import missing
from tests.integration.tasks.example_run import WAIT_S, ExampleRun, in_tags, roles_in_words

_MISSING = missing("faust", "transformers", "reasoning_gym", "math_verify")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.timeout(WAIT_S + 600),
    pytest.mark.skipif(bool(_MISSING), reason=f"{_MISSING} are missing: install the extra 'all-cpu'"),
]
NUM_GROUPS = 3
RIGHT, WRONG, HOSTILE = range(3)


@dataclass(frozen=True)
class Case:
    """What is said to the prompts of one example. `hostile` is said to seq 0 alone, for it may cost a second; `wrong` to the others."""

    example: str
    right: Callable[[Any], str]
    wrong: str
    hostile: str
    formats: tuple[float, float, float] | None = (1.0, 0.0, 1.0)

    def answers(self, seq: int, entry: Any) -> list[str]:
        return [self.right(entry), self.wrong, self.hostile if seq == 0 else self.wrong]


CASES = [
    Case("knights-knaves", lambda entry: in_tags(roles_in_words(entry["roles"])), "Nobody knows.", in_tags("knight knave " * 50)),
    Case("countdown", lambda entry: in_tags(entry["answer"]), "1 + 1 = 3", in_tags("9**9**9**9")),
    Case("reasoning-gym", lambda entry: in_tags(entry["answer"]), "It is all the same.", in_tags("__import__('os').system('true')")),
    Case("math", lambda entry: f"So it is \\boxed{{{entry['answer']}}}.", "\\boxed{-1}", "\\boxed{9^{9^{9^{9}}}}", formats=None),
]


@pytest.fixture
def start(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Iterator[Callable[[Case], ExampleRun]]:
    """`start(case)`: its run, which is ended after the test."""
    made: list[ExampleRun] = []

    def begin(case: Case) -> ExampleRun:
        made.append(ExampleRun(case.example, kafka_bootstrap, namespace, tmp_path, case.answers))
        made[-1].start()
        return made[-1]

    yield begin
    for run in made:
        run.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.example)
def test_right_answers_are_rewarded_and_wrong_and_hostile_ones_are_not(case: Case, start: Callable[[Case], ExampleRun]) -> None:
    run = start(case)
    names = {case.example} | ({"answer-format"} if case.formats else set())
    scored = run.scored(NUM_GROUPS, names)
    for group in scored[case.example]:
        assert {reward.outcome for reward in group.values()} == {RewardOutcome.SCORED}
        assert [group[index].value for index in (RIGHT, WRONG, HOSTILE)] == [1.0, 0.0, 0.0]
    if case.formats:
        assert tuple(scored["answer-format"][0][index].value for index in (RIGHT, WRONG, HOSTILE)) == case.formats
    for sample in run.trajectories():
        assert sample.prompt.endswith("<|im_start|>assistant\n")
        assert sample.completion in case.answers(sample.seq, json.loads(sample.entry))
