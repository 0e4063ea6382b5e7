"""Answers in tags: where they are found, and what counts as kept form."""

from __future__ import annotations

import pytest

from echo_schemas.errors import UserError
from echo_tasks.answers import Style, answer_format, asked, final_answer
from echo_tasks.options import nearest, one_of, whole_number
from tests.unit.tasks.samples import sample


@pytest.mark.parametrize(
    ("completion", "answer", "kept"),
    [
        ("<answer>42</answer>", "42", 1.0),
        ("I think.\n<answer> 42\n</answer>\n", "42", 1.0),
        ("42", "42", 0.0),
        ("", "", 0.0),
        ("<answer></answer>", "", 0.0),
        ("<answer>41</answer> no, <answer>42</answer>", "42", 0.0),
        ("<answer>42</answer> and so on", "42", 0.0),
        ("<answer>42", "42", 0.0),
        ("42</answer>", "42</answer>", 0.0),
        ("</answer>42<answer>", "", 0.0),
        ("<ANSWER>42</ANSWER>", "<ANSWER>42</ANSWER>", 0.0),
        ("<answer>" * 50_000 + "42", "42", 0.0),
    ],
)
def test_the_last_pair_of_tags_holds_the_answer(completion: str, answer: str, kept: float) -> None:
    assert final_answer(completion) == answer
    assert answer_format(sample(completion)) == kept


def test_a_prompt_is_a_message_or_text() -> None:
    chat, text = asked("Who?", {"a": 1}, Style.CHAT), asked("Who?", {"a": 1}, Style.TEXT, "Say it.")
    assert [message.role for message in chat.messages] == ["user"]
    assert chat.messages[0].content.startswith("Who?\n\nThink first.")
    assert (text.text, text.entry) == ("Who?\n\nSay it.\n", {"a": 1})


@pytest.mark.parametrize("value", [0, 5, 2.0, "2", True, None])
def test_a_number_out_of_bounds_is_named(value: object) -> None:
    with pytest.raises(UserError, match=r"\[task.options\] people = .* is no whole number from 1 to 4\."):
        whole_number("people", value, least=1, most=4)


def test_an_option_that_nothing_bounds_above() -> None:
    assert whole_number("people", 10**9, least=1) == 10**9
    with pytest.raises(UserError, match=r"is no whole number of at least 1\."):
        whole_number("people", 0, least=1)


def test_a_value_that_is_none_of_a_kind() -> None:
    assert one_of("style", "text", Style) is Style.TEXT
    with pytest.raises(UserError, match=r"style = 'chatty' is none of its values.*Did you mean 'chat'\?"):
        one_of("style", "chatty", Style)
    assert nearest("zzz", ["chat", "text"]) == "There are: chat, text."
