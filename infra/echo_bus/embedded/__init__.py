"""A real Apache Kafka, and a schema registry, as child processes from Python packages alone: no Docker, no Java installation."""

from echo_bus.embedded.broker import EmbeddedKafka, Jit, Jvm, Node

__all__ = ["EmbeddedKafka", "Jit", "Jvm", "Node"]
