"""The command line as a user runs it, on a real broker and a real registry."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from echo_embedded.tools import tool_command
from echo_runtime.opening import open_bus
from echo_schemas.naming import Namespace
from echo_schemas.registry import subjects_of
from echo_schemas.topics import PROGRESS, TRAJECTORIES
from echo_settings import load_settings
from tests.examples import load_examples

pytestmark = pytest.mark.kafka
WAIT_S = 60.0


class Shell:
    """Runs `echoswarm` with an environment of its own, in a folder without a run.toml."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.environ = {**{k: v for k, v in os.environ.items() if not k.startswith("ECHO_")}, "ECHO_STATE_FOLDER": str(folder / "state")}
        self.environ |= {"COLUMNS": "200", **environ}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [str(Path(sys.executable).parent / "echoswarm"), *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder, env=self.environ, timeout=240)


@pytest.fixture
def shell(kafka_bootstrap: str, namespace: Namespace, tmp_path: Path) -> Shell:
    return Shell(tmp_path, ECHO_KAFKA__BOOTSTRAP=kafka_bootstrap, ECHO_KAFKA__NAMESPACE=namespace.name)


def test_topics_are_applied_once_and_drift_is_found_and_mended(shell: Shell, kafka_bootstrap: str, namespace: Namespace) -> None:
    assert shell("topics", "check").returncode == 3
    assert "26 create" in shell("topics", "plan").stdout
    assert shell("topics", "apply").returncode == 0
    assert "as the files say" in shell("topics", "apply").stdout
    assert shell("topics", "check").returncode == 0

    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, namespace.topic(TRAJECTORIES), incremental_configs=[entry])
    admin.incremental_alter_configs([resource])[resource].result(WAIT_S)
    drifted = shell("topics", "check")
    assert drifted.returncode == 3
    assert "retention.ms: 1000 → 604800000" in drifted.stdout
    assert shell("topics", "apply").returncode == 0
    assert shell("topics", "check").returncode == 0

    admin.create_partitions([NewPartitions(namespace.topic(TRAJECTORIES), 9)])[namespace.topic(TRAJECTORIES)].result(WAIT_S)
    refused = shell("topics", "apply")
    assert refused.returncode == 3
    assert "cannot remove partitions" in refused.stdout


def test_schemas_are_registered_and_stock_tools_read_the_topics(
    shell: Shell, registry_url: str, kafka_bootstrap: str, namespace: Namespace
) -> None:
    shell.environ["ECHO_REGISTRY__URL"] = registry_url
    assert shell("topics", "apply").returncode == 0
    missing = shell("schemas", "register", "--check")
    assert (missing.returncode, "is not registered under" in missing.stdout) == (3, True), missing.stdout + missing.stderr
    for options in ((), (), ("--check",)):
        done = shell("schemas", "register", *options)
        assert done.returncode == 0, done.stdout + done.stderr
    bus = open_bus(load_settings(None, shell.environ), "worker")
    publisher = bus.publisher()
    record = load_examples(PROGRESS)["progress.json"]
    publisher.publish(PROGRESS, record).wait(WAIT_S)
    publisher.close()

    consumer = Consumer({"bootstrap.servers": kafka_bootstrap, "group.id": "stock", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(namespace.topic(PROGRESS), 0, 0)])
    message = consumer.poll(WAIT_S)
    consumer.close()
    assert message is not None
    # Closed, or its connections are left to the garbage collector, which complains in whatever test it then runs.
    with SchemaRegistryClient({"url": registry_url}) as client:
        deserialize = AvroDeserializer(client)
        value = deserialize(message.value(), SerializationContext(namespace.topic(PROGRESS), MessageField.VALUE))
    assert value["groups_trained"] == 512

    console = tool_command("kafka-console-consumer")
    words = ["--bootstrap-server", kafka_bootstrap, "--topic", namespace.topic(PROGRESS), "--from-beginning", "--max-messages", "1"]
    words += ["--timeout-ms", "120000", "--formatter-property", "print.key=true", "--formatter-property", "print.headers=true"]
    shown = subprocess.run([*console, *words], capture_output=True, check=False, timeout=240)
    assert b"echo-run:demo" in shown.stdout, shown.stderr
    assert b"\tdemo\t" in shown.stdout

    kcat = shutil.which("kcat")
    if kcat is not None:
        words = ["-b", kafka_bootstrap, "-t", namespace.topic(PROGRESS), "-C", "-e", "-q", "-f", "%k %h %S\n"]
        shown = subprocess.run([kcat, *words], capture_output=True, check=False, timeout=240)
        assert b"demo ce_specversion=1.0" in shown.stdout


