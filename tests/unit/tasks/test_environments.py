"""Environments of every form as tasks, and the example of the page."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo_settings import load_settings
from echo_tasks.catalogue import load_task
from echo_tasks.environments import GymEpisode, GymTask, UnknownForm
from echo_tasks.task import Turn

ROOT = Path(__file__).parents[3]


class Counting:
    """Ends after two steps. `form`: how it returns what it returns."""

    def __init__(self, form: str, reward: Any = 0.5) -> None:
        self.form, self.reward = form, reward
        self.actions: list[Any] = []
        self.closed = 0
        self.seed: Any = "none given"

    def reset(self, **options: Any) -> Any:
        self.seed = options.get("seed")
        forms = {"gymnasium": ("zero", {}), "openenv": SimpleNamespace(observation="zero"), "ended": SimpleNamespace(observation="zero")}
        return forms.get(self.form, "zero")

    def step(self, action: Any) -> Any:
        self.actions.append(action)
        is_over = len(self.actions) == 2
        forms: dict[str, Any] = {
            "gymnasium": ("seen", self.reward, False, is_over, {"n": 1}),
            "gym": ("seen", self.reward, is_over, {"n": 1}),
            "openenv": SimpleNamespace(observation="seen", reward=self.reward, done=is_over),
            "ended": SimpleNamespace(observation="seen", reward=self.reward, terminated=is_over, truncated=False),
            "pair": ("seen", self.reward),
            "none": None,
        }
        return forms[self.form]

    def close(self) -> None:
        self.closed += 1


class Count(GymTask):
    """Whole numbers are actions."""

    name = "count"
    rules = "Count."
    max_turns = 3
    bad_answer = -1.0

    def __init__(self, environment: Any) -> None:
        self.made: list[Any] = []
        self._environment = environment

    def make(self) -> Any:
        self.made.append(self._environment)
        return self._environment

    def act(self, answer: str) -> Any:
        if not answer.isdecimal():
            raise ValueError("A number, please.")
        return int(answer)


@pytest.mark.parametrize("form", ["gymnasium", "gym", "openenv", "ended"])
def test_every_form_of_environment_is_an_episode(form: str) -> None:
    environment = Counting(form)
    task = Count(environment)
    episode = task.environment(task.prompt(0, 4).entry)
    assert not task.made, "an environment is made on the thread that resets it"
    assert episode.reset().text == "zero"
    turns = [episode.step("<answer>7</answer>"), episode.step("8")]
    assert [(turn.observation, turn.reward, turn.done) for turn in turns] == [("seen", 0.5, False), ("seen", 0.5, True)]
    assert environment.actions == [7, 8]
    assert environment.seed == task.prompt(0, 4).entry["seed"]
    episode.close()
    episode.close()
    assert environment.closed == 1


def test_a_refused_answer_is_told_so_and_costs_a_turn() -> None:
    environment = Counting("gymnasium")
    episode = Count(environment).environment({"seed": 1})
    episode.reset()
    turns = [episode.step(text) for text in ("seven", "<answer></answer>", "<answer>up</answer>")]
    assert [(turn.observation, turn.reward, turn.done) for turn in turns] == [("A number, please.", -1.0, last == 2) for last in range(3)]
    assert not environment.actions


def test_the_last_turn_ends_an_episode_that_its_environment_would_not_end() -> None:
    class Endless(Counting):
        def step(self, action: Any) -> Any:
            return "more", 0.0, False, False, {}

    episode = Count(Endless("gymnasium")).environment({"seed": 1})
    episode.reset()
    assert [episode.step("1").done for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(("form", "said"), [("pair", "a tuple of 2"), ("none", "NoneType")])
def test_a_step_of_another_form_is_named(form: str, said: str) -> None:
    episode = Count(Counting(form)).environment({"seed": 1})
    episode.reset()
    with pytest.raises(UnknownForm, match=f"step\\(\\) returned {said}, not \\(observation, reward, terminated"):
        episode.step("1")


@pytest.mark.parametrize(("reward", "value"), [(None, 0.0), (2, 2.0), (True, 1.0)])
def test_rewards_are_numbers(reward: Any, value: float) -> None:
    episode = Count(Counting("openenv", reward)).environment({"seed": 1})
    episode.reset()
    assert episode.step("1").reward == value


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_an_error(reward: float) -> None:
    episode = Count(Counting("gym", reward)).environment({"seed": 1})
    episode.reset()
    with pytest.raises(UnknownForm, match="reward"):
        episode.step("1")


class Seedless:
    """Takes no seed, and cannot be closed."""

    def reset(self) -> str:
        return "here"


class Untold:
    """Its reset does not tell what it takes."""

    reset: Any = staticmethod(dict)


@pytest.mark.parametrize(("environment", "seen"), [(Seedless(), "here"), (Untold(), "{}")])
def test_a_reset_without_a_seed_is_called_without_one(environment: Any, seen: str) -> None:
    episode = Count(environment).environment({"seed": 1})
    assert episode.reset().text == seen
    episode.close()


def test_an_episode_that_never_began_can_be_closed() -> None:
    task = Count(Counting("gym"))
    task.environment({"seed": 1}).close()
    assert not task.made


def test_seeds_are_a_function_of_seed_and_seq_and_fit_in_31_bits() -> None:
    task = Count(None)
    seeds = [task.prompt(seed, seq).entry["seed"] for seed in range(3) for seq in (*range(300), 2**60)]
    assert seeds == [Count(None).prompt(seed, seq).entry["seed"] for seed in range(3) for seq in (*range(300), 2**60)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_text_instead_of_a_conversation() -> None:
    task = Count(None)
    assert [message.content for message in task.prompt(0, 0).messages] == ["Count."]
    task.is_chat = False
    assert (task.prompt(0, 0).text, task.prompt(0, 0).messages) == ("Count.", ())


@pytest.fixture
def guess(monkeypatch: pytest.MonkeyPatch) -> GymTask:
    """The example, as its run file names it."""
    monkeypatch.chdir(ROOT)
    settings = load_settings(Path("examples/guess.toml"), {})
    task = load_task(settings.task.name, settings.task.options)
    assert isinstance(task, GymTask)
    assert tuple(settings.rewards) == tuple(task.rewards)
    return task


def test_the_example_can_be_won(guess: GymTask) -> None:
    episode = guess.environment(guess.prompt(0, 0).entry)
    assert isinstance(episode, GymEpisode)
    assert "from 1 to 20" in episode.reset().text
    low, high = 1, 20
    turns: list[Turn] = []
    while not turns or not turns[-1].done:
        middle = (low + high) // 2
        turns.append(episode.step(f"<answer>{middle}</answer>"))
        low, high = (middle + 1, high) if turns[-1].observation == "Too low." else (low, middle - 1)
    assert turns[-1].reward == 1.0
    assert len(turns) <= 5
    assert guess.environment({"seed": 3}).reset() == guess.environment({"seed": 3}).reset()


def test_the_pages_task_is_the_examples(guess: GymTask) -> None:
    page = (ROOT / "docs" / "tasks" / "environments.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example = (ROOT / "examples" / "guess.py").read_text(encoding="utf-8")
    body = snippet[snippet.index("    name =") :]
    assert body in example
