"""Access lists from topic files and roles: each role may do what its place in the pipeline needs, and nothing else. Pure."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from echo_schemas.naming import Namespace
from echo_schemas.roles import Role, load_roles
from echo_schemas.topic_files import TopicSpec, load_topic_specs

# `echo_bus.client.kafka` gives a reader that joins no group a name below its client id, `<role>[.<name>].reader`, for the client wants one:
# it looks up the group's coordinator, which takes DESCRIBE, and never joins or commits. Processes have names of their own, hence a prefix.
_OWN_GROUPS = "{role}.*"
# Whose lag is watched decides which topic's end offsets are asked for.
_WATCHED_TOPICS = {"worker": "requests", "reward.*": "trajectories", "redrive.*": "trajectories"}
# Whose retention its writer looks at.
_SIZED_TOPIC = "weights.chunks"


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
        if role.reads_all_topics:
            # `topics check` and `doctor` compare settings; reading them changes nothing.
            yield Acl(principal, Resource.TOPIC, name, "DescribeConfigs")
        elif spec.name == _SIZED_TOPIC and role.name in spec.producers:
            # Whether what is kept there is enough for a snapshot is compared before the first one is written.
            yield Acl(principal, Resource.TOPIC, name, "DescribeConfigs")
    for group in role.groups:
        yield _named(principal, Resource.GROUP, namespace, group, "Read")
    if (own := _OWN_GROUPS.format(role=role.name)) not in role.groups:
        yield _named(principal, Resource.GROUP, namespace, own, "Describe")
    for group in role.watches_groups:
        yield _named(principal, Resource.GROUP, namespace, group, "Describe")
        topic = _WATCHED_TOPICS[group]
        if not _reads(role, topic, specs):
            yield Acl(principal, Resource.TOPIC, f"{namespace.name}.{topic}", "Describe")
    for transactional_id in role.transactional_ids:
        yield _named(principal, Resource.TRANSACTIONAL_ID, namespace, transactional_id, "Write")


def _reads(role: Role, topic: str, specs: tuple[TopicSpec, ...]) -> bool:
    """Whether the role has READ or WRITE on `topic` anyway, and so DESCRIBE too."""
    return role.reads_all_topics or any(spec.name == topic and role.name in {*spec.consumers, *spec.producers} for spec in specs)


def _named(principal: str, resource: Resource, namespace: Namespace, name: str, operation: str) -> Acl:
    prefixed = name.endswith(".*")
    return Acl(principal, resource, f"{namespace.name}.{name.removesuffix('*')}", operation, prefixed)


def as_commands(acls: Sequence[Acl], bootstrap: str) -> str:
    """A shell script of kafka-acls calls, to be read before it is run. Names that share the rest are one call: each starts a JVM.

    Run it with KAFKA_ACLS=/path/to/kafka-acls.sh where that is not on PATH, and COMMAND_CONFIG=client.properties where the cluster wants
    a login.
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
