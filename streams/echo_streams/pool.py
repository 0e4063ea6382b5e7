"""Processes that run synchronous reward functions, one call each at a time, so that a call that hangs or dies harms no other call.

A free process goes to the waiting function that had the least time lately, so a function that hangs does not delay the others. The output
and the memory of functions are limited.

Threads: everything here belongs to one event loop. `call` waits for a free process, then for the answer or the limit; a process that
passes the limit is killed and replaced before its next call. The processes end with their parent, even if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing as mp
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from echo_runtime.notices import Notices
from echo_schemas.errors import UserError
from echo_streams.metrics import StreamsMetrics
from echo_streams.values import BadValue, Score, end_fork, score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample

logger = logging.getLogger(__name__)

# For a new interpreter, numpy and the imports of the user's module; a judge in torch takes long.
START_TIMEOUT_S = 120.0


# Bytes that functions may print in a minute; the rest is left out.
PRINTED_BYTES = 64 * 1024
_PRINTED_S = 60.0
# When one function has used so much, the used times of all are halved, so that older use counts less.
_FAIR_OVER_S = 60.0
_MIB = 1 << 20


class CallTimedOut(Exception):
    """A call passed its limit; its process was killed."""


class ProcessDied(Exception):
    """The process of a call died under it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no scores. As text, because a user's exception may not be picklable. `again`: another attempt may help."""

    error: str
    again: bool = True


class ScoringPool:
    """`num_processes` interpreters that have imported the functions. `start` before the first call, `close` at the end."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        num_processes: int,
        metrics: StreamsMetrics,
        memory_mb: int = 0,
        notices: Notices | None = None,
    ) -> None:
        """`memory_mb`: what a process may allocate; 0: no limit. Raises UserError for a function that another process cannot import."""
        for function in functions:
            if not function.origin or "<locals>" in function.origin:
                raise UserError(
                    f"The reward {function.name!r} cannot run in another process: it is no attribute of a module.",
                    hint="Define it at the top of a module, or set [scoring] processes = 0.",
                )
        self._origins = tuple(function.origin for function in functions)
        self._metrics = metrics
        self._notices = notices or Notices()
        self._num_restarts = 0
        self._processes = [_Process(self._origins, memory_mb) for _ in range(num_processes)]
        self._turns = _Turns()

    async def start(self) -> None:
        """Start all processes and import the functions there. Raises UserError if one cannot be imported."""
        await asyncio.gather(*(process.start() for process in self._processes))
        for process in self._processes:
            self._turns.give_back(process, "", 0.0)

    async def call(
        self,
        function: RewardFunction,
        given: ScoredSample | list[ScoredSample],
        timeout_s: float,
        before: Callable[[], object] = lambda: None,
    ) -> list[Score] | Failure:
        """The scores of one sample, or of a list for a batch function. Waiting for a process does not count against the limit.

        `before()` is called once a process is ready, and may raise. Raises CallTimedOut or ProcessDied.
        """
        process = await self._turns.take(function.origin)
        started_s = time.monotonic()
        try:
            if not process.is_running:
                await process.start()
            before()
            try:
                async with asyncio.timeout(timeout_s):
                    return await process.run(function, given)
            except TimeoutError:
                self._replace(process, "hung", function)
                raise CallTimedOut from None
            except BrokenProcessPool:
                self._replace(process, "died", function)
                raise ProcessDied from None
        finally:
            self._turns.give_back(process, function.origin, time.monotonic() - started_s)

    def close(self, *, waits: bool = False) -> None:
        """End the processes at once, with their calls. `waits`: until nothing of them is left."""
        for process in self._processes:
            process.kill(waits=waits)

    def _replace(self, process: _Process, reason: str, function: RewardFunction) -> None:
        self._metrics.pool_restarts.labels(reason).inc()
        self._num_restarts += 1
        self._notices.say(
            "scoring processes",
            f"A scoring process {reason} in the reward {function.origin} and was replaced; {self._num_restarts} were replaced so far.",
        )
        process.kill()


class _Turns:
    """The free processes, and the calls that wait for one: the function with the least time lately comes first."""

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._waiting: dict[str, deque[asyncio.Future[_Process]]] = {}
        self._used_s: dict[str, float] = {}

    async def take(self, origin: str) -> _Process:
        if self._free:
            return self._free.pop()
        turn: asyncio.Future[_Process] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(origin, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(turn.result(), origin, 0.0)
            raise

    def give_back(self, process: _Process, origin: str, seconds: float) -> None:
        """`process` is free; `origin` had it for `seconds`."""
        used_s = self._used_s[origin] = self._used_s.get(origin, 0.0) + seconds
        if used_s > _FAIR_OVER_S:
            self._used_s = {name: each / 2 for name, each in self._used_s.items()}
        self._free.append(process)
        while self._free and (waiting := [name for name, turns in self._waiting.items() if turns]):
            turn = self._waiting[min(waiting, key=lambda name: self._used_s.get(name, 0.0))].popleft()
            if not turn.done():
                turn.set_result(self._free.pop())


class _Process:
    """One interpreter behind an executor of its own."""

    def __init__(self, origins: tuple[str, ...], memory_mb: int) -> None:
        self._origins = origins
        self._memory_mb = memory_mb
        self._executor: ProcessPoolExecutor | None = None
        self._pid = 0

    @property
    def is_running(self) -> bool:
        return self._executor is not None

    async def start(self) -> None:
        # Spawned, not forked: a fork of a process with threads may copy held locks.
        executor = ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"), initializer=begin_process, initargs=(self._memory_mb,))
        self._executor, self._pid = executor, 0
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                # First its number, so that it can be ended while it imports: at its end this process waits for those that it started.
                self._pid = await asyncio.wrap_future(executor.submit(os.getpid))
                refused = await asyncio.wrap_future(executor.submit(_load, self._origins))
        except (TimeoutError, BrokenProcessPool) as exc:
            self.kill()
            raise UserError(
                f"A scoring process did not start ({type(exc).__name__}).", hint="Does importing the reward's module end the process?"
            ) from exc
        if refused:
            self.kill()
            raise UserError(f"A scoring process cannot import its rewards: {refused}")

    async def run(self, function: RewardFunction, given: Any) -> list[Score] | Failure:
        assert self._executor is not None, "started above"
        return await asyncio.wrap_future(self._executor.submit(_run, function.origin, function.kind, given))

    def kill(self, *, waits: bool = False) -> None:
        if self._executor is None:
            return
        executor, self._executor = self._executor, None
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        executor.shutdown(wait=waits, cancel_futures=True)


# The rest runs in the scoring processes.

_functions: dict[str, RewardFunction] = {}


def begin_process(memory_mb: int) -> None:
    """Prepare this process for users' functions: it ends with its parent, and with it what functions have forked; its output and memory are
    limited."""
    os.setpgid(0, 0)
    _end_with_parent()
    _limit_output()
    if memory_mb:
        _limit_memory(memory_mb * _MIB)


def _limit_memory(num_bytes: int) -> None:
    """Allocating more raises MemoryError in the function, or ends its process. Memory that is only mapped does not count."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard), hard))
    except (ImportError, OSError, ValueError) as exc:
        logger.warning("The memory of a scoring process cannot be limited here: %s", exc)


