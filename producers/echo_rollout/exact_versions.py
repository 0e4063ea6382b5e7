"""An engine that also answers under exactly one version that is not, or soon no longer is, the newest: for evaluations.

    generate ──▶ gate ──▶ engine, under the newest          install ──▶ waits for a session to end ──▶ engine
    under(v) ──▶ session ──▶ v is the newest: nothing newer is installed meanwhile
                     └────▶ it is not: a detour. The gate closes, v is installed, the session's groups generate, the newest comes back

In a detour an engine whose switch is `keeps` goes on with its generations under way; any other finishes them first. Groups of the same
version share a session. So that neither weights nor training wait for a stream of evaluations, no group joins a session that an install
waits for, or a detour that has lasted `_MOST_DETOUR_S`; generations and installs that waited for its end go first.

On the worker's asyncio loop alone. The older version is not visible outside: `installed` is the newest all the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from echo_bus.clock import Clock
from echo_rollout.engines.engine import Engine, EngineCapabilities, EngineError, Generation, Snapshot, SnapshotRef, SnapshotRejected, Switch
from echo_schemas.records import Sampling

_MOST_DETOUR_S = 5.0


@dataclass(eq=False, slots=True)
class _Session:
    """The engine's use for one version, or (`version` None) for an install. `users`: groups inside."""

    version: int | None
    opened_s: float
    is_detour: bool = False
    is_ready: bool = False
    users: int = 0


class ExactVersions:
    """An `Engine` around another one, which is not used otherwise."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._newest: Snapshot | None = None
        self._session: _Session | None = None
        self._num_installs_waiting = 0
        self._num_inside = 0
        self._is_open = True
        self._changed = asyncio.Event()

    # As any engine

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._engine.capabilities

    @property
    def installed(self) -> SnapshotRef | None:
        """The newest version, also during a detour."""
        return None if self._newest is None else self._newest.ref

    @property
    def in_use(self) -> frozenset[int]:
        """The engine's, and the newest version, which comes back after a detour."""
        return self._engine.in_use | (frozenset() if self._newest is None else {self._newest.ref.version})

    async def start(self) -> None:
        await self._engine.start()

    async def install(self, snapshot: Snapshot) -> None:
        """Wait until no session is open, then install."""
        self._num_installs_waiting += 1
        try:
            await self._until(lambda: self._session is None)
            self._session = _Session(None, self._clock.monotonic_s())
        finally:
            self._num_installs_waiting -= 1
        try:
            await self._engine.install(snapshot)
            self._newest = snapshot
        finally:
            self._session = None
            self._notify()

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        """Generate under the newest version; during a detour wait for its end."""
        await self._until(lambda: self._is_open)
        self._num_inside += 1
        try:
            return await self._engine.generate(prompt, n, sampling)
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._notify()

    async def close(self) -> None:
        await self._engine.close()

    # Exactly one version

    def needs(self, version: int) -> bool:
        """Whether `under` needs the snapshot of `version`."""
        return self._newest is None or self._newest.ref.version != version

    @asynccontextmanager
    async def under(self, version: int, snapshot: Snapshot | None) -> AsyncIterator[bool]:
        """Inside, every generation of the bare engine is of `version`. Yields False, without this promise, if a newer version was installed
        and `snapshot` is None: it is needed.

        Raises SnapshotRejected, or EngineError if the newest version could not be installed again.
        """
        session = await self._enter(version, snapshot)
        try:
            yield session is not None
        finally:
            if session is not None:
                await self._leave(session)

    async def _enter(self, version: int, snapshot: Snapshot | None) -> _Session | None:
        await self._until(lambda: (self._session is None and not self._num_installs_waiting) or self._may_join(version))
        if self._session is not None:
            self._session.users += 1
            return self._session
        is_detour = self.needs(version)
        if is_detour and snapshot is None:
            return None
        session = self._session = _Session(version, self._clock.monotonic_s(), is_detour=is_detour, users=1)
        try:
            if is_detour:
                assert snapshot is not None, "looked at above"
                await self._detour(snapshot)
        except BaseException:  # cancelled or refused: in any case the newest version is installed again first
            await self._leave(session)
            raise
        session.is_ready = True
        self._notify()
        return session

    async def _detour(self, snapshot: Snapshot) -> None:
        self._is_open = False
        if self._engine.capabilities.switch is not Switch.KEEPS:
            await self._until(lambda: not self._num_inside)
        await self._engine.install(snapshot)

    async def _leave(self, session: _Session) -> None:
        session.users -= 1
        if session.users:
            return
        # No group joins a session that is being closed.
        session.is_ready = False
        try:
            if session.is_detour and self._newest is not None and self._engine.installed != self._newest.ref:
                await self._engine.install(self._newest)
        except SnapshotRejected as exc:
            raise EngineError(f"Version {self._newest and self._newest.ref.version} could not be brought back: {exc.message}") from exc
        finally:
            self._is_open = True
            self._session = None
            self._notify()

    def _may_join(self, version: int) -> bool:
        session = self._session
        if session is None or not session.is_ready or session.version != version or self._num_installs_waiting:
            return False
        return not session.is_detour or self._clock.monotonic_s() - session.opened_s < _MOST_DETOUR_S

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
