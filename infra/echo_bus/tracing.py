"""What the bus and the roles say to a tracer; `echo_runtime.tracing` has the one there is. Without a tracer nothing is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from echo_core.batch_choice import ChosenGroup
from echo_schemas.headers import Header
from echo_schemas.records import Record, Reward

Written = Callable[[], None]
"""To be called when the record is acknowledged."""


class Tracer(Protocol):
    """Follows a share of the groups. May be called from any thread, and blocks for nothing."""

    def writes(self, record: Record) -> tuple[Header, Written] | None:
        """`record` is being published: the header that it gets, and what to call at its acknowledgement; None if it is not followed."""

    def scored(self, rewards: Sequence[Reward], started_ms: int) -> list[list[Header]]:
        """`rewards` were made since `started_ms`: the headers that each gets."""

    def trained(self, groups: Sequence[ChosenGroup], version: int, started_ms: int) -> None:
        """`groups` were trained into `version` since `started_ms`."""
