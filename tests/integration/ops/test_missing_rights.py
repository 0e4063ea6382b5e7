"""A permission of each kind taken away: each role that needs it is told which, on Kafka's own authorizer."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.admin import AclBindingFilter, NewTopic

from echo_bus.bus import Bus
from echo_bus.client.kafka import KafkaCluster
from echo_bus.clock import Deadline
from echo_bus.errors import NotAuthorized
from echo_embedded import EmbeddedKafka
from echo_ops.access import as_binding
from echo_runtime.rights import check_rights, find_lacking
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of, acls_of_role
from echo_schemas.roles import load_roles
from echo_schemas.topic_files import load_topic_specs
from echo_settings import Settings, load_settings
from tests.thorough import only_thorough

pytestmark = pytest.mark.kafka
WAIT_S = 60.0
DESCRIBING = {"Describe", "Read", "Write"}
NAMESPACE = Namespace("echo.missing")
# Role → what it loses: one of each kind.
TAKEN = {
    "coordinator": (Resource.TOPIC, "requests", "Describe"),
    "feeder": (Resource.GROUP, "worker", "Describe"),
    "learner": (Resource.TOPIC, "weights.chunks", "DescribeConfigs"),
    "offline": (Resource.TRANSACTIONAL_ID, "feeder", "Write"),
    "reward": (Resource.GROUP, "reward.", "Read"),
    "view": (Resource.TOPIC, "steps", "Read"),
    "worker": (Resource.TOPIC, "trajectories", "Write"),
}


def taken_from(role: str) -> Acl:
    resource, name, operation = TAKEN[role]
    wanted = (resource, f"{NAMESPACE.name}.{name}", operation)
    (acl,) = (acl for acl in acls_of_role(role, NAMESPACE) if (acl.resource, acl.name, acl.operation) == wanted)
    return acl


def take_away(admin: Any, acl: Acl) -> None:
    entry = as_binding(acl)
    named = AclBindingFilter(
        entry.restype, entry.name, entry.resource_pattern_type, entry.principal, entry.host, entry.operation, entry.permission_type
    )
    for deleted in admin.delete_acls([named]).values():
        assert len(deleted.result(WAIT_S)) == 1


@pytest.fixture(scope="module")
def logins(secured_kafka: EmbeddedKafka) -> dict[str, dict[str, str]]:
    """A user for each of the roles, with all of its rights but one."""
    admin = KafkaCluster(secured_kafka.bootstrap, secured_kafka.client_properties).admin()
    topics = [NewTopic(f"{NAMESPACE.name}.{spec.name}", 1, 1) for spec in load_topic_specs()]
    acls = [as_binding(acl) for acl in acls_of(NAMESPACE)]
    for made in (*admin.create_topics(topics).values(), *admin.create_acls(acls).values()):
        made.result(WAIT_S)
    for role in TAKEN:
        take_away(admin, taken_from(role))
    logins = {role: secured_kafka.add_user(f"{NAMESPACE.name}.{role}", "secret") for role in TAKEN}
    # A broker hears of changes in their order: who knows the last user knows all.
    KafkaCluster(secured_kafka.bootstrap, logins[max(logins)]).check(WAIT_S)
    return logins


def settings_of(kafka: EmbeddedKafka, login: dict[str, str], namespace: Namespace = NAMESPACE) -> Settings:
    settings = load_settings(None, {"ECHO_KAFKA__BOOTSTRAP": kafka.bootstrap, "ECHO_KAFKA__NAMESPACE": namespace.name})
    return settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"client": login})})


def check_until_answered(settings: Settings, role: str) -> None:
    """A busy machine may leave the first question unanswered."""
    deadline = Deadline.after(WAIT_S)
    while not check_rights(settings, role):
        assert not deadline.expired(), "waited for the cluster to answer"


@pytest.mark.parametrize("role", [role for role, taken in TAKEN.items() if taken[0] is not Resource.TRANSACTIONAL_ID])
def test_a_role_is_told_what_it_lacks_before_it_begins(secured_kafka: EmbeddedKafka, logins: dict[str, dict[str, str]], role: str) -> None:
    taken, settings = taken_from(role), settings_of(secured_kafka, logins[role])
    with pytest.raises(NotAuthorized) as caught:
        check_until_answered(settings, role)
    assert caught.value.message == f"The cluster refuses {taken.principal} {taken.words}."
    assert taken.command(secured_kafka.bootstrap) in caught.value.hint


@only_thorough
@pytest.mark.parametrize("role", sorted(load_roles()))
def test_each_grant_of_a_role_is_named_when_it_alone_is_missing(secured_kafka: EmbeddedKafka, role: str) -> None:
    namespace = Namespace(f"echo.each.{role}")
    cluster = KafkaCluster(secured_kafka.bootstrap, secured_kafka.client_properties)
    admin, wanted = cluster.admin(), acls_of_role(role, namespace)
    topics = [NewTopic(f"{namespace.name}.{spec.name}", 1, 1) for spec in load_topic_specs()]
    for made in (*admin.create_topics(topics).values(), *admin.create_acls([as_binding(acl) for acl in wanted]).values()):
        made.result(WAIT_S)
    login = secured_kafka.add_user(f"{namespace.name}.{role}", "secret")
    settings = settings_of(secured_kafka, login, namespace)
    for acl in (acl for acl in wanted if acl.resource is not Resource.TRANSACTIONAL_ID):
        take_away(admin, acl)
        said, deadline = "", Deadline.after(WAIT_S)
        # Without a right that implies `Describe` the broker says nothing of a topic, so all that the role needs there is named.
        there = [other for other in wanted if (other.resource, other.name) == (acl.resource, acl.name)]
        is_silent = acl.resource is Resource.TOPIC and not any(other.operation in DESCRIBING for other in there if other != acl)
        expected = {other.words for other in there} if is_silent else {acl.words}
        named: set[str] = set()
        # The broker hears of each change a moment later.
        while named != expected:
            assert not deadline.expired(), f"waited for a sentence about {acl.words}; the last one: {said!r}"
            try:
                check_rights(settings, role)
            except NotAuthorized as exc:
                said = exc.message
                named = set(said.removeprefix(f"The cluster refuses {acl.principal} ").removesuffix(".").split(", "))
        for given in admin.create_acls([as_binding(acl)]).values():
            given.result(WAIT_S)


def test_a_transactional_id_says_so_when_it_is_taken(secured_kafka: EmbeddedKafka, logins: dict[str, dict[str, str]]) -> None:
    cluster = KafkaCluster(secured_kafka.bootstrap, logins["offline"])
    assert find_lacking(cluster, acls_of_role("offline", NAMESPACE), WAIT_S) == []
    bus = Bus(cluster=cluster, namespace=NAMESPACE, role="offline")
    writer = bus.transactions("feeder")
    with pytest.raises(NotAuthorized, match=rf"WRITE on the transactional-id {NAMESPACE.name}\.feeder"):
        writer.start()
    writer.close()


def test_a_wrong_password_is_said_and_not_waited_for(secured_kafka: EmbeddedKafka, logins: dict[str, dict[str, str]]) -> None:
    settings = settings_of(secured_kafka, {**logins["worker"], "sasl.password": "another"})
    with pytest.raises(NotAuthorized, match="refused the login") as caught:
        check_until_answered(settings, "worker")
    assert "another" not in str(caught.value)
