"""`echoswarm acls …`."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Literal

import typer
import yaml

from echo_ops.cli.context import read_settings
from echo_ops.cli.options import ClusterName, Config
from echo_ops.topic_rendering import as_commands, as_plain, kafka_users
from echo_schemas.naming import Namespace
from echo_schemas.rights import acls_of


def render(
    config: Config = None,
    format_: Annotated[Literal["commands", "yaml", "json", "strimzi"], typer.Option("--format", help="What to print.")] = "commands",
    cluster: ClusterName = "",
) -> None:
    """Write plain text, so that it can be piped into a file or a shell."""
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
