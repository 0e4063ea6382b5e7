"""`echoswarm kafka up --secure` as a user types it: each role has a login of its own, and no more rights than it needs."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from echo_bus.bus import Bus
from echo_bus.errors import NotAuthorized
from echo_embedded import resolve_embedded
from echo_runtime.announcement import read_announcement
from echo_runtime.logins import parse_properties
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.roles import load_roles
from echo_schemas.topics import REWARDS, TRAJECTORIES
from echo_settings import load_settings
from tests.integration.ops.quotas import set_quota_of_users
from tests.integration.ops.test_commands import Shell
from tests.thorough import only_thorough
from tests.unit.schemas.samples import reward, trajectory

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
# Bytes a second of each user: the smallest under which the largest record, a chunk of weights, can be read (docs/operations.md).
PRODUCE_RATE, FETCH_RATE = 60_000.0, 100_000.0


@pytest.fixture(scope="module")
def shell(jars: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """With a secured Kafka of its own, and topics."""
    shell = Shell(tmp_path_factory.mktemp("secure"))
    started = shell("kafka", "up", "--secure")
    if started.returncode:
        pytest.skip(f"No embedded Kafka: {started.stderr}")
    assert shell("topics", "apply").returncode == 0
    yield shell
    assert shell("kafka", "down", "--delete-data").returncode == 0


def logins_of(shell: Shell) -> dict[str, dict[str, str]]:
    (folder,) = (shell.folder / "state").glob("*/logins/echo.demo")
    return {file.stem: parse_properties(file.read_text()) for file in folder.glob("*.properties")}


def bus_of(shell: Shell, role: str, monkeypatch: pytest.MonkeyPatch) -> Bus:
    monkeypatch.setenv("ECHO_STATE_FOLDER", shell.environ["ECHO_STATE_FOLDER"])
    return open_bus(load_settings(None, {}), role)


def test_every_role_has_a_login_and_a_second_start_keeps_it(shell: Shell) -> None:
    before = logins_of(shell)
    assert set(before) == set(load_roles()) | {"admin"}
    assert before["worker"]["sasl.username"] == Namespace("echo.demo").client_id("worker")
    assert len({login["sasl.password"] for login in before.values()}) == len(before)
    again = shell("kafka", "up", "--secure")
    assert "already running" in again.stdout, again
    assert logins_of(shell) == before
    assert "1 of 1 brokers answer" in shell("kafka", "status").stdout
    assert "with no security" not in again.stderr


def test_commands_of_people_find_their_login_by_themselves(shell: Shell) -> None:
    for words in (("runs", "list"), ("dlq", "list"), ("topics", "check")):
        done = shell(*words)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_role_is_itself_and_is_refused_what_is_anothers(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = bus_of(shell, "worker.w1", monkeypatch).publisher()
    publisher.publish(TRAJECTORIES, trajectory()).wait(WAIT_S)
    publisher.close()
    refused = bus_of(shell, "worker.w1", monkeypatch).publisher()
    with pytest.raises(NotAuthorized, match="WRITE on the topic"):
        refused.publish(REWARDS, reward(), partition=0).wait(WAIT_S)
    with pytest.raises(NotAuthorized):
        refused.close()


def test_a_namespace_without_logins_says_how_they_are_made(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[kafka]\nnamespace = "echo.other"\n')
    refused = shell("runs", "list", "--config", str(tmp_path / "other.toml"))
    assert refused.returncode == 2
    assert "kafka up --secure" in refused.stderr
    assert shell("kafka", "up", "--secure", "--config", str(tmp_path / "other.toml")).returncode == 0


@only_thorough
@pytest.mark.parametrize("mode", ["asynchronous", "sequential"])
@pytest.mark.timeout(900)
def test_the_demo_runs_with_a_login_for_each_role(shell: Shell, mode: str) -> None:
    done = shell("demo", "--plain", "--steps", "3", "--mode", mode, "--new")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = {
        path.parent
        for path in (shell.folder / "runs").glob("*/supervisor.log")
        if f'mode = "{mode}"' in (path.parent / "run.toml").read_text()
    }
    assert "cannot be observed" not in (folder / "supervisor.log").read_text()


def throttled_s(runs: Path) -> dict[str, float]:
    """For how many seconds a quota has held each process of the runs back until now."""
    found: dict[str, float] = {}
    for path in runs.glob("*/processes/*.json"):
        announced = read_announcement(path)
        if announced is None:
            continue
        # A process that has ended is asked no more.
        with suppress(OSError), urllib.request.urlopen(f"{announced.url}/metrics", timeout=WAIT_S) as page:
            families = text_string_to_metric_families(page.read().decode())
            samples = [sample for family in families for sample in family.samples if sample.name == "echo_bus_throttled_seconds_total"]
            found[announced.process] = sum(sample.value for sample in samples)
    return found


@only_thorough
@pytest.mark.timeout(900)
def test_a_whole_run_under_a_tight_quota_goes_on_and_says_why_it_is_slow(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every user may write and read a fraction of what the run would; its learner and its screen say so."""
    monkeypatch.setenv("ECHO_STATE_FOLDER", shell.environ["ECHO_STATE_FOLDER"])
    set_quota_of_users(resolve_embedded(), logins_of(shell)["admin"], producer_byte_rate=PRODUCE_RATE, consumer_byte_rate=FETCH_RATE)
    environ = {**shell.environ, "ECHO_ROLLOUT__ENGINE": "transformers", "ECHO_RUN__NAME": "slow"}
    command = [str(Path(sys.executable).parent / "echoswarm"), "demo", "--plain", "--steps", "4", "--new"]
    throttled: dict[str, float] = {}
    with (shell.folder / "slow.out").open("w", encoding="utf-8") as output:
        demo = subprocess.Popen(command, cwd=shell.folder, env=environ, stdout=output, stderr=subprocess.STDOUT)
    try:
        while demo.poll() is None:
            throttled |= throttled_s(shell.folder / "runs")
            time.sleep(0.5)
    finally:
        demo.kill()
        demo.wait()
    said = (shell.folder / "slow.out").read_text(encoding="utf-8")
    assert demo.returncode == 0, said
    assert throttled["learner"] > 1.0, throttled
    assert "A client quota of the cluster holds this process" in said
