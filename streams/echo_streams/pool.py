"""Processes that run synchronous reward functions, one call each at a time, so that one that hangs or dies takes only its own call along.

Threads: everything here belongs to one event loop. `call` waits for a free process, then for the answer or the limit; a process that
passes the limit is killed and replaced before its next call. The processes end with their parent, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from echo_schemas.errors import UserError
from echo_streams.metrics import StreamsMetrics
from echo_streams.values import BadValue, Score, score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample

# A fresh interpreter, numpy and whatever the user's module imports; a judge in torch takes long.
START_TIMEOUT_S = 120.0


class CallTimedOut(Exception):
    """A call passed its limit; its process was killed."""


class ProcessDied(Exception):
    """The process of a call died under it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a call gave no scores. Text, because a user's exception need not survive a pipe. `again`: another attempt may help."""

    error: str
    again: bool = True


class ScoringPool:
    """`num_processes` interpreters that have imported the functions. `start` before the first call, `close` at the end."""

    def __init__(self, functions: Sequence[RewardFunction], *, num_processes: int, metrics: StreamsMetrics) -> None:
        """Raises UserError for a function that another process could not import."""
        for function in functions:
            if not function.origin or "<locals>" in function.origin:
                raise UserError(
                    f"The reward {function.name!r} cannot run in another process: it is no attribute of a module.",
                    hint="Define it at the top of a module, or set [scoring] processes = 0.",
                )
        self._origins = tuple(function.origin for function in functions)
        self._metrics = metrics
        self._processes = [_Process(self._origins) for _ in range(num_processes)]
        self._free: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()

    async def start(self) -> None:
        """Start all processes and import the functions there. Raises UserError if one cannot be imported."""
        await asyncio.gather(*(process.start() for process in self._processes))
        for process in self._processes:
            self._free.put_nowait(process)

    async def call(self, function: RewardFunction, given: ScoredSample | list[ScoredSample], timeout_s: float) -> list[Score] | Failure:
        """The scores of one sample, or of a list for a batch function. Waiting for a free process does not count against the limit.

        Raises CallTimedOut or ProcessDied.
        """
        process = await self._free.get()
        try:
            if not process.is_running:
                await process.start()
            try:
                async with asyncio.timeout(timeout_s):
                    return await process.run(function, given)
            except TimeoutError:
                self._replace(process, "hung")
                raise CallTimedOut from None
            except BrokenProcessPool:
                self._replace(process, "died")
                raise ProcessDied from None
        finally:
            self._free.put_nowait(process)

    def close(self) -> None:
        """End the processes at once: whoever calls this has stopped waiting for them."""
        for process in self._processes:
            process.kill()

    def _replace(self, process: _Process, reason: str) -> None:
        self._metrics.pool_restarts.labels(reason).inc()
        process.kill()


class _Process:
    """One interpreter behind an executor of its own."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = origins
        self._executor: ProcessPoolExecutor | None = None
        self._pid = 0

    @property
    def is_running(self) -> bool:
        return self._executor is not None

    async def start(self) -> None:
        # Forking a process with threads copies locks in whatever state they are.
        executor = ProcessPoolExecutor(1, mp_context=mp.get_context("spawn"), initializer=_end_with_parent)
        loaded = asyncio.wrap_future(executor.submit(_load, self._origins))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await loaded
        except (TimeoutError, BrokenProcessPool) as exc:
            executor.shutdown(wait=False, cancel_futures=True)
            raise UserError(
                f"A scoring process did not start ({type(exc).__name__}).", hint="Does importing the reward's module end the process?"
            ) from exc
        if isinstance(answer, str):
            executor.shutdown(wait=False, cancel_futures=True)
            raise UserError(f"A scoring process cannot import its rewards: {answer}")
        self._executor, self._pid = executor, answer

    async def run(self, function: RewardFunction, given: Any) -> list[Score] | Failure:
        assert self._executor is not None, "started above"
        return await asyncio.wrap_future(self._executor.submit(_run, function.origin, function.kind, given))

    def kill(self) -> None:
        if self._executor is None:
            return
        executor, self._executor = self._executor, None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        executor.shutdown(wait=False, cancel_futures=True)


# What follows runs in the scoring processes.

_functions: dict[str, RewardFunction] = {}


def _end_with_parent() -> None:
    """Ctrl-C reaches the whole process group, but draining is the parent's to do; its death, even by SIGKILL, is ours too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = mp.parent_process()
    assert parent is not None, "a spawned process has a parent"

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def _load(origins: Sequence[str]) -> int | str:
    from echo_tasks.catalogue import load_reward

    try:
        for origin in origins:
            _functions[origin] = load_reward(origin)
    except UserError as exc:
        return str(exc)
    return os.getpid()


def _run(origin: str, kind: RewardKind, given: Any) -> list[Score] | Failure:
    function = _functions[origin]
    try:
        if kind is RewardKind.BATCH:
            return scores_of(function.call(given), len(given))
        return [score_of(function.call(given))]
    except BadValue as exc:
        return Failure(str(exc), again=False)
    except (Exception, SystemExit) as exc:  # a user's function may raise anything, and call exit(); the record says what
        return Failure(described(exc))


def described(exc: BaseException) -> str:
    """An exception as the error text of a reward: its class and message, at most 500 characters."""
    text = f"{type(exc).__name__}: {exc}"
    return text if len(text) <= MAX_ERROR_LENGTH else f"{text[:MAX_ERROR_LENGTH]}…"


MAX_ERROR_LENGTH = 500
