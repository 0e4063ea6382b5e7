"""The protocol between the bus, the roles and a tracer; `echo_runtime.tracing` implements it. Tracing is optional."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from echo_core.batch_choice import ChosenGroup
from echo_schemas.headers import Header
from echo_schemas.records import Record, Reward

Written = Callable[[], None]
"""Called when the record is acknowledged."""


class Tracer(Protocol):
    """Follows a share of the groups. Any thread may call it; it never blocks."""

    def writes(self, record: Record) -> tuple[Header, Written] | None:
        """Called while `record` is published. Returns its header and a callback for its acknowledgement; None if it is not followed."""

    def scored(self, rewards: Sequence[Reward], started_ms: int) -> list[list[Header]]:
        """`rewards` were computed since `started_ms`. Returns the headers of each."""

    def trained(self, groups: Sequence[ChosenGroup], version: int, started_ms: int) -> None:
        """The step that made `version` started at `started_ms` and trained `groups`."""
