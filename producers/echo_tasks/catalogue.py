"""Tasks and rewards by name: built in, installed as an entry point, or the user's own by import path or file.

reverse-digits            built in
my-task                   entry point in the group `echoswarm.tasks` (rewards: `echoswarm.rewards`)
package.module:MyTask     import path
my_task.py:MyTask         file
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from echo_core.evaluation import EvaluationSpec
from echo_schemas.errors import UserError
from echo_tasks.options import nearest
from echo_tasks.rewards import RewardFunction, RewardKind
from echo_tasks.task import Task

TASK_GROUP = "echoswarm.tasks"
REWARD_GROUP = "echoswarm.rewards"
# Import paths, since some need libraries whose import takes seconds.
BUILT_IN_TASKS: Mapping[str, str] = {
    "reverse-digits": "echo_tasks.digits:ReverseDigits",
    "sort-digits": "echo_tasks.digits:SortDigits",
    "sokoban": "echo_tasks.sokoban:Sokoban",
    "knights-knaves": "echo_tasks.knights_knaves:KnightsKnaves",
    "countdown": "echo_tasks.countdown:Countdown",
    "math": "echo_tasks.mathematics:Mathematics",
    "reasoning-gym": "echo_tasks.reasoning:Reasoning",
    "poker": "echo_tasks.poker:Poker",
    "kuhn-poker": "echo_tasks.poker:KuhnPoker",
}
BUILT_IN_REWARDS: Mapping[str, str] = {
    "exact": "echo_tasks.rewards:exact",
    "return": "echo_tasks.rewards:turn_return",
    "answer-format": "echo_tasks.answers:answer_format",
    "knights-knaves": "echo_tasks.knights_knaves:knights_knaves",
    "countdown": "echo_tasks.countdown:countdown",
    "math": "echo_tasks.math_checker:math",
    "reasoning-gym": "echo_tasks.reasoning_scorer:reasoning_gym_score",
}


@functools.cache
def _installed(group: str) -> tuple[EntryPoint, ...]:
    """The entry points in `group`; cached, because finding them takes long where many packages are installed."""
    return tuple(entry_points(group=group))


def load_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """The task called `name`, made with `options`. Raises UserError for an unknown name, a bad path, options that it does not take, or any
    error of its constructor."""
    found = _find(name, "task", BUILT_IN_TASKS, TASK_GROUP)
    if not isinstance(found, type) and not inspect.isfunction(found):
        if options:
            raise UserError(f"The task {name!r} is an object, so it takes no options.", hint="Name its class, or remove [task.options].")
        return _checked(found, name)
    try:
        return _checked(found(**(options or {})), name)
    except TypeError as exc:
        hint = _nearest_option(found, options or {})
        raise UserError(f"The task {name!r} cannot be made with the options {sorted(options or {})}: {exc}.", hint=hint) from exc
    except UserError:
        raise
    except Exception as exc:  # a user's constructor may raise anything
        raise UserError(f"The task {name!r} cannot be made: {type(exc).__name__}: {exc}") from exc


def load_reward(name: str) -> RewardFunction:
    """The reward function called `name`. A plain function by path becomes a reward of its own name, version 1.

    Raises UserError for an unknown name, a bad path, or something that is no function.
    """
    found = _find(name, "reward", BUILT_IN_REWARDS, REWARD_GROUP)
    if isinstance(found, RewardFunction):
        return replace(found, origin=name) if ":" in name else found
    if inspect.isfunction(found):
        kind = RewardKind.ASYNC if inspect.iscoroutinefunction(found) else RewardKind.SYNC
        return RewardFunction(name=found.__name__, version="1", kind=kind, call=found, origin=name)
    raise UserError(f"{name!r} is no reward function but {type(found).__name__}.", hint="Decorate a function with @reward(name=…).")


def _nearest_option(maker: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """A hint if `maker` does not take one of `options`; else empty."""
    parameters = inspect.signature(maker).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    for option in options:
        if option not in parameters:
            return nearest(option, parameters) if parameters else "It takes none."
    return ""


def _checked(task: Any, name: str) -> Task:
    missing = [member for member in ("name", "rewards", "prompt", "environment", "signals") if not hasattr(task, member)]
    if missing:
        raise UserError(f"{name!r} is no task: it lacks {', '.join(missing)}.", hint="Derive it from echo_tasks.task.SingleTurn.")
    found: Task = task
    return found


def _find(name: str, kind: str, built_in: Mapping[str, str], group: str) -> Any:
    if name in built_in or ":" in name:
        return import_object(built_in.get(name, name))
    for point in _installed(group):
        if point.name == name:
            return _guarded(point.load, name)
    known = [*built_in, *sorted(point.name for point in _installed(group))]
    own = "Your own is named 'package.module:attribute' or 'file.py:attribute'."
    raise UserError(f"There is no {kind} {name!r}.", hint=f"{nearest(name, known)} {own}")


def import_object(path: str) -> Any:
    """The object of `package.module:attribute` or `file.py:attribute`. Raises UserError for a bad path, or any error of the module."""
    where, _, attribute = path.rpartition(":")
    module: ModuleType = _guarded(lambda: _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where), path)
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f"Did you mean {near[0]!r}?" if near else ""
        raise UserError(f"{where} has no attribute {attribute!r}.", hint=hint) from None
    return found


def _load_file(path: Path) -> ModuleType:
    """A file as a module of its own, the same one each time it is asked for."""
    file = path.resolve()
    name = f"echo_user_{file.stem}"
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"There is no Python file {path}.", hint=f"A relative path starts at the working folder, {Path.cwd()}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # after any error the half-loaded module must not be found the next time
        del sys.modules[name]
        raise
    return module


def _guarded(load: Callable[[], Any], path: str) -> Any:
    """Run the user's module. Raises UserError for any error of it."""
    try:
        return load()
    except UserError:
        raise
    except ModuleNotFoundError as exc:
        raise UserError(
            f"{path!r} cannot be imported: there is no module {exc.name!r}.", hint="Is it installed, or on PYTHONPATH?"
        ) from exc
    except Exception as exc:  # a user's module may raise anything while it is imported
        raise UserError(f"{path!r} cannot be imported: {type(exc).__name__}: {exc}") from exc


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