def _limit_output() -> None:
    """Send all output, also that of native code, through a pipe from which a thread passes on a bounded part."""
    passed = os.dup(2)
    reading, writing = os.pipe()
    for descriptor in (1, 2):
        os.dup2(writing, descriptor)
    os.close(writing)
    threading.Thread(target=pass_bounded, args=(reading, passed), name="output", daemon=True).start()


def pass_bounded(reading: int, writing: int, clock: Callable[[], float] = time.monotonic) -> None:
    """Copy from one descriptor to another until the first ends: `PRINTED_BYTES` a minute, with a line where output is left out."""
    began_s, num_passed, is_told = clock(), 0, False
    while data := os.read(reading, PRINTED_BYTES):
        if clock() - began_s > _PRINTED_S:
            began_s, num_passed, is_told = clock(), 0, False
        part = data[: PRINTED_BYTES - num_passed]
        num_passed += len(part)
        _write_all(writing, part)
        if len(part) < len(data) and not is_told:
            is_told = True
            _write_all(writing, b"\n[Rewards print more than is kept; the rest of this minute is left out.]\n")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _end_with_parent() -> None:
    """Ignore Ctrl-C, which reaches the whole process group, because the parent drains; end when the parent dies, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None, "a spawned process has a parent"

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _load(origins: Sequence[str]) -> str:
    """Import the functions; returns why that is not possible, or nothing."""
    from echo_tasks.catalogue import load_reward

    try:
        for origin in origins:
            _functions[origin] = load_reward(origin)
    except UserError as exc:
        return str(exc)
    except MemoryError:
        return "its module needs more memory than [scoring] memory_mb gives it."
    return ""


def _run(origin: str, kind: RewardKind, given: Any) -> list[Score] | Failure:
    function, pid = _functions[origin], os.getpid()
    try:
        if kind is RewardKind.BATCH:
            return scores_of(function.call(given), len(given))
        return [score_of(function.call(given))]
    except BadValue as exc:
        return Failure(str(exc), again=False)
    except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record has the error
        return Failure(described(exc))
    finally:
        end_fork(pid)


def described(exc: BaseException) -> str:
    """An exception as the error text of a reward: class and message, at most 500 characters that are valid UTF-8."""
    try:
        message = str(exc)
    except Exception:  # a user's exception may raise in __str__
        message = "it has no message"
    if isinstance(exc, MemoryError) and not message:
        message = "it needs more memory than there is, or than [scoring] memory_mb allows."
    text = f"{type(exc).__name__}: {message}"[: MAX_ERROR_LENGTH + 1].encode(errors="replace").decode()
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}…"


MAX_ERROR_LENGTH = 500
