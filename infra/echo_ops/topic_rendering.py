"""The topics and access lists of a namespace as input for other tools: Kafka's scripts, Strimzi, Terraform, AsyncAPI. Pure."""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any

import yaml

from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of
from echo_schemas.roles import load_roles
from echo_schemas.schemas import newest
from echo_schemas.topic_files import TopicSpec, load_topic_specs

_LABEL = "strimzi.io/cluster"
# Strimzi 0.49 and newer; 1.0 knows no older one.
_STRIMZI = "kafka.strimzi.io/v1"
_HEADERS = {
    "echo-run": "The run; readers skip records of other runs.",
    "echo-group": "The group, if the record belongs to one.",
    "echo-version": "The oldest version that sampled it, if it may become stale.",
    "echo-signature": "A signature of this and at most fifteen other records: key, Ed25519 signature, digests (docs/trust.md).",
    "traceparent": "W3C Trace Context, if its group is traced.",
    "ce_source": "The writer's client id.",
    "ce_type": "The record's type, as a CloudEvent.",
}


class TopicFormat(StrEnum):
    """What `topics render` prints."""

    COMMANDS = "commands"
    STRIMZI = "strimzi"
    TERRAFORM = "terraform"
    ASYNCAPI = "asyncapi"


def render_topics(form: TopicFormat, namespace: Namespace, *, cluster: str, replicas: int | None = None) -> str:
    """The topics as text. `cluster`: its address, or the name of Strimzi's cluster; `replicas`: instead of the files' number."""
    specs = [spec if replicas is None else spec.fitted_to(replicas) for spec in load_topic_specs()]
    match form:
        case TopicFormat.COMMANDS:
            return "\n".join(_commands(specs, namespace, cluster)) + "\n"
        case TopicFormat.STRIMZI:
            return yaml.safe_dump_all([_kafka_topic(spec, namespace, cluster) for spec in specs], sort_keys=False)
        case TopicFormat.TERRAFORM:
            return "\n".join(_terraform(spec, namespace) for spec in specs)
        case TopicFormat.ASYNCAPI:
            return yaml.safe_dump(asyncapi(specs, namespace), sort_keys=False, allow_unicode=True)


def kafka_users(namespace: Namespace, cluster: str) -> str:
    """Strimzi's KafkaUser for each role, with its access and a SCRAM password that Strimzi makes, as YAML."""
    by_role = defaultdict(list)
    for acl in acls_of(namespace, {role: role for role in load_roles()}):
        by_role[acl.principal].append(acl)
    return yaml.safe_dump_all([_kafka_user(role, acls, namespace, cluster) for role, acls in by_role.items()], sort_keys=False)


def _commands(specs: Sequence[TopicSpec], namespace: Namespace, bootstrap: str) -> Iterator[str]:
    yield "#!/bin/sh"
    yield "set -eu"
    yield f"BOOTSTRAP=${{BOOTSTRAP:-{shlex.quote(bootstrap)}}}"
    yield "topic() {"
    yield '  "${KAFKA_TOPICS:-kafka-topics.sh}" --bootstrap-server "$BOOTSTRAP" ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} \\'
    yield '    --create --if-not-exists --topic "$@"'
    yield "}"
    for spec in specs:
        words = [f"{namespace.name}.{spec.name}", "--partitions", str(spec.partitions)]
        words += ["--replication-factor", str(spec.replication_factor)]
        words += [word for key, value in spec.config.items() for word in ("--config", f"{key}={value}")]
        yield f"topic {shlex.join(words)}"


def _kafka_topic(spec: TopicSpec, namespace: Namespace, cluster: str) -> dict[str, Any]:
    physical = f"{namespace.name}.{spec.name}"
    return {
        "apiVersion": _STRIMZI,
        "kind": "KafkaTopic",
        "metadata": {"name": physical, "labels": {_LABEL: cluster}},
        "spec": {
            "topicName": physical,
            "partitions": spec.partitions,
            "replicas": spec.replication_factor,
            "config": dict(spec.config),
        },
    }


def _kafka_user(role: str, acls: Sequence[Acl], namespace: Namespace, cluster: str) -> dict[str, Any]:
    names = {Resource.TOPIC: "topic", Resource.GROUP: "group", Resource.TRANSACTIONAL_ID: "transactionalId"}
    operations = defaultdict(list)
    for acl in acls:
        operations[names[acl.resource], acl.name, acl.prefixed].append(acl.operation)
    return {
        "apiVersion": _STRIMZI,
        "kind": "KafkaUser",
        "metadata": {"name": namespace.client_id(role), "labels": {_LABEL: cluster}},
        "spec": {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {
                "type": "simple",
                "acls": [
                    {
                        "resource": {"type": kind, "name": name, "patternType": "prefix" if prefixed else "literal"},
                        "operations": found,
                    }
                    for (kind, name, prefixed), found in operations.items()
                ],
            },
        },
    }


