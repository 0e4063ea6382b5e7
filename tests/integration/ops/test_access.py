"""The rendered access lists on Kafka's own authorizer: each role can do all of its work, and nothing beside it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
)

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.consumer_queries import num_partitions
from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.kafka_errors import check_error
from echo_bus.client.profiles import group_properties
from echo_bus.clock import Deadline
from echo_bus.errors import NotAuthorized
from echo_embedded import EmbeddedKafka
from echo_embedded.tools import tool_command
from echo_ops.access import as_binding
from echo_ops.topic_admin import TopicAdmin
from echo_ops.topic_rendering import as_commands
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import EchoError
from echo_schemas.naming import Namespace
from echo_schemas.rights import acls_of
from echo_schemas.roles import Role, load_roles
from echo_schemas.topic_files import TopicSpec, load_topic_specs
from echo_schemas.topics import WEIGHT_CHUNKS
from tests.examples import load_examples

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
NAMESPACE = Namespace("echo.access")
SPECS = load_topic_specs()
ROLES = list(load_roles().values())


@pytest.fixture(scope="module")
def administrator(secured_kafka: EmbeddedKafka) -> KafkaCluster:
    """The cluster as its administrator, with all topics, one record on each, and everything allowed that is rendered."""
    cluster = KafkaCluster(secured_kafka.bootstrap, secured_kafka.client_properties)
    topics = TopicAdmin(cluster, NAMESPACE)
    topics.apply(topics.plan())
    admin = cluster.admin()
    for created in admin.create_acls([as_binding(acl) for acl in acls_of(NAMESPACE)]).values():
        created.result(WAIT_S)
    publisher = _bus(cluster, "administrator").publisher()
    for spec in SPECS:
        publisher.publish_bytes(_physical(spec), _value_of(spec), key=b"k", partition=0).wait(WAIT_S)
    publisher.close()
    return cluster


@pytest.fixture(params=ROLES, ids=lambda role: role.name)
def role(request: pytest.FixtureRequest) -> Role:
    """Every role in turn."""
    found: Role = request.param
    return found


@pytest.fixture
def bus(administrator: KafkaCluster, secured_kafka: EmbeddedKafka, role: Role) -> Bus:
    """The bus of one of several processes of `role`, under the role's login."""
    login = secured_kafka.add_user(f"{NAMESPACE.name}.{role.name}", "secret")
    return _bus(KafkaCluster(administrator.bootstrap, login), f"{role.name}.p1")


def test_a_role_can_write_its_topics_and_no_others(bus: Bus, role: Role) -> None:
    publisher = bus.publisher()
    for spec in SPECS:
        if role.name in spec.producers:
            publisher.publish_bytes(_physical(spec), _value_of(spec), key=b"k", partition=0).wait(WAIT_S)
    publisher.close()
    foreign = next(spec for spec in SPECS if role.name not in spec.producers)
    refused = bus.publisher()
    with pytest.raises(NotAuthorized, match="WRITE on the topic"):
        refused.publish_bytes(_physical(foreign), b"x", key=b"k", partition=0).wait(WAIT_S)
    with pytest.raises(NotAuthorized):
        refused.close()


def test_a_role_can_read_its_topics_by_position_and_no_others(bus: Bus, role: Role) -> None:
    for spec in SPECS:
        if role.name in spec.consumers or role.reads_all_topics:
            assert _first_value(bus, spec), f"{role.name} read nothing from {spec.name}"
        elif role.name not in spec.producers:
            with pytest.raises(NotAuthorized):
                _first_value(bus, spec)


def test_a_worker_fetches_weights_under_its_own_login(administrator: KafkaCluster, secured_kafka: EmbeddedKafka) -> None:
    learner = _bus(administrator, "learner")
    publisher = learner.publisher(profiles.PRODUCER_BLOBS)
    blob = learner.blob_writer(publisher).write(WEIGHT_CHUNKS, "r", "v/0/abc", b"weights")
    publisher.close()
    login = secured_kafka.add_user(f"{NAMESPACE.name}.worker", "secret")
    reader = _bus(KafkaCluster(administrator.bootstrap, login), "worker.p1").blob_reader()
    reader.warm(WEIGHT_CHUNKS)
    assert reader.read(blob, "r") == b"weights"
    reader.close()


def test_a_role_can_work_in_its_groups_and_no_others(bus: Bus, role: Role) -> None:
    readable = [_physical(spec) for spec in SPECS if role.name in spec.consumers or role.reads_all_topics]
    for group in role.groups:
        _join(bus, NAMESPACE.group(group.replace("*", "anything")), readable[0])
    if readable:
        with pytest.raises(NotAuthorized):
            _join(bus, NAMESPACE.group("somebody.else"), readable[0])


def test_a_role_can_see_the_lag_that_it_places_work_by(bus: Bus, role: Role) -> None:
    admin = bus.cluster.admin()
    for group in role.watches_groups:
        name = NAMESPACE.group(group.replace("*", "anything"))
        place = TopicPartition(f"{NAMESPACE.name}.{'requests' if group == 'worker' else 'trajectories'}", 0)
        (committed,) = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(name, [place])]).values()
        assert committed.result(WAIT_S).topic_partitions[0].error is None
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]  # confluent-kafka leaves it so
        (end,) = admin.list_offsets({place: latest}).values()
        assert end.result(WAIT_S).offset >= 1


