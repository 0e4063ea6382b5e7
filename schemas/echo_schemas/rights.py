"""The permissions of each role on the cluster, from topic files and roles: no more than the role needs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from echo_schemas.naming import Namespace
from echo_schemas.roles import Role, load_roles
from echo_schemas.topic_files import TopicSpec, load_topic_specs

# The client needs a group id also for a reader that joins no group; `echo_bus.client.kafka` names it `<role>[.<name>].reader`. The client
# looks up that group's coordinator, which needs DESCRIBE, and never joins or commits. Process names differ, hence a prefix.
_OWN_GROUPS = "{role}.*"
# By watched group, the topic whose end offsets give its lag.
_WATCHED_TOPICS = {"worker": "requests", "reward.*": "trajectories", "redrive.*": "trajectories"}
# The topic whose retention its writer reads.
_SIZED_TOPIC = "weights.chunks"


class Resource(StrEnum):
    """The kind of resource of an entry, in kafka-acls' words."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"


@dataclass(frozen=True, slots=True, order=True)
class Acl:
    """One permission. `prefixed`: the name is a prefix. READ and WRITE imply DESCRIBE, which is never listed beside them."""

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
        """The command of Kafka's own tool that grants it."""
        words = ["kafka-acls.sh", "--bootstrap-server", bootstrap, "--add", "--allow-principal", self.principal]
        words += ["--operation", self.operation, f"--{self.resource}", self.name]
        return shlex.join([*words, *(("--resource-pattern-type", "prefixed") if self.prefixed else ())])


def acls_of(namespace: Namespace, principals: Mapping[str, str] | None = None) -> list[Acl]:
    """All permissions of the pipeline. `principals`: role → principal, by default `User:<namespace>.<role>`."""
    return sorted({acl for role in load_roles() for acl in acls_of_role(role, namespace, (principals or {}).get(role, ""))})


def acls_of_role(role: str, namespace: Namespace, principal: str = "") -> list[Acl]:
    """All permissions of one role, sorted."""
    principal = principal or f"User:{namespace.name}.{role}"
    return sorted(set(_of_role(load_roles()[role], principal, namespace, load_topic_specs())))


def lacking(wanted: Sequence[Acl], allowed: Mapping[str, Collection[str]], closed_groups: Collection[str]) -> list[Acl]:
    """Those of `wanted` that the cluster does not grant. `allowed`: topic → operations, for the topics that the cluster answered for.
    `closed_groups`: groups that it does not show, named as in `wanted`. Transactional ids are not checked: only using one shows its right.
    """
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
            # Before its first snapshot the writer checks that the topic keeps enough bytes for one.
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
    """Whether the role has READ or WRITE on `topic`, and so DESCRIBE too."""
    return role.reads_all_topics or any(spec.name == topic and role.name in {*spec.consumers, *spec.producers} for spec in specs)


def _named(principal: str, resource: Resource, namespace: Namespace, name: str, operation: str) -> Acl:
    prefixed = name.endswith(".*")
    return Acl(principal, resource, f"{namespace.name}.{name.removesuffix('*')}", operation, prefixed)
