"""Any of reasoning-gym's hundred procedural data sets as a task, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from echo_schemas.libraries import TASKS, require_libraries
from echo_tasks.answers import INSTRUCTION, Style, asked
from echo_tasks.options import one_of
from echo_tasks.task import Prompt, SingleTurn


class Reasoning(SingleTurn):
    """The data set `dataset` of reasoning-gym; `config` are its own fields. `seed_offset` is added to the run's seed."""

    name = "reasoning-gym"
    rewards: Sequence[str] = ("reasoning-gym", "answer-format")

    def __init__(self, dataset: str, style: str = "chat", instruction: str = INSTRUCTION, seed_offset: int = 0, **config: Any) -> None:
        """Imports reasoning-gym. Raises UserError for an unknown data set, or a field or value that it does not take."""
        require_libraries(f"The task {self.name!r}", "reasoning_gym", install=TASKS)
        from echo_tasks.procedural import check_dataset

        check_dataset(dataset, config)
        self._dataset = dataset
        self._config = config
        self._seed_offset = seed_offset
        self._style = one_of("style", style, Style)
        self._instruction = instruction

    def prompt(self, seed: int, seq: int) -> Prompt:
        """Item `seq` under `seed`. The entry holds what the data set's own scorer needs."""
        from echo_tasks.procedural import item

        made = item(self._dataset, self._config, seed + self._seed_offset, seq)
        entry = {
            "dataset": self._dataset,
            "config": self._config,
            "question": made["question"],
            "answer": made["answer"],
            "metadata": made["metadata"],
        }
        return asked(made["question"], entry, self._style, self._instruction)
