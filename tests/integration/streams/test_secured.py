"""The reward application under its own login: TLS, SCRAM, and the rights that are rendered for its role alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from echo_embedded import EmbeddedKafka
from echo_ops.access import as_binding
from echo_ops.cli.output import ExitCode
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of_role
from tests.integration.streams.stage import WAIT_S, Stage
from tests.unit.core.records import trajectory

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


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


def allow(stage: Stage, *acls: Acl) -> None:
    """Add these rights."""
    admin = stage.bus.cluster.admin()
    for created in admin.create_acls([as_binding(acl) for acl in acls]).values():
        created.result(WAIT_S)


def test_the_rights_of_its_role_are_enough_and_without_one_it_says_which(stage: Stage) -> None:
    rights = acls_of_role("reward", stage.namespace)
    (group,) = (acl for acl in rights if acl.resource is Resource.GROUP)
    # With DESCRIBE the group's coordinator is found, and joining is refused: of that nobody would hear from Faust's client.
    allow(stage, *(acl for acl in rights if acl is not group), replace(group, operation="Describe"))
    refused = stage.start("1")
    assert refused.ended() == ExitCode.FAILED
    assert f"refuses {group.principal} {group.words}" in " ".join(refused.log.split())

    allow(stage, group)
    places = stage.publish(trajectory(seq, completion="four") for seq in range(8))
    child = stage.start("2")
    stage.forget(refused)
    stage.wait_for(places)
    assert {reward.value for reward in stage.rewards} == {0.2}
    child.terminate()
    assert child.ended() == 0
    assert stage.outstanding() == 0
