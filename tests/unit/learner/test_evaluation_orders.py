"""What an order on `control` may ask for: nothing that the configuration does not have already, and so no code and no file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_learner.evaluation.setup import plan_order
from echo_schemas.errors import UserError
from echo_schemas.records import EvaluationOrder
from echo_settings import Settings

OWN_TASK = """
from echo_tasks.digits import ReverseDigits

class Mine(ReverseDigits):
    pass
"""


def order(**section: Any) -> EvaluationOrder:
    return EvaluationOrder(version=1, name="ordered", section=json.dumps({"name": "ordered", "prompts": 2, **section}))


@pytest.fixture
def trap(tmp_path: Path) -> tuple[str, Path]:
    """Code that leaves a trace when it is imported, by the name under which a task would be; and the trace."""
    trace = tmp_path / "was imported"
    (tmp_path / "trap_task.py").write_text(f"from pathlib import Path\nPath({str(trace)!r}).touch()\n{OWN_TASK}")
    return f"{tmp_path / 'trap_task.py'}:Mine", trace


def test_a_task_that_the_configuration_does_not_have_is_not_imported(trap: tuple[str, Path]) -> None:
    name, trace = trap
    with pytest.raises(UserError, match="the configuration has no task"):
        plan_order(Settings(), order(task=name))
    assert not trace.exists()


def test_nor_is_a_reward(trap: tuple[str, Path]) -> None:
    name, trace = trap
    with pytest.raises(UserError, match="the configuration has no reward"):
        plan_order(Settings(), order(rewards=["exact", name]))
    assert not trace.exists()


def test_a_built_in_task_takes_no_options_from_an_order() -> None:
    """Options name files, too."""
    with pytest.raises(UserError, match="the configuration has no task 'math' with these options"):
        plan_order(Settings(), order(task="math", options={"path": "/etc/passwd"}))
    with pytest.raises(UserError, match="the configuration has no task 'reverse-digits' with these options"):
        plan_order(Settings(), order(options={"length": 3}))


def test_what_is_built_in_or_in_the_file_may_be_ordered(trap: tuple[str, Path]) -> None:
    name, _ = trap
    settings = Settings.model_validate({"task": {"name": name}, "eval": [{"name": "sorting", "task": "sort-digits"}]})
    assert plan_order(settings, order()).spec.task == name
    assert plan_order(settings, order(task="sort-digits")).spec.task == "sort-digits"
    assert plan_order(settings, order(task="reverse-digits", rewards=["exact"])).spec.rewards == ("exact",)
