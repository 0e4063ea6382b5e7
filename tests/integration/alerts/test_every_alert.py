"""Every alert rings by its cause on real processes and a real Kafka, and rests once the cause is mended as its runbook says."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from typer.testing import CliRunner

from echo_bus.clock import Deadline
from echo_ops.cli.main import app
from echo_ops.monitoring.rendering import alert_rules
from echo_schemas.records import Trajectory
from echo_schemas.topics import TRAJECTORIES, WEIGHT_CHUNKS
from echo_tasks.base_models import resolve_base
from tests.chaos.disk import SmallDisk
from tests.installed import missing
from tests.integration.alerts.prometheus import PROGRAM, WHY_NOT
from tests.integration.alerts.stage import WAIT_S, Case, Stage, cause_of, open_stage, see
from tests.integration.ops.quotas import set_quota
from tests.thorough import only_thorough

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
POOL: list[Case] = []
POLICY: list[Case] = []
OFFSETS = "__consumer_offsets"
JUDGE = """
import asyncio

from echo_tasks.rewards import ScoredSample, reward


@reward(name="judge")
async def judge(sample: ScoredSample) -> float:
    {first}
    return float(len(sample.completion) % 2 == 0)
"""


def judge(first: str = "pass") -> None:
    """Write the reward's file, with this as its first line."""
    Path("my_rewards.py").write_text(JUDGE.format(first=first), encoding="utf-8")


def alter(stage: Stage, topic: str, name: str, value: str | None) -> None:
    """Set a topic's property; None: the cluster's own again."""
    operation = AlterConfigOpType.DELETE if value is None else AlterConfigOpType.SET
    entry = ConfigEntry(name, value or "", incremental_operation=operation)
    admin = stage.bus.cluster.admin()
    (done,) = admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])]).values()
    done.result(WAIT_S)


@cause_of(POOL, "EchoForged", EchoDeadLetters={"reason": "bad_signature"})
def _somebody_writes_without_a_key(stage: Stage) -> Iterator[None]:
    with closing(stage.bus.reader([TRAJECTORIES])) as reader:
        reader.start()
        samples = [message.record for batch in reader.read_to_end(Deadline.after(WAIT_S)) for message in batch]
    sample = next(record for record in samples if isinstance(record, Trajectory))
    with closing(stage.bus.publisher()) as publisher:
        publisher.publish(TRAJECTORIES, replace(sample, completion="forged")).wait(WAIT_S)
    yield


@cause_of(POOL, EchoWorkerCannotDeliver={"process": "worker.worker-old-0"})
def _a_worker_is_cut_off(stage: Stage) -> Iterator[None]:
    # Alone, so that no order puts it on standby.
    stage.end("worker-old-1")
    stage.goes_on()
    # It cannot deliver what it has in hand at that moment.
    hangs = stage.folder / "old.hangs"
    hangs.touch()
    taken = 'echo_rollout_groups_in_flight{process="worker.worker-old-0"} > 0'
    stage.wait_until(lambda: bool(stage.prometheus.query(taken)), WAIT_S, "the worker has a group in hand")
    stage.proxies.silence(0)
    hangs.unlink()
    yield
    stage.proxies.heal()
    stage.start("worker-old-1")


@cause_of(POOL, "EchoPublishFails")
def _a_topic_refuses_records_of_their_size(stage: Stage) -> Iterator[None]:
    topic = stage.bus.namespace.topic(TRAJECTORIES)
    alter(stage, topic, "max.message.bytes", "100")
    yield
    alter(stage, topic, "max.message.bytes", None)
    stage.goes_on()


@cause_of(POOL, EchoFenced={"role": "feeder"})
def _somebody_starts_a_second_feeder(stage: Stage) -> Iterator[None]:
    second = stage.swarm.start_second("feeder")
    yield
    stage.swarm.wait_ended(stage.swarm.child("feeder"), Deadline.after(WAIT_S), stage.wait)
    stage.swarm.announce("feeder").unlink()
    stage.swarm.adopt("feeder", second)
    stage.goes_on()


