"""The files of `echoswarm reward new`: a reward and its test, which run as they are."""

from __future__ import annotations

from keyword import iskeyword
from pathlib import Path

from echo_schemas.errors import UserError

_REWARD = '''"""Rewards of this run."""

from echo_tasks.rewards import ScoredSample, reward


@reward(name="{name}", version="1")
def {name}(sample: ScoredSample) -> float:
    """One for an empty answer, less the longer it is. Raise the version when a value changes its meaning."""
    return 1.0 / (1 + sample.num_generated)
'''
_TEST = '''"""What the rewards of this run say of samples that were made by hand."""

from pathlib import Path

import numpy as np

from echo_schemas.records import FinishReason
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import ScoredSample

{name} = load_reward(f"{{Path(__file__).with_name('{file}')}}:{name}")


def sample(completion: str, num_generated: int) -> ScoredSample:
    return ScoredSample(
        prompt="2 + 2 =",
        completion=completion,
        entry={{"answer": "4"}},
        token_ids=np.zeros(num_generated, np.int32),
        num_generated=num_generated,
        turn_rewards=(),
        finish_reason=FinishReason.STOP,
        metadata={{}},
        task="sums",
    )


def test_a_shorter_answer_is_worth_more() -> None:
    assert {name}(sample("4", 1)) > {name}(sample("it is 4", 3))
'''


def write_template(path: str) -> tuple[Path, Path]:
    """Write a reward (`my_rewards.py:brevity`) and its test beside it; both paths. Raises UserError for a bad name or an existing file."""
    where, _, name = path.partition(":")
    file = Path(where)
    name = name or "brevity"
    if file.suffix != ".py" or not all(each.isidentifier() and not iskeyword(each) for each in (file.stem, name)):
        raise UserError(f"{path!r} names no function in a Python file.", hint="Write for example my_rewards.py:brevity.")
    test = file.with_name(f"test_{file.name}")
    for each in (file, test):
        if each.exists():
            raise UserError(f"{each} is there already.", hint="Name another file, or write the function into that one.")
    file.write_text(_REWARD.format(name=name), encoding="utf-8")
    test.write_text(_TEST.format(name=name, file=file.name), encoding="utf-8")
    return file, test