def test_a_registry_refuses_what_is_not_compatible_and_the_command_says_it(shell: Shell, registry_url: str, namespace: Namespace) -> None:
    shell.environ["ECHO_REGISTRY__URL"] = registry_url
    (subject,) = subjects_of(namespace.topic)["echoswarm.Progress"]
    text = json.dumps({"type": "record", "name": "Progress", "namespace": "echoswarm", "fields": [{"name": "run_id", "type": "long"}]})
    with SchemaRegistryClient({"url": registry_url}) as client:
        client.set_compatibility(subject, "FULL_TRANSITIVE")
        client.register_schema(subject, Schema(text, "AVRO"))
    checked = shell("schemas", "register", "--check")
    assert checked.returncode == 3
    assert f"would be refused: it is not compatible with what is registered under {subject}" in " ".join(checked.stdout.split())
    refused = shell("schemas", "register")
    assert refused.returncode == 1, refused
    assert f"refused echoswarm.Progress under '{subject}'" in " ".join(refused.stderr.split())


def test_tail_shows_records_what_is_none_and_dead_letters(shell: Shell, namespace: Namespace) -> None:
    assert shell("topics", "apply").returncode == 0
    bus = open_bus(load_settings(None, shell.environ), "worker")
    publisher = bus.publisher()
    examples = list(load_examples(TRAJECTORIES).values())
    for record in examples:
        publisher.publish(TRAJECTORIES, record).wait(WAIT_S)
    publisher.publish_bytes(namespace.topic(TRAJECTORIES), b"\x01nonsense", key=b"demo/1").wait(WAIT_S)
    publisher.publish_bytes(f"{namespace.topic(TRAJECTORIES)}.dlq", b"\x01nonsense", headers=[("echo-reason", b"bad_magic")]).wait(WAIT_S)
    publisher.close()

    shown = shell("tail", "trajectories")
    assert shown.returncode == 0, shown.stderr
    assert '"completion": "654321"' in shown.stdout
    assert "echo-version=12" in shown.stdout
    assert "not a record: bad_magic" in shown.stdout
    lines = [json.loads(line) for line in shell("tail", "trajectories", "--json", "--worker", "w1").stdout.splitlines()]
    records = [line["record"]["worker_id"] for line in lines if line["record"]]
    assert records == [name for example in examples if (name := getattr(example, "worker_id", "")) == "w1"] != []
    assert shell("tail", "trajectories", "--group", "demo/nobody", "--json").stdout.count("worker_id") == 0
    assert "echo-reason=bad_magic" in shell("tail", "trajectories.dlq").stdout


def test_mistakes_are_one_sentence_and_a_hint(shell: Shell, tmp_path: Path) -> None:
    unknown = shell("tail", "trajectorys")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 2)
    assert "hint:" in unknown.stderr
    assert shell("schemas", "register").returncode == 2

    (tmp_path / "run.toml").write_text('[kafka]\nbootstrp = "x"\n', encoding="utf-8")
    misspelt = shell("topics", "plan")
    assert misspelt.returncode == 2
    assert "Did you mean 'bootstrap'?" in misspelt.stderr
    assert "Traceback" not in misspelt.stderr
    (tmp_path / "run.toml").unlink()

    shell.environ["ECHO_KAFKA__BOOTSTRAP"] = "127.0.0.1:1"
    unreachable = shell("topics", "plan")
    assert unreachable.returncode == 1
    assert "No broker answers at 127.0.0.1:1." in unreachable.stderr
    shell.environ["ECHO_KAFKA__BOOTSTRAP"] = "embedded"
    nothing = shell("topics", "plan")
    assert nothing.returncode == 2
    assert "echoswarm kafka up" in nothing.stderr


def test_doctor_says_what_to_mend(shell: Shell) -> None:
    sick = shell("doctor")
    assert sick.returncode == 1
    assert "echoswarm topics apply" in sick.stdout
    assert shell("topics", "apply").returncode == 0
    well = shell("doctor")
    assert well.returncode == 0, well.stdout
    assert "all 26 are as the files say" in well.stdout
    assert re.search(r"a record: written in \d+ ms, read in \d+ ms, committed in \d+ ms", well.stdout), well.stdout
    assert "before compression, on each replica" in well.stdout


def test_schemas_check_and_acls_render_need_no_cluster(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    assert shell("schemas", "check").returncode == 0
    assert shell("acls", "render").stdout.startswith("#!/bin/sh")
    assert json.loads(shell("acls", "render", "--format", "json").stdout)[0]["pattern"] in {"literal", "prefixed"}