@cause_of(POOL, "EchoPublishBlocked")
def _a_quota_holds_the_learner_back(stage: Stage) -> Iterator[None]:
    learner = f"{stage.bus.namespace.name}.learner"
    set_quota(stage.kafka.bootstrap, learner, producer_byte_rate=1e4)
    yield
    set_quota(stage.kafka.bootstrap, learner, producer_byte_rate=1e9)
    stage.goes_on()


@cause_of(POOL, "EchoCheckpointDisk")
def _the_disk_fills_up(stage: Stage) -> Iterator[None]:
    ballast, checkpoint = stage.folder / "run" / "ballast", stage.one("echo_learner_checkpoint_bytes")
    ballast.write_bytes(bytes(int(shutil.disk_usage(ballast.parent).free - 3.2 * checkpoint)))
    yield
    ballast.unlink()
    stage.goes_on()


def _with_reward(stage: Stage, first: str) -> Iterator[None]:
    """The reward with this first line, and then as it was."""
    judge(first)
    stage.restart("reward-0")
    yield
    judge()
    stage.restart("reward-0")


@cause_of(POOL, "EchoRewardLag")
def _the_reward_is_slow(stage: Stage) -> Iterator[None]:
    yield from _with_reward(stage, "await asyncio.sleep(4.5)")


@cause_of(POOL, "EchoRewardFails")
def _the_reward_raises(stage: Stage) -> Iterator[None]:
    yield from _with_reward(stage, "if sum(map(ord, sample.prompt)) % 16 == 0: raise RuntimeError('Not this one.')")


@cause_of(POOL, "EchoPoolTooSmall", "EchoLearnerStarved", "EchoRequestsLost")
def _workers_become_slow(stage: Stage) -> Iterator[None]:
    Path("old").write_text("30", encoding="utf-8")
    yield
    stage.start("worker-new-0")


@cause_of(POOL, "EchoNoProgress", EchoProcessGone={"role": "worker"})
def _all_workers_stand_still(stage: Stage) -> Iterator[None]:
    frozen = stage.workers
    for name in frozen:
        stage.swarm.freeze(stage.swarm.child(name))
    yield
    Path("old").write_text("0.05", encoding="utf-8")
    for name in frozen:
        stage.swarm.kill(name)
    stage.start(*frozen)
    stage.goes_on()


@cause_of(POOL, EchoWeightsNotInstalled={"process": "worker.worker-new-0"})
def _chunks_of_the_newest_weights_are_gone(stage: Stage) -> Iterator[None]:
    stage.command("runs", "pause", stage.swarm.settings.run.name)
    stage.wait_until(lambda: stage.one("echo_learner_paused") == 1, WAIT_S, "the learner pauses")
    stage.swarm.kill("worker-new-0")
    topic, admin = stage.bus.namespace.topic(WEIGHT_CHUNKS), stage.bus.cluster.admin()
    places = [TopicPartition(topic, partition, -1) for partition in admin.list_topics(topic).topics[topic].partitions]
    for done in admin.delete_records(places).values():
        done.result(WAIT_S)
    stage.start("worker-new-0")
    yield
    stage.command("runs", "resume", stage.swarm.settings.run.name)
    stage.goes_on()


@cause_of(POOL, "EchoOffPolicy", stands=True)
def _engines_do_not_compute_the_policy(stage: Stage) -> Iterator[None]:
    yield
    others = stage.workers
    stage.start("worker-sound-0")
    for name in others:
        stage.end(name)
    stage.goes_on()


@cause_of(POOL, "EchoCommitsFail")
def _offsets_are_refused(stage: Stage) -> Iterator[None]:
    alter(stage, OFFSETS, "max.message.bytes", "10")
    yield
    alter(stage, OFFSETS, "max.message.bytes", None)
    stage.swarm.tend()
    stage.restart("reward-0")
    stage.goes_on()


