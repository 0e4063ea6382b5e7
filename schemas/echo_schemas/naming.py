"""Physical names: one namespace prefixes every topic, group, client id and transactional id of one running pipeline."""

from __future__ import annotations

import re
from dataclasses import dataclass

from echo_schemas.errors import UserError
from echo_schemas.topics import BY_NAME, Topic

DEAD_LETTER_SUFFIX = ".dlq"
# Kafka allows [a-zA-Z0-9._-] and 249 characters; the longest logical name, its suffix and a role need the rest.
MAX_NAMESPACE_LENGTH = 180
_LEGAL = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._-]*[a-zA-Z0-9])?")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Makes physical names. `Namespace("echo.demo").topic(TRAJECTORIES)` is `echo.demo.trajectories`."""

    name: str

    def __post_init__(self) -> None:
        if not _LEGAL.fullmatch(self.name) or len(self.name) > MAX_NAMESPACE_LENGTH:
            raise UserError(
                f"The namespace {self.name!r} is not a legal topic prefix.",
                hint="Use letters, digits, '.', '_' and '-', starting and ending with a letter or digit, for example 'echo.demo'.",
            )

    def topic(self, topic: Topic) -> str:
        return f"{self.name}.{topic.name}"

    def dead_letters(self, topic: Topic) -> str:
        """The topic of unreadable messages of `topic`."""
        return f"{self.name}.{topic.name}{DEAD_LETTER_SUFFIX}"

    def group(self, role: str, name: str = "") -> str:
        """A consumer group: `<namespace>.<role>[.<name>]`."""
        return f"{self.name}.{role}.{name}" if name else f"{self.name}.{role}"

    def client_id(self, role: str, name: str = "") -> str:
        """A client id, in the form of a group, so that quotas and broker logs name the role."""
        return self.group(role, name)

    def transactional_id(self, role: str) -> str:
        """A transactional id: one for each role, so that a restarted process fences its predecessor."""
        return self.group(role)

    def logical(self, physical: str) -> Topic | None:
        """The topic of a physical name of this namespace; None for any other name, also of dead letters."""
        prefix = f"{self.name}."
        return BY_NAME.get(physical.removeprefix(prefix)) if physical.startswith(prefix) else None
