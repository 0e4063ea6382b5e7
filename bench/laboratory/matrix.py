"""The cells: condition, task and seed from a file, each as the run file of a pipeline."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from echo_schemas.errors import UserError
from echo_tasks.options import nearest

HELD_OUT, FINAL = "held-out", "final"
"""The evaluations of each cell: at intervals, and of the last version with more prompts."""
LEAST_STEPS = 2
"""A cell's time begins at the end of its first step, so a cell of one step has none, and no claim about it could be tested."""
_SECTIONS = ("evaluation", "sets", "tasks", "conditions")
# A hint lists all names only if there are at most so many: more fill the screen.
_MOST_LISTED = 12
_RUN = "learning"
_EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run. `settings`: its file's content, without Kafka. `is_colocated`: in one process. `kill_every_s`: seconds between the kills of
    a second worker; 0: no second worker. `held`: parameters with one of these in their names are not trained (only in one process)."""

    task: str
    condition: str
    seed: int
    settings: Mapping[str, Any]
    is_colocated: bool = False
    kill_every_s: float = 0.0
    held: Sequence[str] = ()

    @property
    def name(self) -> str:
        """The name of its files."""
        return f"{self.task}.{self.condition}.{self.seed}"

    @property
    def num_steps(self) -> int:
        """How many steps its settings ask for."""
        steps: int = self.settings["learner"]["steps"]
        return steps

    @property
    def engine(self) -> str:
        """The name of the engine that generates its samples: the inner one if the engine contains another and names it."""
        rollout = self.settings["rollout"]
        return str(rollout.get("options", {}).get("engine", rollout["engine"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The command line's values, which replace the file's; None: the file's value."""

    conditions: Sequence[str] | None = None
    tasks: Sequence[str] | None = None
    seeds: int | None = None
    steps: int | None = None
    engine: str | None = None


def load_cells(path: Path, set_name: str, choice: Choice) -> list[Cell]:
    """The cells of one set, seed after seed, so that compared cells run at about the same time. Raises UserError."""
    _check_numbers(choice)
    content = _content(path)
    chosen = _entry(content, "sets", set_name)
    tasks = chosen["tasks"] if choice.tasks is None else choice.tasks
    conditions = chosen["conditions"] if choice.conditions is None else choice.conditions
    seeds = chosen["seeds"] if choice.seeds is None else choice.seeds
    return [_cell(content, task, condition, seed, choice) for task in tasks for seed in range(seeds) for condition in conditions]


def names_in_order(path: Path) -> tuple[list[str], list[str]]:
    """The tasks and the conditions of all sets, each where it comes first."""
    sets = _content(path)["sets"].values()
    tasks, conditions = (dict.fromkeys(name for chosen in sets for name in chosen[kind]) for kind in ("tasks", "conditions"))
    return list(tasks), list(conditions)


def conditions_of_sets(path: Path) -> dict[str, list[str]]:
    """The conditions of each set."""
    return {name: list(chosen["conditions"]) for name, chosen in _content(path)["sets"].items()}


