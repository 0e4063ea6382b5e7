"""The demo tasks: prompts without end, the same on every machine, and answers that the checker agrees with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_schemas.records import FinishReason
from echo_tasks.digits import NUM_DIGITS, ReverseDigits, SortDigits
from echo_tasks.rewards import RewardKind, RewardResult, ScoredSample, exact, reward, sample_of, turn_return
from echo_tasks.task import ALL_TOKENS, Prompt
from tests.unit.core.records import trajectory

SAMPLE = ScoredSample(
    prompt="416205>",
    completion="502614",
    entry={"answer": "502614"},
    token_ids=np.array([6, 3, 8], np.int32),
    num_generated=1,
    turn_rewards=(),
    finish_reason=FinishReason.STOP,
    metadata={},
    task="reverse-digits",
)


@pytest.mark.parametrize("task", [ReverseDigits(), SortDigits()], ids=lambda task: task.name)
@given(seed=st.integers(0, 2**63), seq=st.integers(0, 2**62))
def test_a_prompt_is_a_pure_function_of_seed_and_seq(task: ReverseDigits, seed: int, seq: int) -> None:
    prompt = task.prompt(seed, seq)
    assert type(task)().prompt(seed, seq) == prompt
    assert prompt.text[:-1].isdigit()
    assert len(prompt.text) == NUM_DIGITS + 1
    assert prompt.text.endswith(">")
    assert not prompt.messages
    assert exact(replace(SAMPLE, completion=task.answer(prompt.text[:-1]), entry=prompt.entry)) == 1.0


def test_prompts_are_those_that_were_published() -> None:
    """Pinned: a run that is resumed or replayed by another release must ask the same."""
    assert [ReverseDigits().prompt(0, seq).text for seq in range(3)] == ["264222>", "101641>", "502131>"]
    assert [SortDigits().prompt(7, seq).text for seq in range(3)] == ["714022>", "591486>", "495975>"]


def test_seed_seq_and_task_each_make_another_prompt() -> None:
    texts = [task.prompt(seed, seq).text for task in (ReverseDigits(), SortDigits()) for seed in range(5) for seq in range(40)]
    assert len(set(texts)) > 390  # of 400 draws from a million


def test_answers() -> None:
    assert ReverseDigits().answer("416205") == "502614"
    assert SortDigits().answer("416205") == "012456"


@pytest.mark.parametrize(
    ("completion", "value"), [("502614", 1.0), (" 502614\n", 1.0), ("5026140", 0.0), ("50261", 0.0), ("", 0.0), ("502 614", 0.0)]
)
def test_exact_is_one_only_for_the_answer(completion: str, value: float) -> None:
    assert exact(replace(SAMPLE, completion=completion)) == value


def test_exact_compares_answers_that_are_no_text() -> None:
    assert exact(replace(SAMPLE, completion="7", entry={"answer": 7})) == 1.0


def test_return_adds_up_the_turns() -> None:
    assert turn_return(SAMPLE) == 0.0
    assert turn_return(replace(SAMPLE, turn_rewards=(0.5, -1.0, 2.0))) == 1.5


def test_a_single_turn_task_has_no_environment_and_trains_every_token() -> None:
    task = SortDigits()
    assert task.environment({}) is None
    assert task.signals(trajectory()) is ALL_TOKENS
    assert ALL_TOKENS.mask is None
    assert ALL_TOKENS.weights is None


@pytest.mark.parametrize("fields", [{}, {"text": "a", "messages": ("b",)}])
def test_a_prompt_has_messages_or_text(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either messages or text"):
        Prompt(**fields)  # type: ignore[arg-type]


def test_a_sample_is_what_the_record_holds() -> None:
    record = trajectory(prompt="12>", completion="21", entry='{"answer": "21"}', turn_rewards=(1.0,), metadata={"a": "b"})
    sample = sample_of(record)
    assert (sample.prompt, sample.completion, sample.entry) == ("12>", "21", {"answer": "21"})
    assert (sample.token_ids.tolist(), sample.num_generated, sample.turn_rewards) == ([1, 2, 3], 2, (1.0,))
    assert (sample.finish_reason, sample.metadata, sample.task) == (FinishReason.STOP, {"a": "b"}, "t")
    assert exact(sample) == 1.0


@pytest.mark.parametrize("entry", ["[1]", '"text"', "null"])
def test_an_entry_that_is_no_object_is_named(entry: str) -> None:
    with pytest.raises(ValueError, match=r"The entry is \w+, not an object"):
        sample_of(trajectory(entry=entry))


def test_the_decorator_keeps_the_function_callable_and_says_how_it_is_called() -> None:
    @reward(name="plain", version="3", timeout_s=0.5)
    def plain(sample: ScoredSample) -> RewardResult:
        return RewardResult(value=float(len(sample.completion)), components={"length": 6.0})

    @reward(name="awaited")
    async def awaited(sample: ScoredSample) -> float:
        return float(sample.num_generated)

    @reward(name="many", batch=True)
    def many(samples: list[ScoredSample]) -> list[float]:
        return [0.0] * len(samples)

    assert (plain.name, plain.version, plain.timeout_s, plain.kind) == ("plain", "3", 0.5, RewardKind.SYNC)
    assert plain(SAMPLE).value == 6.0
    assert plain.origin.startswith(f"{__name__}:")
    assert (awaited.kind, many.kind) == (RewardKind.ASYNC, RewardKind.BATCH)
    assert many([SAMPLE, SAMPLE]) == [0.0, 0.0]