def _terraform(spec: TopicSpec, namespace: Namespace) -> str:
    """A resource of the provider Mongey/kafka."""
    physical = f"{namespace.name}.{spec.name}"
    lines = [
        f'resource "kafka_topic" "{re.sub(r"[^a-zA-Z0-9]", "_", physical)}" {{',
        f"  name               = {json.dumps(physical)}",
        f"  partitions         = {spec.partitions}",
        f"  replication_factor = {spec.replication_factor}",
        "  config = {",
        *(f"    {json.dumps(key)} = {json.dumps(value)}" for key, value in spec.config.items()),
        "  }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def asyncapi(specs: Sequence[TopicSpec], namespace: Namespace) -> dict[str, Any]:
    """An AsyncAPI 3.0 document: a channel for each topic, a message with its Avro schema for each record, an operation for each role that
    reads or writes a topic. Bytes on a dead-letter topic have no schema."""
    schemas = {record.__name__: record.SCHEMA for spec in specs if spec.topic is not None for record in spec.topic.records}
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": f"EchoSwarm: {namespace.name}",
            "version": importlib.metadata.version("echoswarm"),
            "description": "Reinforcement-learning post-training of language models over a message log.",
        },
        "defaultContentType": "application/vnd.apache.avro",
        "channels": {spec.name: _channel(spec, namespace) for spec in specs},
        "operations": dict(_operations(specs)),
        "components": {
            "messages": {name: _message(name, schema) for name, schema in schemas.items()} | {"bytes": {"title": "The original bytes"}}
        },
    }


def _channel(spec: TopicSpec, namespace: Namespace) -> dict[str, Any]:
    return {
        "address": f"{namespace.name}.{spec.name}",
        "description": spec.purpose,
        "messages": {record: {"$ref": f"#/components/messages/{record}"} for record in spec.records or ("bytes",)},
        "bindings": {
            "kafka": {
                "partitions": spec.partitions,
                "replicas": spec.replication_factor,
                "topicConfiguration": {
                    "cleanup.policy": spec.config["cleanup.policy"].split(","),
                    **{name: int(spec.config[name]) for name in ("retention.ms", "retention.bytes") if name in spec.config},
                },
                "bindingVersion": "0.5.0",
            }
        },
        "x-key": spec.key,
    }


def _operations(specs: Sequence[TopicSpec]) -> Iterator[tuple[str, dict[str, Any]]]:
    for spec in specs:
        for action, roles in (("send", spec.producers), ("receive", spec.consumers)):
            for role in roles:
                what = {"action": action, "channel": {"$ref": f"#/channels/{spec.name}"}, "tags": [{"name": role}]}
                yield f"{role}.{action}.{spec.name}", what


def _message(title: str, name: str) -> dict[str, Any]:
    schema = newest(name)
    return {
        "name": schema.full_name,
        "title": title,
        "headers": {
            "type": "object",
            "properties": {name: {"type": "string", "description": text} for name, text in _HEADERS.items()},
        },
        "payload": {"schemaFormat": "application/vnd.apache.avro;version=1.9.0", "schema": schema.raw},
    }


def as_commands(acls: Sequence[Acl], bootstrap: str) -> str:
    """A shell script of kafka-acls calls. Entries that differ only by name are one call, since each call starts a JVM.

    Run it with KAFKA_ACLS=/path/to/kafka-acls.sh if that is not on PATH, and COMMAND_CONFIG=client.properties if the cluster needs a login.
    """
    lines = [
        "#!/bin/sh",
        "set -eu",
        f"BOOTSTRAP=${{BOOTSTRAP:-{shlex.quote(bootstrap)}}}",
        "acls() {",
        '  "${KAFKA_ACLS:-kafka-acls.sh}" --bootstrap-server "$BOOTSTRAP" ${COMMAND_CONFIG:+--command-config "$COMMAND_CONFIG"} "$@"',
        "}",
    ]
    shared = sorted(acls, key=_all_but_name)
    for (principal, resource, operation, prefixed), alike in itertools.groupby(shared, _all_but_name):
        lines.append("")
        lines.append(f"acls --add --allow-principal {shlex.quote(principal)} --operation {operation} \\")
        if prefixed:
            lines.append("  --resource-pattern-type prefixed \\")
        lines.append(" \\\n".join(f"  --{resource.value} {shlex.quote(acl.name)}" for acl in alike))
    return "\n".join(lines) + "\n"


def _all_but_name(acl: Acl) -> tuple[str, Resource, str, bool]:
    return acl.principal, acl.resource, acl.operation, acl.prefixed


def as_plain(acls: Sequence[Acl]) -> list[dict[str, str]]:
    """`acls` as plain data, for JSON and YAML."""
    return [
        {
            "principal": acl.principal,
            "resource": acl.resource.value,
            "name": acl.name,
            "pattern": "prefixed" if acl.prefixed else "literal",
            "operation": acl.operation,
        }
        for acl in acls
    ]
