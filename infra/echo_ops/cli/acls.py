"""`echoswarm acls …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

from echo_ops.acls import as_commands, as_plain
from echo_ops.cli.context import read_settings
from echo_ops.topic_rendering import kafka_users
from echo_schemas.naming import Namespace
from echo_schemas.rights import acls_of


def render(config: Path | None, format_: str, cluster: str) -> None:
    """Plain output, so that it can be piped into a file or a shell."""
    settings = read_settings(config)
    acls = acls_of(Namespace(settings.kafka.namespace))
    if format_ == "strimzi":
        text = kafka_users(Namespace(settings.kafka.namespace), cluster or "my-cluster")
    elif format_ == "json":
        text = json.dumps(as_plain(acls), indent=2) + "\n"
    elif format_ == "yaml":
        text = yaml.safe_dump(as_plain(acls), sort_keys=False)
    else:
        bootstrap = "HOST:PORT" if settings.kafka.bootstrap == "embedded" else settings.kafka.bootstrap
        text = as_commands(acls, bootstrap)
    sys.stdout.write(text)
