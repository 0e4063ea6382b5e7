"""What engines that load weights have in common: the base model, what is in force, and the thread of those that compute in this process."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo_rollout.engines.adapters import AdapterShelf
from echo_rollout.engines.answers import answer_all
from echo_rollout.engines.engine import EngineConfig, EngineError, Snapshot, SnapshotRef, SnapshotRejected, check_prompt
from echo_rollout.engines.fitting import Shapes
from echo_schemas.records import Sampling

CLOSED = "The engine was closed."
_CLOSE_S = 30.0


class ServingEngine:
    """The part of an engine that knows which weights are in force. Where adapters replace one another, the shelf stays empty."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._base: Shapes = {}
        self._vocabulary = 0
        self._folder: Path = config.base
        self._adapters: AdapterShelf[Any] = AdapterShelf()
        self._installed: SnapshotRef | None = None

    @property
    def installed(self) -> SnapshotRef | None:
        """What new generations run under."""
        return self._installed

    @property
    def in_use(self) -> frozenset[int]:
        """Versions whose adapters are loaded, and the one in force, whose files are loaded again if a new one turns out broken."""
        installed = self._installed
        return self._adapters.in_use | (frozenset() if installed is None else {installed.version})

    def _check_kind(self, snapshot: Snapshot) -> None:
        """Raise SnapshotRejected for an adapter where full weights are served, or the other way round."""
        if snapshot.kind is not self._config.kind:
            raise SnapshotRejected(
                f"This engine serves {self._config.kind.value} weights, and version {snapshot.ref.version} is {snapshot.kind.value}."
            )

    def _check_prompt(self, prompt: Sequence[int], sampling: Sampling) -> None:
        check_prompt(prompt, sampling, vocabulary=self._vocabulary, max_length=self._config.max_length)


class ThreadEngine(ServingEngine):
    """An engine whose thread takes orders from the asyncio loop, and None for its end."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False

    async def close(self) -> None:
        """End the thread after what it computes at the moment."""
        is_first, self._closed = not self._closed, True
        if is_first:
            self._orders.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    def _run(self) -> None:
        """The thread."""
        raise NotImplementedError

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineError("The engine was not started.")
        return self._loop

    def _order(self, order: Any) -> None:
        if self._closed:
            raise EngineError(CLOSED)
        self._orders.put(order)

    def _answer(self, future: asyncio.Future[Any], result: Any) -> None:
        answer_all(self._loop, [(future, result)])
