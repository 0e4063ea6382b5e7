"""Every example file: it loads as settings, its task and rewards load, and what it asks can be asked with what it allows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from echo_settings import Settings, load_settings
from echo_streams.run import attach, check_isolation
from echo_tasks.catalogue import load_task
from echo_tasks.mathematics import Mathematics

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.toml"))
PAGES = [ROOT / "docs" / "tasks" / f"{name}.md" for name in ("countdown", "knights-knaves", "math", "reasoning-gym")]
BLOCK = re.compile(r"```(toml|json)\n(.*?)```", re.DOTALL)


@pytest.fixture(params=EXAMPLES, ids=lambda path: path.stem)
def settings(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """The example's settings, read from the folder that a user starts it in; what one has to fetch there is made up."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gsm8k-train.jsonl").symlink_to(ROOT / "examples" / "arithmetic.jsonl")
    monkeypatch.chdir(tmp_path)
    return load_settings(request.param, {})


def test_the_task_and_the_rewards_load_and_a_prompt_is_made(settings: Settings) -> None:
    task = load_task(settings.task.name, settings.task.options)
    prompt = task.prompt(settings.run.seed, 0)
    assert task.prompt(settings.run.seed, 0) == prompt
    assert json.loads(json.dumps(dict(prompt.entry))) == prompt.entry
    # A token has three characters or more, in the languages of these prompts.
    num_characters = len(prompt.text) + sum(len(message.content) for message in prompt.messages)
    assert num_characters / 3 < settings.policy.max_length - settings.rollout.max_new_tokens
    attached = attach(tuple(settings.rewards))
    check_isolation(attached, settings.scoring.processes)


def test_examples_do_not_share_a_namespace() -> None:
    found = [load_settings(path, {}) for path in EXAMPLES]
    assert len({settings.kafka.namespace for settings in found}) == len({settings.run.name for settings in found}) == len(EXAMPLES)


def test_the_made_up_records_are_answered_right() -> None:
    """Each form of record is among them."""
    path = ROOT / "examples" / "arithmetic.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {tuple(record) for record in records} == {("question", "answer"), ("problem", "solution"), ("problem", "answer")}
    task = Mathematics(str(path))
    assert len({task.prompt(0, seq).messages[0].content for seq in range(len(records))}) == len(records) == 64


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_is_what_the_task_takes(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict(BLOCK.findall(page.read_text(encoding="utf-8")))
    (tmp_path / "run.toml").write_text(blocks["toml"], encoding="utf-8")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(blocks.get("json", ""), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = load_settings(tmp_path / "run.toml", {})
    task = load_task(found.task.name, found.task.options)
    assert task.prompt(0, 0).messages
    assert tuple(task.rewards) == tuple(found.rewards)
    check_isolation(attach(tuple(found.rewards)), found.scoring.processes)


def test_the_page_on_tasks_leads_to_every_task_with_a_page() -> None:
    text = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs" / "tasks").glob("*.md"):
        assert f"(tasks/{page.name})" in text
