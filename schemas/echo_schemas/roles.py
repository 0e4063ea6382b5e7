"""The roles that connect to the cluster: `roles.yaml`. Access lists are generated from it and the topic files."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from echo_schemas.errors import SchemaFileError
from echo_schemas.topic_files import TopicSpec, load_topic_specs, read_yaml

_REQUIRED_KEYS = {"purpose", "groups", "transactional_ids"}
_KEYS = _REQUIRED_KEYS | {"watches_groups", "reads_all_topics"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One kind of process. Names of groups and transactional ids lack the namespace; a group that ends in `.*` is a prefix."""

    name: str
    purpose: str
    groups: tuple[str, ...]
    transactional_ids: tuple[str, ...]
    watches_groups: tuple[str, ...] = ()
    reads_all_topics: bool = False


@functools.cache
def load_roles() -> dict[str, Role]:
    """Role name → role. Raises SchemaFileError if roles and topic files disagree."""
    content = read_yaml((resources.files("echo_schemas") / "roles.yaml").read_text(encoding="utf-8"))
    return parse_roles(content, load_topic_specs())


def parse_roles(content: Mapping[str, Mapping[str, Any]], specs: Iterable[TopicSpec]) -> dict[str, Role]:
    """The roles file's content, checked against the topics."""
    roles: dict[str, Role] = {}
    for name, entry in content.items():
        if unknown := set(entry) - _KEYS:
            raise SchemaFileError(f"roles.yaml: {name} has unknown keys: {', '.join(sorted(unknown))}.")
        if absent := _REQUIRED_KEYS - set(entry):
            raise SchemaFileError(f"roles.yaml: {name} lacks {', '.join(sorted(absent))}.")
        fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
        roles[name] = Role(name=name, **fields)
    groups = {group for role in roles.values() for group in role.groups}
    for role in roles.values():
        if unwatched := set(role.watches_groups) - groups:
            raise SchemaFileError(f"roles.yaml: {role.name} watches {', '.join(sorted(unwatched))}, which is no role's group.")
    for spec in specs:
        if strangers := {*spec.producers, *spec.consumers} - set(roles):
            raise SchemaFileError(f"topics/{spec.name}.yaml names {', '.join(sorted(strangers))}, which roles.yaml does not know.")
    return roles
