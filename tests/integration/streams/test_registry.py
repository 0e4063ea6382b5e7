"""A role that takes its schema ids from a registry: Apicurio's, through Confluent's API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.topics import REWARDS
from echo_settings import load_settings
from tests.integration.streams.stage import Stage
from tests.thorough import only_thorough
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, only_thorough]
BREVITY = "my_rewards.py:brevity"


@pytest.fixture
def stage(
    kafka_bootstrap: str, registry_url: str, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Stage]:
    """Children have the registry from the environment."""
    monkeypatch.setenv("ECHO_REGISTRY__URL", registry_url)
    made = Stage(tmp_path, kafka_bootstrap, namespace, {BREVITY: 1.0})
    made.bus = open_bus(load_settings(tmp_path / "run.toml", {"ECHO_REGISTRY__URL": registry_url}), "tester")
    made._reader.close()
    made._reader = made.bus.reader([REWARDS])
    made._reader.start()
    yield made
    made.close()


def test_a_reward_application_reads_and_writes_by_the_ids_of_a_registry(stage: Stage) -> None:
    child = stage.start("1")
    registered = CliRunner().invoke(app, ["schemas", "register", "--config", str(stage.folder / "run.toml")])
    assert registered.exit_code == 0, registered.output
    stage.wait_for(stage.publish(trajectory(seq, completion="four") for seq in range(4)))
    child.terminate()
    assert child.ended() == 0
    assert "HTTP Request" not in child.log
