"""Access lists: everything that a role needs, and nothing else."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
import yaml

from echo_ops.report import observer
from echo_ops.topic_rendering import as_commands, as_plain
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of
from echo_schemas.roles import load_roles
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import CONTROL, REWARDS

NAMESPACE = Namespace("echo.demo")
ACLS = acls_of(NAMESPACE)


def allowed(role: str, resource: Resource, operation: str) -> set[str]:
    return {acl.name for acl in ACLS if (acl.principal, acl.resource, acl.operation) == (f"User:echo.demo.{role}", resource, operation)}


@pytest.mark.parametrize("role", sorted(load_roles()))
def test_a_role_writes_exactly_what_the_topic_files_say(role: str) -> None:
    expected = {f"echo.demo.{spec.name}" for spec in load_topic_specs() if role in spec.producers}
    assert allowed(role, Resource.TOPIC, "Write") == expected


@pytest.mark.parametrize("role", sorted(name for name, role in load_roles().items() if not role.reads_all_topics))
def test_a_role_reads_exactly_what_the_topic_files_say(role: str) -> None:
    expected = {f"echo.demo.{spec.name}" for spec in load_topic_specs() if role in spec.consumers}
    assert allowed(role, Resource.TOPIC, "Read") == expected


def test_the_live_screen_may_read_what_it_shows() -> None:
    wanted = {NAMESPACE.topic(topic) for topic in (*observer._TOPICS, REWARDS, CONTROL)}
    assert wanted <= allowed("view", Resource.TOPIC, "Read")


def test_nobody_may_create_or_alter_anything() -> None:
    assert {acl.operation for acl in ACLS} <= {"Read", "Write", "Describe", "DescribeConfigs"}
    found = {acl.principal for acl in ACLS if acl.operation == "DescribeConfigs"}
    assert found == {f"User:echo.demo.{role}" for role in ("operator", "rescore", "learner")}
    assert allowed("learner", Resource.TOPIC, "DescribeConfigs") == {"echo.demo.weights.chunks"}


@pytest.mark.parametrize("process", ["", ".w1"], ids=["unnamed", "named"])
@pytest.mark.parametrize("role", sorted(load_roles()))
def test_a_reader_without_a_group_may_look_its_name_up(role: str, process: str) -> None:
    # The client asks for the coordinator of the group that it is configured with, and reports a refusal as an error of every read.
    wanted = f"{NAMESPACE.client_id(role + process)}.reader"
    own = [acl for acl in ACLS if acl.principal == f"User:{NAMESPACE.client_id(role)}" and acl.resource is Resource.GROUP]
    assert any(wanted.startswith(acl.name) if acl.prefixed else acl.name == wanted for acl in own)


def test_describe_is_not_listed_beside_what_implies_it() -> None:
    strong = {(acl.principal, acl.resource, acl.name) for acl in ACLS if acl.operation in {"Read", "Write"}}
    described = {(acl.principal, acl.resource, acl.name) for acl in ACLS if acl.operation == "Describe"}
    assert described.isdisjoint(strong)


def test_who_has_transactional_ids() -> None:
    found = {acl.principal: acl.name for acl in ACLS if acl.resource is Resource.TRANSACTIONAL_ID}
    assert found == {
        "User:echo.demo.learner": "echo.demo.learner",
        "User:echo.demo.feeder": "echo.demo.feeder",
        "User:echo.demo.offline": "echo.demo.feeder",
        "User:echo.demo.coordinator": "echo.demo.coordinator",
        "User:echo.demo.rescore": "echo.demo.rescore.",
        "User:echo.demo.redrive": "echo.demo.redrive",
    }


def test_reward_applications_have_a_prefix_of_groups_and_workers_one_group() -> None:
    assert allowed("worker", Resource.GROUP, "Read") == {"echo.demo.worker"}
    (prefixed,) = [acl for acl in ACLS if acl.principal == "User:echo.demo.reward" and acl.resource is Resource.GROUP]
    assert (prefixed.name, prefixed.prefixed) == ("echo.demo.reward.", True)


def test_every_resource_is_below_the_namespace() -> None:
    assert all(acl.name.startswith("echo.demo.") for acl in ACLS)


def test_principals_can_be_named() -> None:
    renamed = acls_of(NAMESPACE, {"worker": "User:CN=gpu-pool"})
    assert "User:CN=gpu-pool" in {acl.principal for acl in renamed}
    assert "User:echo.demo.worker" not in {acl.principal for acl in renamed}


def test_the_three_forms_say_the_same() -> None:
    plain = as_plain(ACLS)
    assert json.loads(json.dumps(plain)) == yaml.safe_load(yaml.safe_dump(plain))
    script = as_commands(ACLS, "broker:9092").replace("\\\n", "")
    calls = [shlex.split(call) for call in script.split("\n\n")[1:]]
    assert sorted(acl for call in calls for acl in read_back(call)) == ACLS
    assert len(calls) < len(ACLS) / 3, "names that share the rest are one call: each starts a JVM"


def read_back(call: list[str]) -> Iterator[Acl]:
    """The permissions that one call of kafka-acls adds."""
    assert call[:2] == ["acls", "--add"]
    options = list(zip(call[2::2], call[3::2], strict=True))
    single = {option: value for option, value in options if option in {"--allow-principal", "--operation", "--resource-pattern-type"}}
    for option, value in options:
        if option not in single:
            prefixed = single.get("--resource-pattern-type") == "prefixed"
            yield Acl(single["--allow-principal"], Resource(option.removeprefix("--")), value, single["--operation"], prefixed)


def test_names_are_quoted_for_the_shell() -> None:
    acl = Acl("User:CN=a b;rm", Resource.TOPIC, "t", "Read")
    script = as_commands([acl], "b:1;rm")
    assert "'User:CN=a b;rm'" in script
    assert "BOOTSTRAP=${BOOTSTRAP:-'b:1;rm'}" in script
