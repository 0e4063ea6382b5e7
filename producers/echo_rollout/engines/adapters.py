"""The adapters that an engine has loaded: one in force, older ones until no generation under way needs them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Generic, TypeVar

from echo_rollout.engines.engine import SnapshotRef

RequestT = TypeVar("RequestT")


@dataclass(frozen=True, slots=True)
class Adapter(Generic[RequestT]):
    """A loaded adapter. `number`: the engine's id, fresh for each; `request`: how the engine names it."""

    ref: SnapshotRef
    number: int
    request: RequestT


class AdapterShelf(Generic[RequestT]):
    """Counts the generations under each adapter. Used by one thread; `in_use` may be read by others."""

    def __init__(self) -> None:
        self.current: Adapter[RequestT] | None = None
        self._loaded: dict[int, Adapter[RequestT]] = {}
        self._using: Counter[int] = Counter()

    @property
    def in_use(self) -> frozenset[int]:
        """Versions whose files the engine may read again."""
        return frozenset(adapter.ref.version for adapter in list(self._loaded.values()))

    def put(self, adapter: Adapter[RequestT]) -> list[int]:
        """`adapter` is in force now. Returns the numbers to unload."""
        before, self.current = self.current, adapter
        self._loaded[adapter.number] = adapter
        return [] if before is None else self._unused(before.number)

    def take(self) -> Adapter[RequestT] | None:
        """The adapter in force, which now has one generation more under it."""
        if self.current is not None:
            self._using[self.current.number] += 1
        return self.current

    def give_back(self, number: int) -> list[int]:
        """A generation under adapter `number` has ended. Returns the numbers to unload."""
        self._using[number] -= 1
        return self._unused(number)

    def _unused(self, number: int) -> list[int]:
        if self._using[number] > 0 or (self.current is not None and self.current.number == number):
            return []
        del self._using[number]
        return [number] if self._loaded.pop(number, None) is not None else []
