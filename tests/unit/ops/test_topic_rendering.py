"""Topics and access in the words of other tools: each says the same as the files."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml

from echo_ops.topic_rendering import TopicFormat, kafka_users, render_topics
from echo_schemas.naming import Namespace
from echo_schemas.rights import Resource, acls_of
from echo_schemas.roles import load_roles
from echo_schemas.topic_files import load_topic_specs

NAMESPACE = Namespace("echo.demo")
SPECS = {f"echo.demo.{spec.name}": spec for spec in load_topic_specs()}


def rendered(form: TopicFormat, **options: Any) -> str:
    return render_topics(form, NAMESPACE, cluster="my-cluster", **options)


def test_the_script_makes_every_topic_as_its_file_says() -> None:
    calls = [shlex.split(line) for line in rendered(TopicFormat.COMMANDS).splitlines() if line.startswith("topic echo.")]
    assert [call[1] for call in calls] == list(SPECS)
    for _, name, *words in calls:
        options = list(zip(words[::2], words[1::2], strict=True))
        assert dict(options)["--partitions"] == str(SPECS[name].partitions)
        assert {value for option, value in options if option == "--config"} == {f"{k}={v}" for k, v in SPECS[name].config.items()}


def test_strimzi_has_a_topic_for_each_and_a_user_for_each_role() -> None:
    topics = list(yaml.safe_load_all(rendered(TopicFormat.STRIMZI, replicas=1)))
    assert {topic["spec"]["topicName"] for topic in topics} == set(SPECS)
    assert {topic["spec"]["replicas"] for topic in topics} == {1}
    assert all(re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", topic["metadata"]["name"]) for topic in topics)
    users = {user["metadata"]["name"]: user for user in yaml.safe_load_all(kafka_users(NAMESPACE, "my-cluster"))}
    assert set(users) == {NAMESPACE.client_id(role) for role in load_roles()}
    said = {
        (name, acl["resource"]["type"], acl["resource"]["name"], acl["resource"]["patternType"] == "prefix", operation)
        for name, user in users.items()
        for acl in user["spec"]["authorization"]["acls"]
        for operation in acl["operations"]
    }
    kinds = {Resource.TOPIC: "topic", Resource.GROUP: "group", Resource.TRANSACTIONAL_ID: "transactionalId"}
    assert said == {
        (acl.principal.removeprefix("User:"), kinds[acl.resource], acl.name, acl.prefixed, acl.operation) for acl in acls_of(NAMESPACE)
    }


def test_terraform_has_a_resource_for_each() -> None:
    text = rendered(TopicFormat.TERRAFORM)
    assert re.findall(r'^  name               = "(.*)"$', text, re.MULTILINE) == list(SPECS)
    assert len(set(re.findall(r'^resource "kafka_topic" "(\w+)" \{$', text, re.MULTILINE))) == len(SPECS)
    assert text.count("{") == text.count("}")


def test_asyncapi_has_channels_messages_and_operations_and_no_reference_leads_nowhere() -> None:
    document = yaml.safe_load(rendered(TopicFormat.ASYNCAPI))
    assert {channel["address"] for channel in document["channels"].values()} == set(SPECS)
    for pointer in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)):
        node = document
        for part in pointer.split("/"):
            node = node[part]
    trajectory = document["components"]["messages"]["Trajectory"]["payload"]["schema"]
    assert trajectory["type"] == "record"
    assert "worker.send.trajectories" in document["operations"]
    assert "learner.receive.trajectories" in document["operations"]
    assert "learner.send.trajectories" not in document["operations"]


@pytest.mark.parametrize("form", TopicFormat)
def test_the_same_text_every_time(form: TopicFormat) -> None:
    assert rendered(form) == rendered(form)
