"""Access lists as commands of Kafka's scripts, and as plain data. Pure."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

from echo_schemas.rights import Acl, Resource


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
