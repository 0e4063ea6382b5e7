"""The scoring processes of a rescore: chunks of samples in, judged samples out. No call may last without end.

A call hangs if its process has chunks and has sent no answer within the limit. The hanging sample is the first one without an answer; of a
function that takes many samples at once, all of the chunk. A process that hangs is killed with all processes that it forked, and the rest
of its chunks goes to a new one.

Threads: the caller's owns everything; each process has one thread here that only sends it chunks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_SETPIPE_SZ, fcntl
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

from echo_replay.rescoring.inside import BROKEN, READY, Answer, ScoringTask, pack_chunk, serve, unpack_answers
from echo_schemas.errors import UserError
from echo_schemas.records import Coordinates, RewardOutcome
from echo_streams.intake import Identity
from echo_streams.pool import START_TIMEOUT_S
from echo_tasks.rewards import RewardFunction, RewardKind

CHUNK = 256
"""Samples of a chunk; a batch function gets them in one call."""
CHUNK_BYTES = 4 << 20
# Chunks of a process: one in work, one ready.
_AHEAD = 2
_LOOK_S = 0.05
_READ_BYTES = 1 << 20
# A chunk has megabytes: with a pipe of the usual 64 KB both sides would take turns thirty times. More than this needs privileges.
_PIPE_BYTES = 1 << 20
# Stop after so many ended calls in a row: the next one would hang or die too.
_TRIPS = 8
# The process itself keeps the limit of an asynchronous function; only a function that does not await reaches this.
_ASYNC_GRACE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A sample to score. `compared`: its value of the reward to compare with; NaN: none."""

    where: Coordinates
    identity: Identity
    value: bytes
    compared: float


@dataclass(slots=True)
class _Chunk:
    items: Sequence[Item]
    left: dict[int, Item]


Judged = tuple[Item, Answer]


class Team:
    """`num` scoring processes. A context manager: at its end it kills them and all processes that they forked."""

    def __init__(self, task: ScoringTask, function: RewardFunction, num: int) -> None:
        """Raises UserError once a process cannot import the function."""
        self._function = function
        scoring = task.settings.scoring
        self._limit_s = scoring.timeout_s if function.timeout_s is None else function.timeout_s
        silence_s = self._limit_s * (1 + scoring.retries) + (_ASYNC_GRACE_S if function.kind is RewardKind.ASYNC else 0.0)
        self.num_processes, self.is_async = num, function.kind is RewardKind.ASYNC
        self._new = partial(_Process, task, silence_s)
        self._processes = [self._new() for _ in range(num)]
        self._num_ended = 0
        self.num_replaced = 0
        self.stopped = ""
        """Why scoring stopped, if the function only hangs or kills its process; else empty."""

    def __enter__(self) -> Team:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()

    def judge(self, chunks: Iterator[Sequence[Item]]) -> Iterator[list[Judged]]:
        """Judge the samples of `chunks`; answers come in any order. Some are missing only if `stopped` says why. Raises as `chunks`."""
        waiting: deque[Sequence[Item]] = deque()
        is_more = True
        while not self.stopped:
            while (free := min(self._processes, key=lambda each: each.num_chunks)).num_chunks < _AHEAD and (waiting or is_more):
                items = waiting.popleft() if waiting else next(chunks, None)
                if items is None:
                    is_more = False
                else:
                    free.give(items)
            busy = [process for process in self._processes if process.num_chunks]
            if not busy:
                return
            wait([process.incoming for process in busy], _LOOK_S)
            for process in busy:
                if judged := self._look(process, waiting):
                    yield judged

    def _look(self, process: _Process, waiting: deque[Sequence[Item]]) -> list[Judged]:
        """The new answers of a process. A dead or hanging process is replaced, and its chunks not begun join `waiting`."""
        # In this order: the answers that a process wrote before it died are read, and one that has just answered does not hang.
        reason = process.failure()
        judged = process.read()
        if judged:
            self._num_ended = 0
        if reason is None or (reason is RewardOutcome.TIMED_OUT and judged):
            return judged
        lost, rest = process.end_at_once(whole_chunk=self._function.kind is not RewardKind.SYNC)
        successor = self._processes[self._processes.index(process)] = self._new()
        successor.start()
        self.num_replaced += 1
        self._num_ended += 1
        if self._num_ended >= _TRIPS and self._function.at_timeout is None:
            self.stopped = f"Its last {_TRIPS} calls hung or killed their process."
        waiting.extendleft(reversed(rest))
        return judged + [(item, self._answer_for(index, reason)) for index, item in lost]

    def _answer_for(self, index: int, reason: RewardOutcome) -> Answer:
        """The answer for a sample whose call was ended."""
        if self._function.at_timeout is not None:
            return Answer(index=index, outcome=RewardOutcome.SCORED, value=self._function.at_timeout)
        if reason is RewardOutcome.TIMED_OUT:
            return Answer(index=index, outcome=reason, error=f"No answer within {self._limit_s:g} s.", seconds=self._limit_s)
        return Answer(index=index, outcome=reason, error="The scoring process died under the call.")


