"""Mathematics from the user's records: each asked once an epoch, the same everywhere, and a sentence for each file that is no good."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from echo_schemas.errors import UserError
from echo_tasks.catalogue import load_task
from echo_tasks.mathematics import Mathematics

GSM8K = {"question": "How many clips?", "answer": "48 + 24 = 72\n#### 72"}
MATH = {"problem": "What is $x$?", "level": "Level 1", "solution": "So $\\boxed{\\frac34}$."}
AIME = {"ID": "2024-I-1", "Problem": "Find $N$.", "Solution": "Long.", "Answer": 468}


def written(folder: Path, *records: dict[str, Any], name: str = "questions.jsonl") -> str:
    """A file with these records; its path."""
    file = folder / name
    if file.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    else:
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", ["questions.jsonl", "questions.parquet"])
@pytest.mark.parametrize(("record", "answer"), [(GSM8K, "72"), (MATH, "\\frac34"), (AIME, "468")], ids=["GSM8K", "MATH", "AIME"])
def test_a_record_of_each_form(tmp_path: Path, name: str, record: dict[str, Any], answer: str) -> None:
    prompt = load_task("math", {"path": written(tmp_path, record, name=name)}).prompt(0, 0)
    question = record.get("question") or record.get("problem") or record["Problem"]
    assert prompt.messages[0].content == f"{question}\n\nThink step by step, and put the final answer in \\boxed{{}}."
    assert prompt.entry == {"answer": answer}


def test_each_record_is_asked_once_an_epoch_in_another_order(tmp_path: Path) -> None:
    path = written(tmp_path, *({"question": f"q{number}", "answer": number} for number in range(50)))
    task, again = Mathematics(path, style="text"), Mathematics(path, style="text")
    epochs = [[task.prompt(1, epoch * 50 + place).entry["answer"] for place in range(50)] for epoch in range(3)]
    assert all(sorted(epoch, key=int) == [str(number) for number in range(50)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [again.prompt(1, seq).entry["answer"] for seq in reversed(range(150))] == [one for epoch in epochs for one in epoch][::-1]
    assert [task.prompt(2, place).entry["answer"] for place in range(50)] != epochs[0]
    assert task.prompt(0, 10**15).text.startswith("q")


def test_prompts_are_those_that_were_published(tmp_path: Path) -> None:
    """Pinned: a run that is resumed or replayed by another release must ask the same."""
    task = Mathematics(written(tmp_path, *({"question": f"q{number}", "answer": number} for number in range(6))))
    assert "".join(task.prompt(0, seq).entry["answer"] for seq in range(12)) == "015324241305"


def test_a_part_of_the_file_for_training_and_another_to_measure(tmp_path: Path) -> None:
    path = written(tmp_path, *({"question": f"q{number}", "answer": number} for number in range(10)))
    train, held_out = Mathematics(path, stop=8), Mathematics(path, start=8)
    answers = [{task.prompt(0, seq).entry["answer"] for seq in range(40)} for task in (train, held_out)]
    assert answers == [{str(number) for number in range(8)}, {"8", "9"}]


def test_fields_of_other_names(tmp_path: Path) -> None:
    path = written(tmp_path, {"frage": "Wie viel?", "antwort": "7", "answer": "8"})
    prompt = Mathematics(path, question_field="frage", answer_field="antwort", style="text", instruction="Kurz.").prompt(0, 0)
    assert (prompt.text, prompt.entry) == ("Wie viel?\n\nKurz.\n", {"answer": "7"})


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, r"questions.jsonl is empty: there is nothing to ask"),
        ("\n\n", {}, r"is empty: there is nothing to ask"),
        (
            '{"question": "a", "answer": 1}\n{"question": "b"}',
            {},
            r"no field 'answer' or 'solution' in row 2 of questions.jsonl.*There are: question\.",
        ),
        (
            '{"quesion": "a", "answer": 1}',
            {},
            r"no field 'question' or 'problem' or 'prompt' in row 1.*Did you mean 'quesion'.*question_field",
        ),
        ('{"question": "a", "answer": 1}', {"answer_field": "anser"}, r"no field 'anser' in row 1.*Did you mean 'answer'"),
        ('{"question": "a", "answer": null}', {}, r"The field 'answer' in row 1 of questions.jsonl is empty or no text: None"),
        ('{"question": "  ", "answer": "1"}', {}, r"The field 'question' in row 1 .* is empty"),
        ('{"question": "a", "answer": [1]}', {}, r"The field 'answer' in row 1 .* is empty or no text: \[1\]"),
        ('{"problem": "a", "solution": "So 3."}', {}, r"'solution' in row 1 .* holds no final answer: neither '#### …' nor \\boxed"),
        ('{"question": "a"', {}, r"There is no JSON in row 1 of questions.jsonl.*one whole object a line"),
        ("[1, 2]", {}, r"There is no object in row 1 of questions.jsonl but list"),
        ('{"question": "a", "answer": 1}', {"start": 1}, r"start = 1 is no whole number from 0 to 0"),
        ('{"question": "a", "answer": 1}', {"stop": 2}, r"stop = 2 is no whole number from 1 to 1"),
        ('{"question": "a", "answer": 1}', {"style": "chatt"}, r"Did you mean 'chat'"),
        ('{"question": "a", "answer": 1}', {"file": "x"}, r"cannot be made with the options \['file', 'path'\]"),
    ],
)
def test_a_file_that_is_no_good(tmp_path: Path, text: str, options: dict[str, Any], sentence: str) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        load_task("math", {"path": str(file), **options})


def test_files_that_are_not_there_or_of_another_kind(tmp_path: Path) -> None:
    written(tmp_path, GSM8K)
    (tmp_path / "questions.txt").touch()
    (tmp_path / "broken.parquet").write_text("no Parquet", encoding="utf-8")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "\xe9"}')
    for name, sentence in {
        "question.jsonl": r"There is no file .*question.jsonl for the task 'math'.*Did you mean 'questions.jsonl'",
        "no/such.jsonl": r"There is no folder .* either; relative paths count from the folder that the run is started in",
        "questions.txt": r"neither JSONL nor Parquet by its name",
        "broken.parquet": r"broken.parquet cannot be read as Parquet",
        "latin.jsonl": r"latin.jsonl cannot be read: 'utf-8'",
    }.items():
        with pytest.raises(UserError, match=sentence):
            load_task("math", {"path": str(tmp_path / name)})


def test_a_file_must_be_named() -> None:
    with pytest.raises(UserError, match=r"The task 'math' cannot be made with the options \[\].*path"):
        load_task("math")
