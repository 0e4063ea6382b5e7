"""The tasks and rewards that evaluations name, found before anything is asked."""

from __future__ import annotations

from collections.abc import Sequence

from echo_core.evaluation import EvaluationSpec
from echo_schemas.errors import UserError
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.task import Task


def load_evaluation_tasks(specs: Sequence[EvaluationSpec]) -> dict[str, Task]:
    """Each evaluation's task, by the evaluation's name. Raises UserError, naming the section, for an unknown task, reward or option."""
    tasks: dict[str, Task] = {}
    for spec in specs:
        try:
            tasks[spec.name] = load_task(spec.task, spec.options)
            for name in spec.rewards:
                load_reward(name)
        except UserError as exc:
            raise UserError(f"[[eval]] {spec.name!r}: {exc.message}", hint=exc.hint) from exc
    return tasks
