"""Engines without a model, for tests and rehearsals of everything around engines: digits that follow from prompt, version and index.

ScriptedEngine   answers at once, or waits for `release` when `hold` is set, so that a test decides what is under way when
PacedEngine      answers at a given speed, so that a pool can be tried without its machines
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from echo_rollout.engines.engine import (
    EngineCapabilities,
    EngineConfig,
    EngineError,
    Generation,
    Snapshot,
    SnapshotRef,
    SnapshotRejected,
    Switch,
    check_prompt,
)
from echo_schemas.errors import UserError
from echo_schemas.records import FinishReason, Sampling, VersionSpan

_VOCABULARY = 32
_MAX_LENGTH = 256


class ScriptedEngine:
    """See `Engine`. `reject`: versions whose snapshots are refused; `answer`: token ids from (prompt, version, index)."""

    def __init__(
        self, *, reject: frozenset[int] = frozenset(), answer: Callable[[Sequence[int], int, int], Sequence[int]] | None = None
    ) -> None:
        self.capabilities = EngineCapabilities(name="scripted", lora=True, full=True, switch=Switch.KEEPS, max_tokens=_MAX_LENGTH)
        self.installed: SnapshotRef | None = None
        self.hold = False
        self._reject = reject
        self._answer = answer or (lambda prompt, version, index: [(sum(prompt) + version + index) % 10 + 2] * 3)
        self._running: Counter[int] = Counter()
        self._released = asyncio.Condition()
        self._num_released = 0
        self._closed = False

    @property
    def in_use(self) -> frozenset[int]:
        installed = [] if self.installed is None else [self.installed.version]
        return frozenset([*(version for version, count in self._running.items() if count), *installed])

    async def start(self) -> None:
        """Nothing is loaded."""

    async def install(self, snapshot: Snapshot) -> None:
        if snapshot.ref.version in self._reject:
            raise SnapshotRejected(f"The script refuses version {snapshot.ref.version}.")
        self.installed = snapshot.ref

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Tokens by the script, cut at `max_new_tokens`."""
        check_prompt(prompt, sampling, vocabulary=_VOCABULARY, max_length=_MAX_LENGTH)
        if self._closed:
            raise EngineError("The engine was closed.")
        ref = self.installed
        if ref is None:
            raise EngineError("No version is installed yet.")
        self._running[ref.version] += 1
        try:
            if self.hold:
                await self._wait()
        finally:
            self._running[ref.version] -= 1
        return [self._generation(self._answer(prompt, ref.version, index), ref, sampling) for index in range(n)]

    async def release(self, count: int = 1) -> None:
        """Let `count` generations that are held go on."""
        async with self._released:
            self._num_released += count
            self._released.notify_all()

    async def close(self) -> None:
        self._closed = True
        async with self._released:
            self._released.notify_all()

    async def _wait(self) -> None:
        async with self._released:
            await self._released.wait_for(lambda: self._num_released > 0 or self._closed)
            if self._closed:
                raise EngineError("The engine was closed.")
            self._num_released -= 1

    @staticmethod
    def _generation(tokens: Sequence[int], ref: SnapshotRef, sampling: Sampling) -> Generation:
        ids = np.array(tokens[: sampling.max_new_tokens], np.int32)
        is_cut = len(tokens) > sampling.max_new_tokens
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), -1.0, np.float32),
            version_spans=(VersionSpan(start=0, end=len(ids), version=ref.version),) if len(ids) else (),
            weights_sha256=ref.sha256,
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            text=" ".join(map(str, ids.tolist())),
        )


class PacedEngine(ScriptedEngine):
    """Works on `slots` groups at once, each for `seconds`; both from [rollout.options]. Further groups wait inside it."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises UserError for wrong options."""
        super().__init__()
        seconds, slots = config.options.get("seconds", 0.1), config.options.get("slots", 1)
        if not isinstance(seconds, (int, float)) or not isinstance(slots, int) or seconds < 0 or slots < 1:
            raise UserError(
                f"[rollout.options] seconds = {seconds!r} and slots = {slots!r} are no speed.",
                hint="Write seconds as a number of at least 0, and slots as a whole number of at least 1.",
            )
        self._seconds = float(seconds)
        self._slots = asyncio.Semaphore(slots)
        self.hold = True

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """By the script, after waiting for a slot and then `seconds`; under the version that the group began with."""
        async with self._slots:
            return await super().generate(prompt, n, sampling)

    async def _wait(self) -> None:
        await asyncio.sleep(self._seconds)
        if self._closed:
            raise EngineError("The engine was closed.")
