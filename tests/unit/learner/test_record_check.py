"""What came is what was asked: records that differ are dead letters that name their worker, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.message import Message
from echo_learner.record_check import RecordCheck
from echo_schemas.columns import pack_logprobs, pack_tokens
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import (
    ChatMessage,
    LogprobSource,
    Purpose,
    Record,
    RolloutRequest,
    Sampling,
    Span,
    Trajectory,
    TrajectorySource,
    VersionSpan,
    group_id_of,
)
from echo_schemas.topics import REQUESTS_DEAD, TRAJECTORIES
from echo_settings import Settings
from echo_tasks.task import ALL_TOKENS, Entry, Prompt, Signals
from tests.unit.core.records import GROUP_SIZE
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUPS_PER_STEP, AnyTask, NumberCodec, Pipeline, fill, sample

SETTINGS: dict[str, Any] = {"rollout": {"group_size": GROUP_SIZE, "probe_size": GROUP_SIZE}, "learner": {"groups_per_step": 2}}
OFFLINE = {"source": TrajectorySource.OFFLINE, "logprob_source": LogprobSource.RECOMPUTED}


def check_of(task: Any = None, codec: Any = None, *, num_issued: int = 8, **sections: Any) -> RecordCheck:
    """The check of a run whose groups have two members."""
    settings = Settings.model_validate({**SETTINGS, **sections})
    return RecordCheck(settings, task or AnyTask(), codec or NumberCodec(), lambda seq: seq < num_issued)


def refusal(check: RecordCheck, record: Record) -> str | None:
    """What the check says; None if it lets the record through."""
    topic = TRAJECTORIES if isinstance(record, Trajectory) else REQUESTS_DEAD
    message = Message(topic, 0, 0, None, record, {}, 0, 0)
    try:
        check(message)
    except InvalidRecord as invalid:
        return invalid.message if invalid.reason is InvalidReason.NOT_ASKED else "another reason"
    return None


def test_what_was_asked_passes() -> None:
    for purpose in (Purpose.TRAIN, Purpose.PROBE):
        assert refusal(check_of(), sample(3, 1, purpose=purpose)) is None
    assert refusal(check_of(), sample(10**12, 0, purpose=Purpose.EVAL, group_size=5)) is None, "an evaluation looks for itself"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"group_size": 1}, "a group of 1 in place of 2"),
        ({"purpose": Purpose.PROBE, "group_size": 8}, "a group of 8 in place of 2"),
        ({"task": "other"}, "the task 'other' in place of 't'"),
        ({"entry": '{"answer": "1"}'}, "another entry of seq 3"),
        ({"sampling": Sampling(max_new_tokens=8, temperature=0.1)}, "temperature=0.1"),
        ({"sampling": Sampling(max_new_tokens=9)}, "max_new_tokens=9"),
        ({"prompt": "an easier one"}, "another prompt of seq 3"),
        ({"token_ids": pack_tokens([4, 1, 2])}, "another prompt of seq 3"),
        ({"generated": (Span(start=2, end=3),), "logprobs": pack_logprobs([-0.5])}, "another prompt of seq 3"),
        ({"generated": (Span(start=1, end=2),), "logprobs": pack_logprobs([-0.5])}, "another prompt of seq 3"),
        (
            {
                "token_ids": pack_tokens([3, *range(9)]),
                "generated": (Span(start=1, end=10),),
                "version_spans": (VersionSpan(start=1, end=10, version=0),),
                "logprobs": pack_logprobs([-0.5] * 9),
            },
            "9 generated tokens, above 8",
        ),
        ({"logprob_source": LogprobSource.RECOMPUTED}, "no log-probabilities"),
        (OFFLINE, "[offline] episodes names no file"),
    ],
)
def test_what_differs_is_refused_with_the_worker_s_name(changes: dict[str, Any], said: str) -> None:
    found = refusal(check_of(), sample(3, 0, worker_id="liar", **changes))
    assert found is not None
    assert found.startswith("Worker 'liar' sent what no request asked for: ")
    assert said in found


def test_what_the_file_allows_passes() -> None:
    recomputing = check_of(rollout={**SETTINGS["rollout"], "missing_logprobs": "recompute"})
    assert refusal(recomputing, sample(3, 0, logprob_source=LogprobSource.RECOMPUTED)) is None
    offline = check_of(offline={"episodes": "hands.jsonl"}, task=AnyTask())
    episode = sample(3, 0, **OFFLINE, task="reverse-digits", group_size=7, prompt="any", sampling=Sampling(max_new_tokens=99))
    assert refusal(offline, episode) is None
    assert refusal(offline, replace(episode, task="other")) is not None
    assert refusal(offline, replace(episode, group_size=1)) is not None, "it has nothing to be compared with"


def test_an_answer_above_the_limit_of_a_turn_is_refused() -> None:
    limited = check_of(rollout={**SETTINGS["rollout"], "max_turn_tokens": 1})
    assert "more than 1 tokens in one turn" in str(refusal(limited, sample(3, 0)))
    assert refusal(check_of(rollout={**SETTINGS["rollout"], "max_turn_tokens": 2}), sample(3, 0)) is None


def test_without_log_probabilities_nothing_of_cut_sampling_is_trained() -> None:
    cutting = check_of(rollout={**SETTINGS["rollout"], "top_p": 0.9, "missing_logprobs": "recompute"})
    sampling = Sampling(max_new_tokens=8, top_p=0.9)
    assert refusal(cutting, sample(3, 0, sampling=sampling)) is None
    found = refusal(cutting, sample(3, 0, sampling=sampling, logprob_source=LogprobSource.RECOMPUTED))
    assert "with [rollout] top_p, top_k or min_p only the sampler knows them" in str(found)


def test_a_seq_that_was_never_issued_does_not_exist() -> None:
    check = check_of(num_issued=4)
    assert refusal(check, sample(3, 0)) is None
    assert "seq 4, which was never issued" in str(refusal(check, sample(4, 0)))
    assert "seq 1099511627776, which was never issued" in str(refusal(check, sample(2**40, 0)))
    assert refusal(check, dead_request(3)) is None
    assert "A dead request" in str(refusal(check, dead_request(2**40)))
    assert refusal(check, sample(2**40, 0, purpose=Purpose.PROBE)) is None, "a probe's seq is a version"


def test_a_task_that_has_no_prompt_of_a_seq_ends_nothing() -> None:
    class Short(AnyTask):
        def prompt(self, seed: int, seq: int) -> Prompt:
            return Prompt(text=("1", "2")[seq])

    assert "The task has no prompt of seq 3: IndexError" in str(refusal(check_of(Short()), sample(3, 0)))


def dead_request(seq: int) -> RolloutRequest:
    """A request that no worker takes."""
    return RolloutRequest(
        run_id="demo",
        group_id=group_id_of("demo", seq),
        seq=seq,
        purpose=Purpose.TRAIN,
        task="t",
        prompt_token_ids=pack_tokens([1]),
        group_size=GROUP_SIZE,
        sampling=Sampling(max_new_tokens=1),
        required_version=0,
        learner_version=0,
        issued_ms=0,
    )


# Prompts of chats, with and without an environment's first observation


class Characters:
    """A token for each character; a template in angle brackets."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.array([ord(letter) for letter in text], np.int32)

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        return "".join(chr(token) for token in token_ids)

    def render(self, messages: Sequence[ChatMessage]) -> str:
        return "".join(f"<{message.role}>{message.content.strip()}</>" for message in messages) + "<assistant>"

    def render_reply(self, content: str) -> str:
        raise NotImplementedError


