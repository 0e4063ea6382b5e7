"""Later turns of a conversation, with real chat templates and a tokenizer that merges: what was said keeps its tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_bus.clock import Deadline
from echo_rollout.engines.engine import Generation
from echo_rollout.generation import EmptyGeneration, EnvironmentFailed, GroupPrompt, GroupSampler, Sample
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import ChatMessage, FinishReason, Sampling, VersionSpan
from echo_tasks.catalogue import load_task
from echo_tasks.prompts import PromptCodec
from echo_tasks.task import Observation, Prompt, SingleTurn, Turn
from tests.integration.tasks.chat_model import CHATML, VOCABULARY, write_tokenizer

pytest.importorskip("transformers", reason="chat templates are rendered by transformers: install the extra 'rollout-cpu'")

# Llama 3's: its markers are others, and it trims.
LLAMA = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Qwen3 cuts the thoughts out of every answer but the last: rendered anew, the conversation would be another one.
QWEN3 = CHATML.replace("m.content +", "(m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content) +")
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '[' + m.role + ']' + m.content + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
LAST_ONLY = "{{ '<|im_start|>' + messages[-1].content }}"


class Replies:
    """An engine that says `answers` in turn, as the given tokens; it remembers what it was asked with."""

    def __init__(self, answers: Sequence[tuple[Sequence[int], str]]) -> None:
        self._answers = list(answers)
        self.asked: list[list[int]] = []

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        assert n == 1
        self.asked.append(list(prompt))
        tokens, text = self._answers.pop(0)
        ids = np.array(tokens[: sampling.max_new_tokens], np.int32)
        version = len(self.asked)
        return [
            Generation(
                token_ids=ids,
                logprobs=np.full(len(ids), -float(version), np.float32),
                version_spans=(VersionSpan(start=0, end=len(ids), version=version),),
                weights_sha256="ab",
                finish_reason=FinishReason.STOP,
                text=text,
            )
        ]


class Board:
    """`first` is seen before the first move, `board after …` after each; the third move ends it."""

    def __init__(self, first: str = "") -> None:
        self.first = first
        self.actions: list[str] = []
        self.closed = threading.Event()

    def reset(self) -> Observation:
        return Observation(text=self.first)

    def step(self, action: str) -> Turn:
        self.actions.append(action)
        if action == "break":
            raise ValueError("the board broke")
        return Turn(observation=f"board after {action}", reward=1.0, done=len(self.actions) == 3)

    def close(self) -> None:
        self.closed.set()


class Boards(SingleTurn):
    """The one board."""

    name = "boards"
    rewards: Sequence[str] = ("return",)

    def __init__(self, board: Any) -> None:
        self.board = board

    def prompt(self, seed: int, seq: int) -> Prompt:
        return Prompt(text="?")

    def environment(self, entry: Any) -> Any:
        return self.board


def played(
    codec: PromptCodec,
    engine: Any,
    board: Any,
    *,
    content: str = "the board",
    max_length: int = 2_000,
    max_new: int = 500,
    max_turn: int | None = None,
) -> Sample:
    """One episode of a conversation that begins with `content`."""
    messages = (ChatMessage(role="user", content=content),)
    prompt = GroupPrompt(
        token_ids=codec.encode(codec.render(messages)),
        entry={},
        sampling=Sampling(max_new_tokens=max_new),
        group_size=1,
        max_length=max_length,
        messages=messages,
    )
    sampler = GroupSampler(engine, Boards(board), codec, vocabulary=VOCABULARY, on_empty=lambda: None, max_turn_tokens=max_turn)
    try:
        (sample,) = asyncio.run(sampler.sample(prompt))
    finally:
        sampler.close()
    return sample


def spelled(codec: PromptCodec, text: str) -> list[int]:
    """A letter a token: what a policy may sample, and no tokenizer would make of the text."""
    return [int(codec.encode(letter)[0]) for letter in text]


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (QWEN3, "<|im_end|>"), (STRICT, "<|im_end|>")]
)
def test_the_conversation_reads_as_the_template_writes_it_and_keeps_its_tokens(template: str, end: str, tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, template))
    said = ["the answer", "another", "last"]
    (marker,) = codec.encode(end).tolist()
    answers = [([*spelled(codec, text), marker], text) for text in said]
    assert answers[0][0][:-1] != codec.encode(said[0]).tolist(), "the tokenizer would merge what the policy spelled"
    engine, board = Replies(answers), Board()
    sample = played(codec, engine, board)
    # Every answer stands as it was sampled, and the engine continued exactly what the record holds.
    for span, (tokens, _), asked in zip(sample.generated, answers, engine.asked, strict=True):
        assert sample.token_ids[span.start : span.end].tolist() == tokens
        assert sample.token_ids[: span.start].tolist() == asked
    assert sample.logprobs.tolist() == [-float(turn + 1) for turn, (tokens, _) in enumerate(answers) for _ in tokens]
    assert [(span.start, span.end) for span in sample.version_spans] == [(span.start, span.end) for span in sample.generated]
    # What the policy saw is what the template says of the conversation, up to its last answer.
    messages = [ChatMessage(role="user", content="the board")]
    for text in said[:-1]:
        messages += [ChatMessage(role="assistant", content=text), ChatMessage(role="user", content=f"board after {text}")]
    assert codec.decode(engine.asked[-1]) == codec.render(messages)
    assert board.actions == said
    assert sample.prompt is None
    assert sample.completion.startswith("the answer" + end)
    assert sample.completion.endswith("last")
    assert board.closed.wait(60), "waited for the environment to be closed"


def test_a_turn_that_was_cut_short_is_closed_by_the_template_untrained(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, CHATML))
    (marker,) = codec.encode("<|im_end|>").tolist()
    engine = Replies([(spelled(codec, text), text) for text in ("cut", "cut", "end")])
    sample = played(codec, engine, Board())
    for span in sample.generated[:-1]:
        assert sample.token_ids[span.end] == marker
    assert int((sample.token_ids == marker).sum()) == 5, "two turns of the user and the prompt's, and two that the template closed"
    assert len(sample.logprobs) == len("cut") * 2 + len("end")


def test_a_policy_that_never_stops_plays_every_round_where_a_turn_is_limited(tmp_path: Path) -> None:
    """Four rounds of Sokoban and forty tokens: ten a round, or all of them in the first."""
    codec, task = PromptCodec(write_tokenizer(tmp_path, CHATML)), load_task("sokoban", {"rounds": 4})
    rambling = [(spelled(codec, "a" * 50), "<answer>Up</answer>")] * 4
    limited, unlimited = (
        played(codec, Replies(rambling), task.environment(task.prompt(0, 0).entry), max_new=40, max_turn=most) for most in (10, None)
    )
    assert [span.end - span.start for span in limited.generated] == [10, 10, 10, 10]
    assert (len(limited.turn_rewards), limited.finish_reason) == (4, FinishReason.ENVIRONMENT)
    assert [span.end - span.start for span in unlimited.generated] == [40]
    assert (len(unlimited.turn_rewards), unlimited.finish_reason) == (1, FinishReason.LENGTH)


def test_thoughts_stay_where_a_template_rendered_anew_would_cut_them(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, QWEN3))
    thought = "<think>\nthe board\n</think>\n\nup"
    engine = Replies([([*codec.encode(thought).tolist(), *codec.encode("<|im_end|>").tolist()], thought)] * 3)
    played(codec, engine, Board())
    assert codec.decode(engine.asked[-1]).count("assistant\n<think>") == 2


def test_a_first_observation_is_part_of_what_the_user_says(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, STRICT))
    engine = Replies([(spelled(codec, text), text) for text in "abc"])
    sample = played(codec, engine, Board("it is your move"))
    assert sample.prompt == "[user]the board\n\nit is your move<|im_end|>[assistant]"
    assert codec.decode(engine.asked[0]) == sample.prompt
    assert sample.generated[0].start == len(codec.encode(sample.prompt))
    assert sample.completion.startswith("a<|im_end|>[user]board after a")


def test_a_first_observation_without_room_for_an_answer_costs_the_group(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, CHATML))
    board = Board("board " * 100)
    with pytest.raises(EmptyGeneration, match="leaves no room"):
        played(codec, Replies([]), board, max_length=60, max_new=20)
    assert board.closed.wait(60), "waited for the environment to be closed"


def test_an_environment_that_raises_is_closed(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, CHATML))
    board = Board()
    with pytest.raises(EnvironmentFailed, match="ValueError: the board broke"):
        played(codec, Replies([(spelled(codec, "break"), "break")]), board)
    assert board.closed.wait(60), "waited for the environment to be closed"


class Stubborn(Board):
    """It cannot be closed."""

    def close(self) -> None:
        super().close()
        raise RuntimeError("the sandbox does not answer")


def test_an_environment_that_cannot_be_closed_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, CHATML))
    board = Stubborn()
    sample = played(codec, Replies([(spelled(codec, text), text) for text in "abc"]), board)
    assert sample.finish_reason is FinishReason.ENVIRONMENT
    deadline, pause = Deadline.after(60), threading.Event()
    while "the sandbox does not answer" not in caplog.text:
        assert not deadline.expired(), "waited for the warning"
        pause.wait(0.01)


def test_a_template_without_later_turns_is_named(tmp_path: Path) -> None:
    codec = PromptCodec(write_tokenizer(tmp_path, LAST_ONLY))
    with pytest.raises(InvalidRecord, match="leaves earlier answers out"):
        codec.render_reply("more")