def as_toml(content: Mapping[str, Any]) -> str:
    """A run file: one line a section."""
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in content.items())


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` over it, key by key."""
    found = dict(base)
    for key, value in changes.items():
        below = found.get(key)
        found[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else deepcopy(value)
    return found


def _check_numbers(choice: Choice) -> None:
    """Raise UserError if the command line asks for no seed or for too few steps."""
    if choice.seeds is not None and choice.seeds < 1:
        raise UserError(f"--seeds {choice.seeds} asks for no cell.", hint="Write --seeds 1 or more.")
    if choice.steps is not None and choice.steps < LEAST_STEPS:
        raise UserError(
            f"--steps {choice.steps} is too few: a cell's time is that from the end of its first step to the end of its last one.",
            hint=f"Write --steps {LEAST_STEPS} or more.",
        )


def _content(path: Path) -> dict[str, Any]:
    """The matrix in `path`. Raises UserError if there is no such file, or if it is no TOML or no matrix."""
    if not path.is_file():
        raise UserError(f"There is no file {path}.", hint="--matrix names a file like bench/laboratory/matrix.toml.")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise UserError(f"{path} is no TOML: {exc}.", hint="Correct the file, or name another one with --matrix.") from exc
    missing = [f"[{name}]" for name in _SECTIONS if not isinstance(content.get(name), dict)]
    missing += [] if "steps" in content else ["steps"]
    if missing:
        raise UserError(f"{path} is no matrix: it lacks {', '.join(missing)}.", hint="bench/laboratory/matrix.toml is an example.")
    return content


def _cell(content: Mapping[str, Any], task: str, condition: str, seed: int, choice: Choice) -> Cell:
    asked, changed = _like(content, "tasks", task), _like(content, "conditions", condition)
    base = merged(_base(asked), asked.get("settings", {}))
    steps = content["steps"] if choice.steps is None else choice.steps
    own = {
        "run": {"name": _RUN, "seed": seed},
        "learner": {"steps": steps},
        "eval": _evaluations(content["evaluation"], steps, list(base["rewards"])),
    }
    settings = merged(merged(base, own), changed.get("settings", {}))
    if choice.engine is not None:
        # The engine "elsewhere" contains another engine.
        is_inside = ":" in settings["rollout"]["engine"]
        settings = merged(settings, {"rollout": {"options": {"engine": choice.engine}} if is_inside else {"engine": choice.engine}})
    return Cell(
        task=task,
        condition=condition,
        seed=seed,
        settings=settings,
        is_colocated=bool(changed.get("colocated")),
        kill_every_s=float(changed.get("kill_every_s", 0)),
        held=changed.get("held", ()),
    )


def _base(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The run file that a task begins with: a packaged demo's, or an example's without some of its sections and keys."""
    if "demo" in asked:
        base = tomllib.loads(resources.files("echo_ops.demo").joinpath(f"{asked['demo']}.toml").read_text(encoding="utf-8"))
        # Else the demo's lead of two steps would be combined with another budget.
        base["staleness"] = {}
        return base
    base = tomllib.loads((_EXAMPLES / asked["example"]).read_text(encoding="utf-8"))
    for name in asked["without"]:
        section, _, key = name.rpartition(".")
        (base[section] if section else base).pop(key, None)
    return base


def _like(content: Mapping[str, Any], kind: str, name: str) -> dict[str, Any]:
    """An entry over the one that it is like."""
    own = _entry(content, kind, name)
    return merged(_like(content, kind, own["like"]), own) if "like" in own else dict(own)


def _evaluations(wanted: Mapping[str, Any], steps: int, rewards: Sequence[str]) -> list[dict[str, Any]]:
    common = {"rewards": list(rewards)}
    # A run with fewer steps has no evaluation between.
    every = wanted["every"] if steps > wanted["every"] else 0
    return [
        {**common, "name": HELD_OUT, "prompts": wanted["prompts"], "samples": wanted["samples"], "every": every},
        {**common, "name": FINAL, "prompts": wanted["final_prompts"], "every": 0, "at_start": False},
    ]


def _entry(content: Mapping[str, Any], kind: str, name: str) -> Mapping[str, Any]:
    known: Mapping[str, Mapping[str, Any]] = content[kind]
    if name not in known:
        raise UserError(f"The matrix has no [{kind}.{name}].", hint=_names_hint(kind, name, list(known)))
    return known[name]


def _names_hint(kind: str, name: str, known: Sequence[str]) -> str:
    """The name in `known` that is most like `name`, and all of them if they are few."""
    listed, near = f"There are: {', '.join(known)}.", nearest(name, known)
    is_near = near != listed
    if len(known) <= _MOST_LISTED:
        return f"{near} {listed}" if is_near else listed
    return near if is_near else f"Its {len(known)} sections [{kind}.NAME] say which names there are."


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {_value(each)}' for key, each in value.items())} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # Strings, numbers and booleans are the same in JSON and TOML.
    return json.dumps(value, ensure_ascii=False)
