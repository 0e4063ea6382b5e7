"""What each role may do on the cluster: from topic files and roles, no more than its place in the pipeline needs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
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

    @property
    def words(self) -> str:
        """For a sentence: `READ on the topic echo.demo.steps`."""
        what = f"every {self.resource} below" if self.prefixed else f"the {self.resource}"
        return f"{self.operation.upper()} on {what} {self.name.removesuffix('.') if self.prefixed else self.name}"

    def command(self, bootstrap: str) -> str:
        """The call of Kafka's own tool that allows it."""
        words = ["kafka-acls.sh", "--bootstrap-server", bootstrap, "--add", "--allow-principal", self.principal]
        words += ["--operation", self.operation, f"--{self.resource}", self.name]
        return shlex.join([*words, *(("--resource-pattern-type", "prefixed") if self.prefixed else ())])


def acls_of(namespace: Namespace, principals: Mapping[str, str] | None = None) -> list[Acl]:
    """Every permission that the pipeline needs. `principals`: role → principal, by default `User:<namespace>.<role>`."""
    return sorted({acl for role in load_roles() for acl in acls_of_role(role, namespace, (principals or {}).get(role, ""))})


def acls_of_role(role: str, namespace: Namespace, principal: str = "") -> list[Acl]:
    """Every permission that one role needs, sorted."""
    principal = principal or f"User:{namespace.name}.{role}"
    return sorted(set(_of_role(load_roles()[role], principal, namespace, load_topic_specs())))


def lacking(wanted: Sequence[Acl], allowed: Mapping[str, Collection[str]], closed_groups: Collection[str]) -> list[Acl]:
    """Those of `wanted` that the cluster does not give. `allowed`: topic → operations, of the topics that the cluster spoke of;
    `closed_groups`: names, as in `wanted`, of groups that it does not show. Transactional ids are not looked at: only their use tells."""
    topics = [acl for acl in wanted if acl.resource is Resource.TOPIC and acl.operation not in allowed.get(acl.name, (acl.operation,))]
    return topics + [acl for acl in wanted if acl.resource is Resource.GROUP and acl.name in closed_groups]


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
