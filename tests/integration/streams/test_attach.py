"""A reward attached to a run that is going, as its author does it: one command, and a process that outlives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from echo_runtime.announcement import read_announcement
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, Progress
from echo_schemas.topics import PROGRESS
from tests.examples import load_examples
from tests.integration.streams.stage import WAIT_S, Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
BREVITY = "my_rewards.py:brevity"


@pytest.fixture
def stage(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, kafka_bootstrap, namespace, {"exact": 1.0})
    yield made
    made.close()


def reward(stage: Stage, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`echoswarm reward …` in the run's folder."""
    command = [sys.executable, "-m", "echo_ops.cli", "reward", *arguments]
    return subprocess.run(command, cwd=stage.folder, capture_output=True, text=True, timeout=WAIT_S, env={**os.environ}, check=False)


def announced_pid(stage: Stage) -> int:
    announce = stage.folder / "runs" / "demo" / "processes" / "reward-brevity.json"
    announced = read_announcement(announce)
    assert announced is not None
    return announced.pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def orders_of(stage: Stage) -> dict[str, Control]:
    with closing(replace(stage.bus, run_id="demo").orders()) as orders:
        return orders.items()


def test_a_reward_is_attached_weighed_and_detached_while_the_run_goes_on(stage: Stage) -> None:
    with closing(stage.bus.publisher()) as publisher:
        example = load_examples(PROGRESS)["progress.json"]
        assert isinstance(example, Progress)
        publisher.publish(PROGRESS, replace(example, run_id="demo", version=9, published=9)).wait(WAIT_S)
    past = stage.publish(trajectory(seq, completion="four", version=0) for seq in range(40))

    broken = reward(stage, "attach", "my_rewards.py:brevty")
    assert broken.returncode == 2
    assert "Did you mean 'brevity'?" in broken.stderr
    early = reward(stage, "weight", "brevity=0.2")
    assert early.returncode == 2
    assert "No application scores 'brevity'" in early.stderr

    attached = reward(stage, "attach", BREVITY, "--from", "beginning")
    assert attached.returncode == 0, attached.stderr
    assert "From beginning: 40 trajectories" in attached.stdout
    pid = announced_pid(stage)
    try:
        # The past is older than the budget, and scored all the same: that is what was asked for.
        stage.wait_for(past, BREVITY)
        assert all(reward.value is not None and reward.application == "brevity" for reward in stage.rewards)
        twice = reward(stage, "attach", BREVITY)
        assert twice.returncode == 2
        assert "is attached already" in twice.stderr

        listed = json.loads(reward(stage, "list", "--json").stdout)
        (line,) = [line for line in listed if line["name"] == BREVITY]
        assert (line["weight"], line["scored"], line["failed"], line["policy"]) == (0.0, 40, 0, "no group waits")
        assert line["state"] in {"scoring", "catching up"}

        weighed = reward(stage, "weight", "brevity=0.2", "--from-version", "150")
        assert weighed.returncode == 0, weighed.stderr
        first = orders_of(stage)["demo/rewards"]
        assert first.rewards is not None
        assert first.rewards.from_version == 150
        assert [(term.name, term.weight) for term in first.rewards.terms] == [("exact", 1.0), (BREVITY, 0.2)]
        again = reward(stage, "weight", "brevity=0")
        assert "This replaces the order for version 150" in again.stdout
        second = orders_of(stage)["demo/rewards"]
        assert second.rewards is not None
        assert second.epoch > first.epoch
        assert [(term.name, term.weight) for term in second.rewards.terms] == [("exact", 1.0), (BREVITY, 0.0)]

        detached = reward(stage, "detach", "brevity")
        assert detached.returncode == 0, detached.stderr
        stage.wait(lambda: not is_running(pid), "the end of a process that was detached")
    finally:
        if is_running(pid):
            os.kill(pid, 9)
    assert [line["name"] for line in json.loads(reward(stage, "list", "--json").stdout or "[]")] == []


def test_a_reward_that_gives_no_value_is_not_attached(stage: Stage) -> None:
    stage.publish(trajectory(seq) for seq in range(8))
    (stage.folder / "bad.py").write_text("def text(sample):\n    return 'good'\n", encoding="utf-8")
    refused = reward(stage, "attach", "bad.py:text")
    assert refused.returncode == 2
    assert "The value must be a number; it is a str." in refused.stderr
    assert orders_of(stage) == {}
