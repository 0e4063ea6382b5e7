"""Tasks and rewards by name: built in, installed, by import path and by file, and the sentence for each mistake."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from echo_schemas.errors import UserError
from echo_tasks import catalogue
from echo_tasks.catalogue import import_object, load_reward, load_task
from echo_tasks.digits import ReverseDigits
from echo_tasks.rewards import RewardKind

WriteModule = Callable[..., Path]

TASK = """
from echo_tasks.task import Prompt, SingleTurn

class Sums(SingleTurn):
    name = "sums"
    rewards = ("exact",)

    def __init__(self, digits: int = 2) -> None:
        self.digits = digits

    def prompt(self, seed: int, seq: int) -> Prompt:
        return Prompt(text=f"{seed}+{seq}=", entry={"answer": seed + seq})

def make(digits: int = 2) -> Sums:
    return Sums(digits)

ready = Sums(9)

class Half:
    name = "half"
"""
REWARDS = """
from echo_tasks.rewards import reward

class Grouped:
    @staticmethod
    def nested(sample):
        return 2.0

def plain(sample):
    return 1.0

async def awaited(sample):
    return 1.0

@reward(name="length", version="4")
def decorated(sample):
    return float(len(sample.completion))

number = 3
"""


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WriteModule]:
    """`write_module(name, text)`: a module on the import path; its file. Forgotten again after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        return path

    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def install(monkeypatch: pytest.MonkeyPatch, *points: EntryPoint) -> None:
    """As if a package with these entry points were installed."""
    monkeypatch.setattr(catalogue, "_installed", lambda group: tuple(point for point in points if point.group == group))


def test_built_in_names_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, EntryPoint("b", "x:y", "echoswarm.tasks"), EntryPoint("a", "x:y", "echoswarm.tasks"))
    with pytest.raises(UserError, match=r"There are: reverse-digits, sort-digits,.*, kuhn-poker, a, b\."):
        load_task("xyz")
    with pytest.raises(UserError, match=r"There are: exact, return,"):
        load_reward("q")


def test_every_built_in_name_is_the_name_of_what_it_leads_to() -> None:
    for name in catalogue.BUILT_IN_TASKS:
        assert import_object(catalogue.BUILT_IN_TASKS[name]).name == name
    for name in catalogue.BUILT_IN_REWARDS:
        assert load_reward(name).name == name


def test_a_built_in_task_and_its_rewards() -> None:
    task = load_task("reverse-digits", {})
    assert isinstance(task, ReverseDigits)
    assert [function.name for function in map(load_reward, task.rewards)] == ["exact"]


@pytest.mark.parametrize(
    ("attribute", "options", "digits"), [("Sums", {}, 2), ("Sums", {"digits": 5}, 5), ("make", {"digits": 6}, 6), ("ready", {}, 9)]
)
def test_a_task_by_import_path_and_by_file(write_module: WriteModule, attribute: str, options: dict[str, int], digits: int) -> None:
    path = write_module("user_sums", TASK)
    for name in (f"user_sums:{attribute}", f"{path}:{attribute}"):
        task = load_task(name, options)
        assert task.name == "sums"
        assert task.digits == digits  # type: ignore[attr-defined]
        assert task.prompt(1, 2).entry == {"answer": 3}


def test_a_file_is_one_module_however_often_it_is_asked_for(write_module: WriteModule) -> None:
    path = write_module("user_sums", TASK)
    assert type(load_task(f"{path}:Sums")) is type(load_task(f"{path}:Sums"))


def test_two_files_of_the_same_name_are_two_modules(tmp_path: Path, write_module: WriteModule) -> None:
    first = write_module("user_sums", TASK)
    (tmp_path / "other").mkdir()
    second = tmp_path / "other" / "user_sums.py"
    second.write_text(TASK.replace('name = "sums"', 'name = "other sums"'), encoding="utf-8")
    assert load_task(f"{first}:Sums").name == "sums"
    assert load_task(f"{second}:Sums").name == "other sums"
    assert load_task(f"{first}:Sums").name == "sums"


