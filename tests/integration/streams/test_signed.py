"""The reward application where signatures are required: forged trajectories are dead letters, honest ones get signed rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_replay.raw_log import RawLog
from echo_runtime.trust import open_signer, open_verifier
from echo_schemas.naming import Namespace
from echo_schemas.records import Reward
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_settings.trust import TrustSettings
from tests.integration.streams.stage import Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
BREVITY = "my_rewards.py:brevity"
NUM_SAMPLES = 4


@pytest.fixture
def trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrustSettings:
    """Keys of a worker and of the reward, made as somebody makes them."""
    monkeypatch.chdir(tmp_path)
    for words in (("worker", "w"), ("reward", BREVITY)):
        assert CliRunner().invoke(app, ["keys", "new", *words]).exit_code == 0
    return TrustSettings(keys="keys", signers="signers.toml", signatures="required")


@pytest.fixture
def stage(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path, trust: TrustSettings) -> Iterator[Stage]:
    made = Stage(tmp_path, kafka_bootstrap, namespace, {BREVITY: 1.0})
    with (tmp_path / "run.toml").open("a", encoding="utf-8") as file:
        file.write("\n[trust]\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in trust.model_dump().items()))
    yield made
    made.close()


def test_forged_trajectories_are_dead_letters_and_rewards_are_signed(stage: Stage, trust: TrustSettings) -> None:
    child = stage.start("1", "--log-format", "json")
    records = [trajectory(seq, completion="four") for seq in range(NUM_SAMPLES)]
    forged = stage.publish(replace(record, completion="forged") for record in records)
    bus = stage.bus
    stage.bus = replace(bus, signer=open_signer(trust, "worker.w"))
    honest = stage.publish(records)
    stage.wait_for(honest)
    assert not stage.judged() & set(forged)

    def reasons() -> list[bytes]:
        with RawLog(bus, stage.namespace.dead_letters(TRAJECTORIES)) as letters:
            return [dict(raw.headers() or ())["echo-reason"] for batch in letters.messages() for raw in batch]

    # Letters and rewards have deliveries of their own, so a reward may be there first.
    stage.wait(lambda: len(reasons()) >= NUM_SAMPLES, "the dead letters")
    assert reasons() == [b"bad_signature"] * NUM_SAMPLES
    with closing(replace(bus, verifier=open_verifier(trust, "learner")).reader([REWARDS])) as reader:
        reader.start()
        signed: list[Reward] = []

        def read() -> bool:
            signed.extend(message.record for message in reader.read(timeout_s=0.1) if isinstance(message.record, Reward))
            return len(signed) == NUM_SAMPLES

        stage.wait(read, "rewards whose signature is good")
    lines = [json.loads(line) for line in (stage.folder / "1.log").read_text(encoding="utf-8").splitlines()]
    assert {(line["run"], line["role"], line["process"]) for line in lines} == {("demo", "reward", "reward.1")}
    child.terminate()
    assert child.ended() == 0
