"""What engines that load weights have in common: the base model, what is in force, and the two ways to run.

ServingEngine
├── ThreadEngine    a thread in this process computes
└── LoopEngine      everything is on the asyncio loop; another process computes
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from echo_rollout.engines.adapters import AdapterShelf
from echo_rollout.engines.engine import EngineConfig, EngineError, Generation, Snapshot, SnapshotRef, SnapshotRejected, check_prompt
from echo_rollout.engines.fitting import Shapes, check_fit
from echo_rollout.engines.vllm_arguments import Decode
from echo_schemas.records import Sampling

ResultT = TypeVar("ResultT")
_CLOSED = "The engine was closed."
_CLOSE_S = 30.0


class DrainGate:
    """Admits generations, and closes until none is under way: for weights that replace what runs. Used on one asyncio loop.

    `admitted` blocks while an install is inside `drained`; `drained` blocks until every generation has left `admitted`.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """One generation."""
        while not self._open.is_set():
            await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            # No await here, so that a cancelled generation leaves too.
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Nothing runs and nothing is admitted inside. One at a time."""
        self._open.clear()
        try:
            await self._empty.wait()
            yield
        finally:
            self._open.set()


class ServingEngine:
    """The part of an engine that knows which weights are in force. Where adapters replace one another, the shelf stays empty."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._base: Shapes = {}
        self._vocabulary = 0
        self._folder: Path = config.base
        self._adapters: AdapterShelf[Any] = AdapterShelf()
        self.installed: SnapshotRef | None = None
        self._decode: Decode = lambda rows: [""] * len(rows)
        self._closed = False

    @property
    def in_use(self) -> frozenset[int]:
        """Versions whose adapters are loaded, and the one in force, whose files are loaded again if a new one turns out broken."""
        return self._adapters.in_use | (frozenset() if self.installed is None else {self.installed.version})

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(_CLOSED)

    def _check_kind(self, snapshot: Snapshot) -> None:
        """Raise SnapshotRejected for an adapter where full weights are served, or the other way round."""
        if snapshot.kind is not self._config.kind:
            raise SnapshotRejected(
                f"This engine serves {self._config.kind.value} weights, and version {snapshot.ref.version} is {snapshot.kind.value}."
            )

    def _check_prompt(self, prompt: Sequence[int], sampling: Sampling) -> None:
        check_prompt(prompt, sampling, vocabulary=self._vocabulary, max_length=self._config.max_length)


@dataclass(eq=False, slots=True)
class Asked:
    """One `generate` under way on the engine's thread."""

    prompt: Sequence[int]
    n: int
    sampling: Sampling
    answer: asyncio.Future[list[Generation]]


class ThreadEngine(ServingEngine):
    """An engine whose thread takes orders from the asyncio loop, and None for its end. Subclasses write `_run`, `_load` and `_reload`."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def start(self) -> None:
        """Load the base model on the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._done_in_turn(self._load)

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

    def _load(self) -> None:
        """Load the base model; on the thread."""
        raise NotImplementedError

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise EngineError("The engine was not started.")
        return self._loop

    def _order(self, order: Any) -> None:
        self._check_open()
        self._orders.put(order)

    async def _done_in_turn(self, work: Callable[[], ResultT]) -> ResultT:
        """What `work` returns; the thread calls it after the orders before it."""
        done: asyncio.Future[ResultT] = self._running_loop().create_future()
        self._order(lambda: self._settle(done, work))
        return await done

    def _settle(self, future: asyncio.Future[ResultT], work: Callable[[], ResultT]) -> None:
        try:
            self._check_open()
            result = work()
        except Exception as exc:  # the caller that awaits `future` raises it
            self._answer([(future, exc)])
        else:
            self._answer([(future, result)])

    def _install_weights(self, snapshot: Snapshot) -> None:
        check_fit(snapshot, self._base, max_rank=0)
        try:
            self._reload(snapshot.folder)
        except Exception as exc:  # libraries raise anything; the model may be half new, so the old weights are loaded again
            self._reload(self._folder)
            raise SnapshotRejected(f"Version {snapshot.ref.version} cannot be served: {exc}") from exc
        self._folder = snapshot.folder
        self.installed = snapshot.ref

    def _reload(self, folder: Path) -> None:
        """Load all weights in `folder`; on the thread."""
        raise NotImplementedError

    def _answer(self, answers: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
        """Resolve futures of the loop with results or exceptions, waking it once: each wake-up takes the interpreter from this thread.

        A future that is done is left as it is; so are all once the loop is closed.
        """

        def resolve() -> None:
            for future, result in answers:
                if future.done():
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

        if answers and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(resolve)


class LoopEngine(ServingEngine):
    """An engine on one asyncio loop. Generations run inside `_under_way` and pass `_gate`, which an install of full weights drains;
    `_installing` admits one install at a time.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._gate = DrainGate()
        self._installing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def _under_way(self, generation: Coroutine[Any, Any, ResultT]) -> ResultT:
        """What `generation` returns; cancelled with its caller. Raises EngineError if the engine is closed meanwhile."""
        task = asyncio.ensure_future(generation)
        self._tasks.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            if self._closed:
                raise EngineError(_CLOSED) from None
            raise
        finally:
            self._tasks.discard(task)

    def _end_all(self) -> bool:
        """Close the engine for generations and end those under way. False if it was closed already."""
        was_open, self._closed = not self._closed, True
        for task in list(self._tasks):
            task.cancel()
        return was_open
