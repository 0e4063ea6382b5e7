"""Users of a secured embedded Kafka: one for each role of a namespace, with exactly the rights of the role files."""

from __future__ import annotations

import secrets
from pathlib import Path

from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from echo_bus.client.kafka import KafkaCluster
from echo_bus.client.kafka_errors import translated
from echo_embedded.security import add_scram_users
from echo_embedded.state import EmbeddedState, read_state
from echo_runtime.logins import ADMIN, write_login
from echo_schemas.errors import UserError
from echo_schemas.naming import Namespace
from echo_schemas.rights import Acl, Resource, acls_of
from echo_schemas.roles import load_roles
from echo_settings import Settings

_WAIT_S = 30.0
_RESOURCES = {
    Resource.TOPIC: ResourceType.TOPIC,
    Resource.GROUP: ResourceType.GROUP,
    Resource.TRANSACTIONAL_ID: ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Read": AclOperation.READ,
    "Write": AclOperation.WRITE,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


def admit_if_secured(settings: Settings) -> None:
    """Do `admit_roles` if the cluster is the embedded one and secured; else nothing."""
    state = read_state()
    is_meant = state is not None and state.running() and settings.kafka.bootstrap in {"embedded", state.bootstrap}
    if state is not None and is_meant and state.is_secure and not settings.kafka.logins:
        admit_roles(state, Namespace(settings.kafka.namespace))


def admit_roles(state: EmbeddedState, namespace: Namespace) -> Path:
    """Make missing users, access lists and logins; returns the folder of the logins. Raises UserError for a cluster without security,
    TransportError."""
    folder = state.logins(namespace.name)
    if folder is None:
        raise UserError(f"The embedded Kafka at {state.bootstrap} has no security.", hint="Stop it, then `echoswarm kafka up --secure`.")
    admin = KafkaCluster(state.bootstrap, state.client_properties).admin()
    new = {role: secrets.token_urlsafe(24) for role in load_roles() if not (folder / f"{role}.properties").exists()}
    add_scram_users(admin, {namespace.client_id(role): password for role, password in new.items()})
    for role, password in new.items():
        write_login(folder, role, {**state.client_properties, "sasl.username": namespace.client_id(role), "sasl.password": password})
    write_login(folder, ADMIN, state.client_properties)
    with translated(state.bootstrap):
        for made in admin.create_acls([as_binding(acl) for acl in acls_of(namespace)], request_timeout=_WAIT_S).values():
            made.result()
    return folder


def as_binding(acl: Acl) -> AclBinding:
    """The permission as the client creates it, from any host."""
    return AclBinding(
        _RESOURCES[acl.resource],
        acl.name,
        ResourcePatternType.PREFIXED if acl.prefixed else ResourcePatternType.LITERAL,
        acl.principal,
        "*",
        _OPERATIONS[acl.operation],
        AclPermissionType.ALLOW,
    )
