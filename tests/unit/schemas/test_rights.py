"""What a role may do: each permission that is missing is found, and said so that it can be typed."""

from __future__ import annotations

import shlex

import pytest

from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of, acls_of_role, lacking
from echo_schemas.roles import load_roles

NAMESPACE = Namespace("echo.demo")
LOOKED_AT = {Resource.TOPIC, Resource.GROUP}


def cluster_of(acls: list[Acl]) -> tuple[dict[str, set[str]], set[str]]:
    """What a cluster with these entries says of all topics, and of no group."""
    allowed: dict[str, set[str]] = {acl.name: set() for acl in acls_of(NAMESPACE) if acl.resource is Resource.TOPIC}
    for acl in acls:
        if acl.resource is Resource.TOPIC:
            # Each operation of ours implies DESCRIBE, in Kafka's rules.
            allowed[acl.name] |= {acl.operation} | ({"Describe"} if acl.operation in {"Read", "Write"} else set())
    groups, open_groups = ({acl.name for acl in each if acl.resource is Resource.GROUP} for each in (acls_of(NAMESPACE), acls))
    return allowed, groups - open_groups


@pytest.mark.parametrize("role", sorted(load_roles()))
def test_each_permission_that_is_missing_is_found_and_no_other(role: str) -> None:
    wanted = acls_of_role(role, NAMESPACE)
    assert lacking(wanted, *cluster_of(wanted)) == []
    for taken in wanted:
        if taken.resource in LOOKED_AT:
            left = [acl for acl in wanted if acl != taken]
            assert lacking(wanted, *cluster_of(left)) == [taken]


def test_a_topic_that_is_not_there_is_not_a_right_that_is_missing() -> None:
    assert lacking(acls_of_role("worker", NAMESPACE), {}, set()) == []


def test_all_roles_together_are_what_is_rendered() -> None:
    assert acls_of(NAMESPACE) == sorted({acl for role in load_roles() for acl in acls_of_role(role, NAMESPACE)})


@pytest.mark.parametrize(
    ("acl", "words", "options"),
    [
        (Acl("User:a b", Resource.TOPIC, "n.steps", "Read"), "READ on the topic n.steps", ["--topic", "n.steps"]),
        (
            Acl("User:x", Resource.GROUP, "n.reward.", "Describe", prefixed=True),
            "DESCRIBE on every group below n.reward",
            ["--group", "n.reward.", "--resource-pattern-type", "prefixed"],
        ),
        (
            Acl("User:x", Resource.TRANSACTIONAL_ID, "n.learner", "Write"),
            "WRITE on the transactional-id n.learner",
            ["--transactional-id", "n.learner"],
        ),
    ],
)
def test_a_permission_in_words_and_as_a_command(acl: Acl, words: str, options: list[str]) -> None:
    assert acl.words == words
    call = shlex.split(acl.command("b:1"))
    assert call[:6] == ["kafka-acls.sh", "--bootstrap-server", "b:1", "--add", "--allow-principal", acl.principal]
    assert call[6:] == ["--operation", acl.operation, *options]
