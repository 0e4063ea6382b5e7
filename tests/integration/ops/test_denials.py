"""The denial matrix: every role × every operation on everything that there is. What its access lists do not allow, the broker refuses."""

from __future__ import annotations

from collections import Counter

import pytest
from confluent_kafka.admin import NewTopic

from echo_bus.client.kafka import KafkaCluster
from echo_embedded import EmbeddedKafka
from echo_ops.access import as_binding
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, acls_of
from echo_schemas.roles import load_roles
from echo_schemas.topic_files import load_topic_specs
from tests.integration.ops.requests_by_operation import Cell, cells_of, refused

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
NAMESPACE = Namespace("echo.denials")
ELSEWHERE = "echo.elsewhere.steps"
TOPICS = [*(f"{NAMESPACE.name}.{spec.name}" for spec in load_topic_specs()), ELSEWHERE]
# Kafka's own rules: these operations include that one.
INCLUDED_IN = {"Describe": {"Read", "Write", "Delete", "Alter"}, "DescribeConfigs": {"AlterConfigs"}}
LEAST_CELLS = 150
Logins = dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def logins(secured_kafka: EmbeddedKafka) -> Logins:
    """Every topic, somebody else's too, what is rendered for all roles, and a user for each."""
    admin = KafkaCluster(secured_kafka.bootstrap, secured_kafka.client_properties).admin()
    bindings = [as_binding(acl) for acl in acls_of(NAMESPACE)]
    for done in (*admin.create_topics([NewTopic(name, 1, 1) for name in TOPICS]).values(), *admin.create_acls(bindings).values()):
        done.result(WAIT_S)
    logins = {role: secured_kafka.add_user(f"{NAMESPACE.name}.{role}", "secret") for role in sorted(load_roles())}
    # A broker hears of changes in their order, a moment after the controller: who knows the last user knows all.
    KafkaCluster(secured_kafka.bootstrap, logins[max(logins)]).check(WAIT_S)
    return logins


def names_of(kind: str) -> list[str]:
    """Every group or transactional id that some role has, one of each prefix, one below each role's own name, and somebody else's."""
    roles = load_roles().values()
    names = {name.replace("*", "anything") for role in roles for name in getattr(role, kind)}
    below = {f"{role.name}.reader" for role in roles} if kind == "groups" else set()
    return [*sorted(f"{NAMESPACE.name}.{name}" for name in names | below), f"echo.elsewhere.{kind}"]


def is_allowed(acls: list[Acl], cell: Cell) -> bool:
    """What Kafka's documentation says of these entries, worked out here a second time."""
    sufficient = {cell.operation} | INCLUDED_IN.get(cell.operation, set())
    return any(
        acl.resource.value == cell.resource
        and acl.operation in sufficient
        and (cell.name.startswith(acl.name) if acl.prefixed else cell.name == acl.name)
        for acl in acls
    )


@pytest.mark.parametrize("role", sorted(load_roles()))
def test_the_broker_allows_a_role_what_is_rendered_for_it_and_nothing_else(secured_kafka: EmbeddedKafka, logins: Logins, role: str) -> None:
    principal = f"{NAMESPACE.name}.{role}"
    acls = [acl for acl in acls_of(NAMESPACE) if acl.principal == f"User:{principal}"]
    cells = list(cells_of(TOPICS, names_of("groups"), names_of("transactional_ids")))
    found = refused(secured_kafka.bootstrap, logins[role], cells)
    wrong = [
        f"{cell.by} on the {cell.resource} {cell.name} is {'refused' if is_refused else 'allowed'}"
        for cell, is_refused in zip(cells, found, strict=True)
        if is_refused == is_allowed(acls, cell)
    ]
    assert not wrong
    # A request that always answers the same would prove nothing.
    assert found.count(True) >= LEAST_CELLS, Counter(found)
    assert found.count(False) >= len(acls), Counter(found)