class Talk(AnyTask):
    """One question, in a chat."""

    def prompt(self, seed: int, seq: int) -> Prompt:
        return Prompt(messages=(ChatMessage(role="user", content=f"Question {seed + seq}"),))


class Game:
    """An environment that shows something after the rules."""

    name = "t"
    rewards = ("return",)

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat

    def prompt(self, seed: int, seq: int) -> Prompt:
        del seed
        text = f"Rules {seq}"
        return Prompt(messages=(ChatMessage(role="user", content=text),)) if self._is_chat else Prompt(text=text)

    def environment(self, entry: Entry) -> None:
        raise AssertionError("an environment is the workers' business")

    def signals(self, trajectory: Trajectory) -> Signals:
        return ALL_TOKENS


def said(prompt: str, *, shown: str = "", tokens: str | None = None) -> Trajectory:
    """Sample of seq 3: the prompt, what is shown after it, and an answer of two tokens."""
    before = [ord(letter) for letter in (prompt if tokens is None else tokens) + shown]
    start, end = len(before), len(before) + 2
    return sample(
        3,
        0,
        prompt=prompt,
        token_ids=pack_tokens([*before, 65, 66]),
        generated=(Span(start=start, end=end),),
        version_spans=(VersionSpan(start=start, end=end, version=0),),
    )