def test_a_file_relative_to_the_working_folder(write_module: WriteModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module("user_sums", TASK)
    monkeypatch.chdir(tmp_path)
    assert load_task("user_sums.py:Sums").name == "sums"


def test_tasks_and_rewards_by_entry_point(write_module: WriteModule, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module("user_sums", TASK)
    write_module("user_rewards", REWARDS)
    install(
        monkeypatch,
        EntryPoint("sums", "user_sums:Sums", "echoswarm.tasks"),
        EntryPoint("length", "user_rewards:decorated", "echoswarm.rewards"),
        EntryPoint("broken", "user_rewards:missing", "echoswarm.rewards"),
    )
    assert load_task("sums", {"digits": 3}).digits == 3  # type: ignore[attr-defined]
    assert (load_reward("length").name, load_reward("length").version) == ("length", "4")
    with pytest.raises(UserError, match=r"'broken' cannot be imported: AttributeError"):
        load_reward("broken")


@pytest.mark.parametrize(
    ("attribute", "name", "version", "kind"),
    [
        ("plain", "plain", "1", RewardKind.SYNC),
        ("awaited", "awaited", "1", RewardKind.ASYNC),
        ("decorated", "length", "4", RewardKind.SYNC),
        ("Grouped.nested", "nested", "1", RewardKind.SYNC),
    ],
)
def test_a_reward_by_path_remembers_where_it_was_found(
    write_module: WriteModule, attribute: str, name: str, version: str, kind: RewardKind
) -> None:
    path = write_module("user_rewards", REWARDS)
    for origin in (f"user_rewards:{attribute}", f"{path}:{attribute}"):
        function = load_reward(origin)
        assert (function.name, function.version, function.kind, function.origin) == (name, version, kind, origin)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("reverse-digit", r"no task 'reverse-digit'.*Did you mean 'reverse-digits'"),
        ("sort_digits", r"Did you mean 'sort-digits'"),
        ("chess", r"There are: reverse-digits, sort-digits.*'package.module:attribute' or 'file.py:attribute'"),
        ("no_such_module:Task", r"there is no module 'no_such_module'.*PYTHONPATH"),
        ("no_such_file.py:Task", r"There is no Python file no_such_file.py"),
        ("echo_tasks.digits:ReverseDigit", r"echo_tasks.digits has no attribute 'ReverseDigit'.*Did you mean 'ReverseDigits'"),
        ("echo_tasks.digits:", r"has no attribute ''"),
        (":ReverseDigits", r"':ReverseDigits' cannot be imported"),
        ("..:x", r"cannot be imported"),
        ("echo_tasks.digits:ReverseDigits.nothing", r"has no attribute 'ReverseDigits.nothing'"),
        ("echo_tasks.digits:NUM_DIGITS", r"is no task: it lacks name, rewards, prompt, environment, signals"),
    ],
)
def test_a_task_that_cannot_be_found(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        load_task(name)


def test_a_reward_that_cannot_be_found(write_module: WriteModule) -> None:
    write_module("user_rewards", REWARDS)
    with pytest.raises(UserError, match=r"no reward 'exacty'.*Did you mean 'exact'"):
        load_reward("exacty")
    with pytest.raises(UserError, match=r"'user_rewards:number' is no reward function but int.*@reward"):
        load_reward("user_rewards:number")


def test_options_that_a_task_does_not_take(write_module: WriteModule) -> None:
    write_module("user_sums", TASK)
    with pytest.raises(UserError, match=r"cannot be made with the options \['digts'\].*digts"):
        load_task("user_sums:Sums", {"digts": 3})
    with pytest.raises(UserError, match=r"is an object, so it takes no options.*Name its class"):
        load_task("user_sums:ready", {"digits": 3})
    with pytest.raises(UserError, match=r"it lacks rewards, prompt, environment, signals"):
        load_task("user_sums:Half")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def f(:", "SyntaxError"),
        ("import not_installed_anywhere", "there is no module 'not_installed_anywhere'"),
    ],
)
def test_a_module_that_raises_is_its_authors_to_mend_and_is_tried_again(write_module: WriteModule, text: str, sentence: str) -> None:
    path = write_module("user_broken", text)
    for name in ("user_broken:Sums", f"{path}:Sums"):
        with pytest.raises(UserError, match=sentence):
            load_task(name)
    path.write_text(TASK + "\n# mended, and of another length\n", encoding="utf-8")
    assert load_task(f"{path}:Sums").name == "sums"


def test_a_task_whose_constructor_raises_is_its_authors_to_mend(write_module: WriteModule) -> None:
    text = TASK.replace("self.digits = digits", "raise FileNotFoundError('questions.json')")
    write_module("user_constructor", text.replace("ready = Sums(9)", ""))
    with pytest.raises(UserError, match=r"'user_constructor:Sums' cannot be made: FileNotFoundError: questions.json"):
        load_task("user_constructor:Sums")
