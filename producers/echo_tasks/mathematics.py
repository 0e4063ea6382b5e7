"""Mathematics from the user's own records, in the forms of GSM8K, MATH and AIME; each answer is judged by the reward `math`.

{"question": "Natalia sold …", "answer": "… She sold 48 + 24 = 72 clips. #### 72"}        GSM8K
{"problem": "Find the sum …", "solution": "… so it is $\\\\boxed{\\\\frac{3}{4}}$."}            MATH
{"problem": "Let $N$ be …", "answer": 468}                                                AIME
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache

from echo_schemas.errors import UserError
from echo_schemas.libraries import TASKS, require_libraries
from echo_tasks.answers import Style, asked
from echo_tasks.math_answers import reference_of
from echo_tasks.options import one_of, whole_number
from echo_tasks.records import Row, read_rows
from echo_tasks.task import Prompt, SingleTurn

QUESTION_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("answer", "solution")
_SOLUTION = "solution"
INSTRUCTION = "Think step by step, and put the final answer in \\boxed{}."
# Orders that are kept: a run asks seqs in order, so the current epoch and its neighbours are enough.
_EPOCHS_KEPT = 4


class Mathematics(SingleTurn):
    """The records from `start` up to `stop` of the file `path`, counted from 0: each once an epoch, in another order each time."""

    name = "math"
    rewards: Sequence[str] = ("math",)

    def __init__(
        self,
        path: str,
        question_field: str = "",
        answer_field: str = "",
        start: int = 0,
        stop: int | None = None,
        style: str = "chat",
        instruction: str = INSTRUCTION,
    ) -> None:
        """Raises UserError for a file that cannot be read, a record without question or answer, or `start` or `stop` beyond the file."""
        require_libraries(f"The task {self.name!r}", "math_verify", install=TASKS)
        self._style = one_of("style", style, Style)
        self._instruction = instruction
        rows = read_rows(path, self.name)
        first = whole_number("start", start, least=0, most=len(rows) - 1)
        last = len(rows) if stop is None else whole_number("stop", stop, least=first + 1, most=len(rows))
        questions = (question_field,) if question_field else QUESTION_FIELDS
        answers = (answer_field,) if answer_field else ANSWER_FIELDS
        self._problems = [_problem(row, questions, answers) for row in rows[first:last]]
        self._order = lru_cache(maxsize=_EPOCHS_KEPT)(self._ordered)

    def prompt(self, seed: int, seq: int) -> Prompt:
        """The record of (seed, seq): within an epoch, one after another in random order. The entry holds its `answer`."""
        epoch, place = divmod(seq, len(self._problems))
        question, answer = self._problems[self._order(seed, epoch)[place]]
        return asked(question, {"answer": answer}, self._style, self._instruction)

    def _ordered(self, seed: int, epoch: int) -> list[int]:
        order = list(range(len(self._problems)))
        random.Random(f"{self.name}/{seed}/{epoch}").shuffle(order)
        return order


def _problem(row: Row, questions: Sequence[str], answers: Sequence[str]) -> tuple[str, str]:
    """Question and answer. Raises UserError, naming row and fields, if a question or an answer is missing."""
    _, question = row.text(questions)
    field, text = row.text(answers)
    answer = reference_of(text, is_solution=field.lower() == _SOLUTION)
    if answer is None:
        raise UserError(
            f"The field {field!r} in {row.place} holds no final answer: neither '#### …' nor \\boxed{{…}}.",
            hint="Mark it, or give the answer in a field of its own and name it with answer_field in [task.options].",
        )
    return question, answer