def test_a_chat_is_compared_as_its_template_renders_it() -> None:
    check = check_of(Talk(), Characters())
    asked = "<user>Question 3</><assistant>"
    assert refusal(check, said(asked)) is None
    assert refusal(check, said(asked, shown="hint")) is not None, "a single turn has nothing between question and answer"
    assert refusal(check, said("<user>Question 4</><assistant>")) is not None
    assert refusal(check, said(asked, tokens="<user>Question 4</><assistant>")) is not None


def test_an_environment_may_show_something_after_the_prompt() -> None:
    text, chat = check_of(Game(is_chat=False), Characters()), check_of(Game(is_chat=True), Characters())
    assert refusal(text, said("Rules 3", shown="the board")) is None
    assert refusal(text, said("Rules 4", shown="the board")) is not None
    assert refusal(text, said("Rules 3", tokens="Other 3", shown="the board")) is not None
    assert refusal(chat, said("<user>Rules 3</><assistant>")) is None
    assert refusal(chat, said("<user>Rules 3\n\nthe board</><assistant>")) is None
    assert refusal(chat, said("<user>Rules 3\n\nthe board</><assistant>", tokens="<user>Cheat</><assistant>")) is not None
    assert refusal(chat, said("<user>Rules 3, or do as you like</><assistant>")) is not None


# In a learner


def test_a_group_of_one_does_not_beat_the_honest_group(pipeline: Pipeline) -> None:
    (forged,) = pipeline.write(TRAJECTORIES, sample(0, 0, group_size=1, worker_id="liar", attempt="short"))
    pipeline.write_reward(sample(0, 0, attempt="short"), forged, 1.0)
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    (report,) = pipeline.reports()
    assert report.batch is not None
    assert report.batch.num_samples == GROUPS_PER_STEP * GROUP_SIZE
    assert len(pipeline.dead_letters(TRAJECTORIES)) == 1
    assert pipeline.accounts().open == {forged}, "the dead letter is its only account"


@pytest.mark.parametrize("admission", ["pace", "free"])
def test_forged_seqs_become_no_groups_and_leave_nothing_behind(pipeline: Pipeline, admission: str) -> None:
    """Under pace the bound follows from what is closed, otherwise from how many requests were written."""
    far = 10**9
    for seq in range(far, far + 5):
        pipeline.write_group(seq, worker_id="liar")
    places = [*pipeline.write_group(0), *pipeline.write_group(1)]
    pipeline.train(NumpyTrainer(), steps=1, staleness={"budget": 1, "publication_period": 1, "admission": admission})
    assert set(pipeline.accounts().trained) == set(places)
    assert not pipeline.drops()
    assert len(pipeline.dead_letters(TRAJECTORIES)) == 5 * GROUP_SIZE
    (newest,) = [state for state in map(pipeline.store.load, pipeline.store.ids()) if state.version == 1]
    assert (newest.assembly.floor, newest.assembly.closed) == (2, frozenset())


def test_under_pace_the_seqs_that_may_be_open_follow_those_that_are_closed(pipeline: Pipeline) -> None:
    limit = (1 + 1 + 2) * GROUPS_PER_STEP
    sections: dict[str, Any] = {"staleness": {"budget": 1, "publication_period": 1, "admission": "pace"}}
    fill(pipeline, limit // GROUPS_PER_STEP)
    beyond = pipeline.write_group(limit)
    pipeline.train(NumpyTrainer(), steps=1, **sections)
    assert len(pipeline.dead_letters(TRAJECTORIES)) == GROUP_SIZE
    again = pipeline.write_group(limit, attempt="in time", version=1)
    pipeline.train(NumpyTrainer(), steps=2, takeover=True, **sections)
    assert set(beyond) | set(again) <= pipeline.accounts().open
    (newest,) = [state for state in map(pipeline.store.load, pipeline.store.ids()) if state.version == 2]
    assert limit in newest.assembly.open, "its time has come"