class _Process:
    """One scoring process and its chunks, the one in work first."""

    def __init__(self, task: ScoringTask, silence_s: float) -> None:
        self._silence_s = silence_s
        self._chunks: deque[_Chunk] = deque()
        self._data = bytearray()
        self._is_ready = False
        self._heard_s = time.monotonic()
        # Forking a process with threads copies locks in any state.
        context = mp.get_context("spawn")
        theirs_in, self._out = context.Pipe(duplex=False)
        with suppress(OSError):  # a system that allows no such size
            fcntl(self._out.fileno(), F_SETPIPE_SZ, _PIPE_BYTES)
        self.incoming, theirs_out = context.Pipe(duplex=False)
        os.set_blocking(self.incoming.fileno(), False)
        self._theirs: tuple[Connection, ...] = (theirs_in, theirs_out)
        self._process = context.Process(target=serve, args=(task, theirs_in, theirs_out), daemon=False)
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Start it; `read` returns its answers."""
        self._process.start()
        for connection in self._theirs:
            connection.close()
        threading.Thread(target=_hand_over, args=(self._to_send, self._out), name="chunks", daemon=True).start()

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def give(self, items: Sequence[Item]) -> None:
        if not self._chunks:
            self._heard_s = time.monotonic()
        self._chunks.append(_Chunk(items, dict(enumerate(items))))
        self._to_send.put(pack_chunk([(item.where, item.value) for item in items]))

    def read(self) -> list[Judged]:
        """Its new answers. Raises UserError if it cannot import the function."""
        judged: list[Judged] = []
        while data := self._read_some():
            self._data += data
            self._heard_s = time.monotonic()
        for code, answer in unpack_answers(self._data):
            if code == READY:
                self._is_ready = True
            elif code == BROKEN:
                raise UserError(f"A scoring process cannot import the reward: {answer.error}")
            else:
                chunk = self._chunks[0]
                judged.append((chunk.left.pop(answer.index), answer))
                if not chunk.left:
                    self._chunks.popleft()
        return judged

    def _read_some(self) -> bytes:
        try:
            return os.read(self.incoming.fileno(), _READ_BYTES)
        except BlockingIOError:
            return b""

    def failure(self) -> RewardOutcome | None:
        """Why it will not answer any more: it hangs, or has died. Raises UserError if it never started."""
        silent_s = time.monotonic() - self._heard_s
        if not self._process.is_alive():
            if not self._is_ready:
                raise UserError("A scoring process did not start.", hint="Does importing the reward's module end the process?")
            return RewardOutcome.FAILED
        if not self._is_ready:
            if silent_s > START_TIMEOUT_S:
                raise UserError(
                    f"A scoring process did not start within {START_TIMEOUT_S:g} s.", hint="Does importing the reward's module wait?"
                )
            return None
        return RewardOutcome.TIMED_OUT if silent_s > self._silence_s else None

    def end_at_once(self, *, whole_chunk: bool) -> tuple[list[tuple[int, Item]], list[Sequence[Item]]]:
        """End it. Returns the samples in work, all of their chunk with `whole_chunk`, and the chunks not begun."""
        self.end()
        lost: list[tuple[int, Item]] = []
        rest: list[Sequence[Item]] = []
        if self._chunks:
            under_way = list(self._chunks.popleft().left.items())
            lost = under_way if whole_chunk else under_way[:1]
            if left := [item for _, item in under_way[len(lost) :]]:
                rest.append(left)
        rest += [list(chunk.left.values()) for chunk in self._chunks]
        return lost, rest

    def end(self) -> None:
        """Kill it and the processes that it forked."""
        self._to_send.put(None)
        pid = self._process.pid
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._process.kill()
            self._process.join()
        self.incoming.close()


def _hand_over(chunks: queue.SimpleQueue[Any], connection: Connection) -> None:
    """Send chunks until told to end, or until the process no longer reads."""
    with suppress(OSError), connection:
        while (chunk := chunks.get()) is not None:
            connection.send_bytes(chunk)
