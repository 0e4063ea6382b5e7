"""`echoswarm export` on a real Kafka: killed, gone on with, added to, verified, and asked in SQL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")
pytest.importorskip("duckdb", reason="install the extra 'analysis'")

from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_replay.export.manifest import NAME, open_export
from echo_replay.export.queries import ask
from echo_replay.export.verifying import verify_export
from echo_replay.history import History
from echo_schemas.naming import Namespace
from tests.integration.replay.copying import copy_into
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import SoundRun

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

_WAIT_S = 120.0
_FIRST = frozenset({"runs", "trajectories"})
_SAID = frozenset({"rewards", "steps", "drops", "weights"})


def start_export(bootstrap: str, namespace: Namespace, folder: Path, *flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ECHO_KAFKA__BOOTSTRAP": bootstrap, "ECHO_KAFKA__NAMESPACE": namespace.name}
    command = [sys.executable, "-m", "echo_ops.cli", "export", "--to", str(folder), "--run", "demo", *flags]
    return subprocess.Popen(command, env=environment, cwd=folder.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 0, out + err
    return out


def kill_when(process: subprocess.Popen[str], folder: Path, pattern: str) -> None:
    """As soon as such a file is there, or the export has ended before."""
    deadline = Deadline.after(_WAIT_S)
    while not list(folder.rglob(pattern)) and process.poll() is None:
        assert not deadline.expired(), f"waited for {pattern} in {folder}"
    process.kill()
    process.communicate()


def assert_told(pipeline: Pipeline, folder: Path) -> None:
    """The export is whole and says what the history says."""
    home, manifest = open_export(folder)
    assert verify_export(home, manifest).problems == []
    question = "select kafka.partition, kafka.offset, fate, step, reward_exact from trajectories order by all"
    with History(pipeline.bus, "demo") as history:
        whole = list(history.read())
    told = [(each.where.partition, each.where.offset, each.fate.value, each.step, each.rewards.get("exact")) for each in whole]
    assert ask(home, manifest, question, timeout_s=_WAIT_S, limit=0).rows == sorted(told)


def test_killed_gone_on_with_and_added_to(kafka_bootstrap: str, namespace: Namespace, sound: SoundRun, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "run", cluster=KafkaCluster(kafka_bootstrap), namespace=namespace)  # type: ignore[arg-type]  # as good
    # What is said of a record comes after it.
    copy_into(pipeline, sound, first=0.0, end=1.0, topics=_FIRST)
    copy_into(pipeline, sound, first=0.0, end=0.6, topics=_SAID)
    folder = tmp_path / "export"
    for pattern in (".staged-*", NAME):
        kill_when(start_export(kafka_bootstrap, namespace, folder), folder, pattern)
    finished(start_export(kafka_bootstrap, namespace, folder))
    assert_told(pipeline, folder)

    copy_into(pipeline, sound, first=0.6, end=1.0, topics=_SAID)
    copy_into(pipeline, sound, first=0.0, end=1.0, topics=_FIRST)
    assert "new trajectories, " in finished(start_export(kafka_bootstrap, namespace, folder))
    assert_told(pipeline, folder)
    assert "are whole" in finished(start_export(kafka_bootstrap, namespace, folder, "--verify"))
    content = json.loads((folder / "run=demo" / NAME).read_text())
    assert content["identity"]["cluster"]
    assert all(start == 0 < end for start, end in content["ranges"]["trajectories"].values())