@pytest.mark.parametrize("transactional_id", ["learner", "feeder"])
def test_only_its_own_role_gets_a_transactional_id(bus: Bus, role: Role, transactional_id: str) -> None:
    writer = bus.transactions(transactional_id)
    if transactional_id in role.transactional_ids:
        writer.start()
    else:
        with pytest.raises(EchoError, match="WRITE on the transactional-id"):
            writer.start()
    writer.close()


def test_an_operator_can_check_topics_and_change_none(administrator: KafkaCluster, secured_kafka: EmbeddedKafka) -> None:
    login = secured_kafka.add_user(f"{NAMESPACE.name}.operator", "secret")
    operator = TopicAdmin(KafkaCluster(administrator.bootstrap, login), NAMESPACE)
    assert operator.plan().is_empty
    elsewhere = TopicAdmin(KafkaCluster(administrator.bootstrap, login), Namespace("echo.other"))
    with pytest.raises(NotAuthorized, match="does not allow"):
        elsewhere.apply(elsewhere.plan())


def test_the_rendered_script_leaves_exactly_the_rendered_permissions(
    administrator: KafkaCluster, secured_kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    # One role under a principal of its own: every call of the script starts a JVM.
    wanted = [acl for acl in acls_of(NAMESPACE, {"reward": "User:by script"}) if acl.principal == "User:by script"]
    tool = tmp_path / "kafka-acls.sh"
    words = " ".join(f"'{word}'" for word in tool_command("kafka-acls"))
    tool.write_text(f'#!/bin/sh\nexec {words} "$@"\n', encoding="utf-8")
    tool.chmod(0o700)
    properties = secured_kafka.client_properties
    login = f'username="{properties["sasl.username"]}" password="{properties["sasl.password"]}"'
    client = tmp_path / "client.properties"
    client.write_text(
        "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\nssl.truststore.type=PEM\n"
        f"ssl.truststore.location={properties['ssl.ca.location']}\n"
        f"sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required {login};\n"
        # Its own minute is too short for a machine that is busy with something else.
        "default.api.timeout.ms=300000\nrequest.timeout.ms=120000\n",
        encoding="utf-8",
    )
    environ = {**os.environ, "KAFKA_ACLS": str(tool), "COMMAND_CONFIG": str(client)}
    script = as_commands(wanted, secured_kafka.bootstrap)
    done = subprocess.run(["sh", "-c", script], env=environ, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    # None: any name, any host.
    anything: Any = None
    everything = AclBindingFilter(
        ResourceType.ANY, anything, ResourcePatternType.ANY, "User:by script", anything, AclOperation.ANY, AclPermissionType.ANY
    )
    # Kept in a variable: an admin client that is collected while its future runs cancels it.
    admin = administrator.admin()
    rendered = {_words(as_binding(acl)) for acl in wanted}
    # A broker hears of a rule a moment after the controller has it.
    deadline = Deadline.after(WAIT_S)
    while (found := {_words(binding) for binding in admin.describe_acls(everything).result(WAIT_S)}) != rendered:
        assert not deadline.expired(), f"waited for the rendered rules: {found ^ rendered}"


def _words(binding: AclBinding) -> tuple[str, ...]:
    return (str(binding.restype), binding.name, str(binding.resource_pattern_type), binding.principal, str(binding.operation))


def _bus(cluster: KafkaCluster, role: str) -> Bus:
    return Bus(cluster=cluster, namespace=NAMESPACE, role=role)


def _physical(spec: TopicSpec) -> str:
    return f"{NAMESPACE.name}.{spec.name}"


def _value_of(spec: TopicSpec) -> bytes:
    if spec.topic is None:
        return b"dead"
    return lock_file_codec().encode(next(iter(load_examples(spec.topic).values())))


def _first_value(bus: Bus, spec: TopicSpec) -> bytes | None:
    """The first value of partition 0. Raises NotAuthorized."""
    consumer = bus.cluster.consumer({**profiles.READER, "client.id": bus.client_id})
    try:
        # A client that is not allowed to see a topic waits for it silently: asked for first, as every reader of the bus does.
        assert num_partitions(consumer, _physical(spec)) == spec.partitions
        consumer.assign([TopicPartition(_physical(spec), 0, 0)])
        deadline = Deadline.after(WAIT_S)
        while not deadline.expired():
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                return message.value()
            check_error(error, message)
    finally:
        consumer.close()
    raise AssertionError(f"waited {WAIT_S} s for the first record of {spec.name}")


def _join(bus: Bus, group: str, topic: str) -> None:
    """Join, get an assignment, commit, leave. Raises NotAuthorized."""
    consumer = bus.cluster.consumer(group_properties(group, client_id=bus.client_id))
    try:
        consumer.subscribe([topic])
        deadline = Deadline.after(WAIT_S)
        while not consumer.assignment():
            assert not deadline.expired(), f"waited {WAIT_S} s for an assignment in {group}"
            message = consumer.poll(0.5)
            if message is not None and (error := message.error()) is not None:
                check_error(error, message, group)
        consumer.commit(offsets=[TopicPartition(topic, consumer.assignment()[0].partition, 0)], asynchronous=False)
    finally:
        consumer.close()
