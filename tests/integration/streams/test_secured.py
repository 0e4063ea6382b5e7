"""The reward application under its own login: TLS, SCRAM, and the rights that are rendered for its role alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from echo_embedded import EmbeddedKafka
from echo_ops.acls import Acl, Resource, acls_of
from echo_schemas.naming import Namespace
from tests.integration.streams.stage import WAIT_S, Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
_RESOURCES = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
}


@pytest.fixture
def stage(secured_kafka: EmbeddedKafka, namespace: Namespace, tmp_path: Path) -> Iterator[Stage]:
    login = secured_kafka.add_user(f"{namespace.name}.reward", "secret")
    made = Stage(
        tmp_path,
        secured_kafka.bootstrap,
        namespace,
        {"my_rewards.py:brevity": 1.0},
        login=login,
        administrator=secured_kafka.client_properties,
    )
    yield made
    made.close()


def allow(stage: Stage, kind: Resource) -> None:
    """The rights of the reward role on resources of one kind."""
    admin = stage.bus.cluster.admin()
    wanted = [binding(acl) for acl in acls_of(stage.namespace) if acl.principal.endswith(".reward") and acl.resource is kind]
    for created in admin.create_acls(wanted).values():
        created.result(WAIT_S)


def binding(acl: Acl) -> AclBinding:
    operation = {"DescribeConfigs": AclOperation.DESCRIBE_CONFIGS}.get(acl.operation)
    return AclBinding(
        _RESOURCES[acl.resource],
        acl.name,
        ResourcePatternType.PREFIXED if acl.prefixed else ResourcePatternType.LITERAL,
        acl.principal,
        "*",
        operation or AclOperation[acl.operation.upper()],
        AclPermissionType.ALLOW,
    )


def test_the_rights_of_its_role_are_enough_and_without_one_it_says_which(stage: Stage) -> None:
    allow(stage, Resource.TOPIC)
    refused = stage.start("1")
    assert refused.ended() not in {0, None}
    assert f"may not read as the consumer group '{stage.namespace.group('reward', 'main')}'" in " ".join(refused.log.split())

    allow(stage, Resource.GROUP)
    places = stage.publish(trajectory(seq, completion="four") for seq in range(8))
    child = stage.start("2")
    stage.forget(refused)
    stage.wait_for(places)
    assert {reward.value for reward in stage.rewards} == {0.2}
    child.terminate()
    assert child.ended() == 0
    assert stage.outstanding() == 0
