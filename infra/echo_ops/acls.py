"""Access lists from topic files and roles: each role may do what its place in the pipeline needs, and nothing else. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from echo_schemas.naming import Namespace
from echo_schemas.roles import Role, load_roles
from echo_schemas.topic_files import TopicSpec, load_topic_specs


class Resource(StrEnum):
    """What an entry protects, in kafka-acls' words."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission. `prefixed`: the name is a prefix. READ and WRITE imply DESCRIBE, so that is never listed beside them."""

    principal: str
    resource: Resource
    name: str
    operation: str
    prefixed: bool = False


def acls_of(namespace: Namespace, principals: Mapping[str, str] | None = None) -> list[Acl]:
    """Every permission that the pipeline needs. `principals`: role → principal, by default `User:<namespace>.<role>`."""
    specs, found = load_topic_specs(), set[Acl]()
    for role in load_roles().values():
        principal = (principals or {}).get(role.name, f"User:{namespace.name}.{role.name}")
        found.update(_of_role(role, principal, namespace, specs))
    return sorted(found)


def _of_role(role: Role, principal: str, namespace: Namespace, specs: tuple[TopicSpec, ...]) -> Iterator[Acl]:
    for spec in specs:
        name = f"{namespace.name}.{spec.name}"
        if role.name in spec.producers:
            yield Acl(principal, Resource.TOPIC, name, "Write")
        if role.name in spec.consumers or role.reads_all_topics:
            yield Acl(principal, Resource.TOPIC, name, "Read")
    for group in role.groups:
        yield _named(principal, Resource.GROUP, namespace, group, "Read")
    for group in role.watches_groups:
        yield _named(principal, Resource.GROUP, namespace, group, "Describe")
        # Placing work by lag asks for end offsets, which wants DESCRIBE on the topics whose lag it is.
        topic = "requests" if group == "worker" else "trajectories"
        yield Acl(principal, Resource.TOPIC, f"{namespace.name}.{topic}", "Describe")
    for transactional_id in role.transactional_ids:
        yield _named(principal, Resource.TRANSACTIONAL_ID, namespace, transactional_id, "Write")


def _named(principal: str, resource: Resource, namespace: Namespace, name: str, operation: str) -> Acl:
    prefixed = name.endswith(".*")
    return Acl(principal, resource, f"{namespace.name}.{name.removesuffix('*')}", operation, prefixed)


def as_commands(acls: list[Acl], bootstrap: str) -> str:
    """A shell script of kafka-acls calls, one per principal and resource, to be read before it is run."""
    lines = ["#!/bin/sh", "set -eu"]
    for acl in acls:
        pattern = " --resource-pattern-type prefixed" if acl.prefixed else ""
        lines.append(
            f"kafka-acls.sh --bootstrap-server {shlex.quote(bootstrap)} --add --allow-principal {shlex.quote(acl.principal)}"
            f" --operation {acl.operation} --{acl.resource.value} {shlex.quote(acl.name)}{pattern}"
        )
    return "\n".join(lines) + "\n"


def as_plain(acls: list[Acl]) -> list[dict[str, str]]:
    """The same as plain data, for JSON and YAML."""
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
