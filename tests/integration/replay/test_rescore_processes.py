"""A rescore's scoring processes: whatever a function does, each sample has an answer, and a killed rescore goes on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_replay.rescoring import RESCORE
from echo_replay.rescoring.inside import Answer, ScoringTask
from echo_replay.rescoring.order import RescoreOrder
from echo_replay.rescoring.team import Item, Team
from echo_schemas.codec import lock_file_codec
from echo_schemas.naming import Namespace
from echo_schemas.records import Reward, RewardOutcome
from echo_schemas.topics import BY_NAME, REWARDS
from echo_settings import Settings
from echo_streams.intake import Identity
from echo_tasks.catalogue import load_reward
from tests.integration.replay import rescored
from tests.integration.replay.copying import copy_into
from tests.unit.core.records import at, trajectory
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import SoundRun

_WAIT_S = 120.0
ORDER = RescoreOrder(run_id="demo", name="again", code_version="1")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the rewards of the tests."""
    shutil.copy(rescored.__file__, tmp_path / "my_rewards.py")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def judge(function: str, completions: list[str], *, num: int = 2) -> tuple[dict[str, Answer], Team]:
    """What a team says of samples with these answers, three of them to a chunk."""
    path = f"my_rewards.py:{function}"
    samples = [trajectory(number, completion=completion) for number, completion in enumerate(completions)]
    encode = lock_file_codec().encode
    items = [Item(where=at(each.seq), identity=Identity.of(each), value=encode(each), compared=0.0) for each in samples]
    settings = Settings.model_validate({"scoring": {"memory_mb": 512, "retries": 0}})
    task = ScoringTask(path=path, order=ORDER, settings=settings)
    answers: dict[str, Answer] = {}
    with Team(task, load_reward(path), num) as team:
        for judged in team.judge(iter([items[first : first + 3] for first in range(0, len(items), 3)])):
            for item, answer in judged:
                completion = completions[item.where.offset]
                assert completion not in answers, f"two answers for {completion}"
                answers[completion] = answer
    return answers, team


def test_whatever_a_function_does_each_sample_has_one_answer(here: Path) -> None:
    bad = ["raise", "nan", "text", "exit", "memory", "fork", "hang"]
    answers, team = judge("misbehaves", ["a", *bad[:4], "b", *bad[4:], "c"])
    assert set(answers) == {"a", "b", "c", *bad}
    assert {name for name, answer in answers.items() if answer.outcome is RewardOutcome.SCORED} == {"a", "b", "c", "fork"}
    assert answers["raise"].error == "ValueError: p"
    assert answers["nan"].error == "The value is nan; a reward must be finite."
    assert answers["text"].error == "The value must be a number; it is a str."
    assert answers["exit"].error == "The scoring process died under the call."
    assert (answers["memory"].error or "").startswith("MemoryError")
    assert (answers["hang"].outcome, answers["hang"].error) == (RewardOutcome.TIMED_OUT, "No answer within 1 s.")
    assert team.num_replaced == 2
    (forked,) = here.glob("forked-*")
    deadline = Deadline.after(_WAIT_S)
    while _is_alive(forked.name.removeprefix("forked-")):
        assert not deadline.expired(), "waited for the end of what a function has forked"


def test_a_function_that_only_hangs_is_not_asked_for_ever(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del here
    monkeypatch.setattr("echo_replay.rescoring.team._TRIPS", 3)
    answers, team = judge("hangs", [str(number) for number in range(12)], num=1)
    assert team.stopped == "Its last 3 calls hung or killed their process."
    assert len(answers) == 3
    assert {answer.outcome for answer in answers.values()} == {RewardOutcome.TIMED_OUT}


@pytest.mark.kafka
@pytest.mark.slow
def test_a_killed_rescore_goes_on_and_writes_nothing_twice(kafka_bootstrap: str, namespace: Namespace, sound: SoundRun, here: Path) -> None:
    pipeline = Pipeline(here / "copy", cluster=KafkaCluster(kafka_bootstrap), namespace=namespace)  # type: ignore[arg-type]  # as good
    copy_into(pipeline, sound, first=0.0, end=1.0, topics=BY_NAME)
    command = [sys.executable, "-m", "echo_ops.cli", "rescore", "my_rewards.py:slow", "--run", "demo", "--processes", "1"]
    environment = {**os.environ, "ECHO_KAFKA__BOOTSTRAP": kafka_bootstrap, "ECHO_KAFKA__NAMESPACE": namespace.name}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = Deadline.after(_WAIT_S)
    while not (before := _written(pipeline)):
        assert first.poll() is None, first.communicate()[0]
        assert not deadline.expired(), "waited for the first scores"
    first.kill()
    # Its scoring process shares the pipe, so both have ended after this. It may have committed more since `before` was read.
    first.communicate()
    num_calls = len(rescored.CALLS.read_text().splitlines())
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    after = _written(pipeline)
    assert max(Counter(each.of for each in after).values()) == 1
    said = re.search(r": (?P<scored>\d+) scored in .*; (?P<known>\d+) had a record already", again.stdout)
    assert said is not None, f"killed before it had written all: {again.stdout}"
    assert int(said["known"]) >= len(before)
    assert int(said["known"]) + int(said["scored"]) == len(after)
    # What was not committed is scored again, and nothing else.
    assert len(rescored.CALLS.read_text().splitlines()) - num_calls == int(said["scored"])


def _is_alive(pid: str) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def _written(pipeline: Pipeline) -> list[Reward]:
    with closing(replace(pipeline.bus, run_id="demo").look([REWARDS])) as reader:
        reader.start({place: low for place, (low, _) in reader.bounds().items()})
        found = [message.record for messages in reader.read_to_end(Deadline.after(_WAIT_S)) for message in messages]
    return [each for each in found if isinstance(each, Reward) and each.application == RESCORE]