@cause_of(POLICY, EchoWorkerLies={"worker": "worker-1"})
def _a_worker_has_another_model(stage: Stage) -> Iterator[None]:
    stage.start("worker-1")
    yield
    stage.end("worker-1")


@cause_of(POLICY, "EchoStalenessNearBudget", stands=True, EchoDropsHigh={"reason": "stale"})
def _workers_make_more_than_is_trained(stage: Stage) -> Iterator[None]:
    yield
    fork(stage, "exploding", ECHO_STALENESS__ADMISSION="pace", ECHO_LEARNER__LR="1e30")


@cause_of(POLICY, "EchoNotFinite")
def _the_learning_rate_is_far_too_high(stage: Stage) -> Iterator[None]:
    for name in ("learner", "reward-0", "feeder", "worker-0"):
        stage.swarm.start(name)
    yield
    fork(stage, "calm", ECHO_LEARNER__LR="1e-6")
    stage.start("learner", "reward-0", "feeder", "worker-0")
    stage.wait_until(lambda: stage.one('max(echo_learner_version{run="calm"})') > _sound(stage), WAIT_S, "the fork makes steps")


def _sound(stage: Stage) -> int:
    """A version of the first run, whose steps are the ones that are followed, and of each fork of it."""
    return stage.follower.version - 2


def fork(stage: Stage, name: str, **changes: str) -> None:
    """End the run, and let another begin at the version before the first run's last ones."""
    for running in [name for name in stage.swarm.names if stage.swarm.is_running(name)]:
        stage.end(running)
    folder = stage.folder / name
    stage.command("fork", name, "--version", str(_sound(stage)), "--folder", str(folder), changes=changes)
    stage.swarm.change({**changes, "ECHO_RUN__NAME": name, "ECHO_CHECKPOINT__FOLDER": str(folder)})


def test_every_alert_has_a_case() -> None:
    rules = [rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]]
    assert {rule["alert"] for rule in rules if "alert" in rule} == {alert for case in [*POOL, *POLICY] for alert in case.alerts}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with what the runs' files name."""
    if absent := missing("transformers", "faust", "deepspeed"):
        pytest.skip(f"{absent} are missing: install the extra 'all-cpu'")
    if (why := SmallDisk.why_not(tmp_path)) is not None:
        pytest.skip(why)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for kind in ("old", "new"):
        Path(kind).write_text("0.05", encoding="utf-8")
    judge()
    return tmp_path


long = [pytest.mark.kafka, pytest.mark.slow, only_thorough, pytest.mark.timeout(1_800), pytest.mark.skipif(PROGRAM is None, reason=WHY_NOT)]


@pytest.mark.parametrize(("run", "cases"), [pytest.param("pool", POOL, marks=long), pytest.param("policy", POLICY, marks=long)])
def test_every_alert_rings_by_its_cause_until_it_is_mended(jars: None, here: Path, run: str, cases: list[Case]) -> None:
    shutil.copy(HERE / f"{run}.toml", "run.toml")
    if run == "pool":
        for role in ("worker", "reward"):
            assert CliRunner().invoke(app, ["keys", "new", role]).exit_code == 0
    else:
        write_other_model(here / "other")
    inside = {
        "worker-old-0": {"ECHO_KAFKA__BOOTSTRAP": "{proxied}"},
        "worker-1": {"ECHO_POLICY__BASE": str(here / "other")},
    }
    later = {"worker-new-0", "worker-sound-0", "worker-1"}
    with open_stage(here, Path("run.toml"), run, first=lambda name: name not in later, inside=inside) as stage:
        see(stage, cases)


def write_other_model(folder: Path) -> None:
    """The base model with other numbers."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(resolve_base("demo:tiny-qwen3"), folder)
    for file in folder.glob("*.safetensors"):
        save_file({name: 0.9 * tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})
