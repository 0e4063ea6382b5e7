"""Kafka's own command-line tools, run from the jars of the embedded broker."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from echo_embedded.installation import install_kafka
from echo_embedded.java import find_java
from echo_schemas.errors import UserError

# The main classes behind the shell scripts of these names in Kafka's distribution.
TOOLS: Mapping[str, str] = MappingProxyType(
    {
        "kafka-acls": "org.apache.kafka.tools.AclCommand",
        "kafka-configs": "kafka.admin.ConfigCommand",
        "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "kafka-console-producer": "org.apache.kafka.tools.ConsoleProducer",
        "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
        "kafka-topics": "org.apache.kafka.tools.TopicCommand",
        "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
    }
)


def tool_command(name: str) -> list[str]:
    """The command that runs the tool `name`; append the tool's own arguments. Raises UserError.

    `kafka-console-consumer`, for example, is `java … org.apache.kafka.tools.consumer.ConsoleConsumer`.
    """
    if name not in TOOLS:
        raise UserError(f"{name!r} is not among Kafka's tools here.", hint=f"There are {', '.join(TOOLS)}.")
    java = find_java()
    installation = install_kafka(java)
    flags = ["-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Decho.log.level=ERROR"]
    flags.append(f"-Dlog4j2.configurationFile={installation.log_settings}")
    return [str(java.executable), *flags, "-cp", installation.class_path(), TOOLS[name]]
