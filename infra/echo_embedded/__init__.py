"""A real Apache Kafka and a schema registry as child processes, from Python packages alone: no Docker, no Java."""

from echo_embedded.broker import EmbeddedKafka, Node
from echo_embedded.java import Jit, Jvm
from echo_embedded.state import resolve_embedded, resolve_logins, resolve_registry

__all__ = ["EmbeddedKafka", "Jit", "Jvm", "Node", "resolve_embedded", "resolve_logins", "resolve_registry"]
