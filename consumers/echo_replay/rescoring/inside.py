"""The scoring process of a rescore: reads chunks of messages and writes one answer for each message, as soon as it has one.

    in    u32 count, then for each message u32 partition, i64 offset, u32 size; then the messages one behind another
    out   u32 size of what follows, u32 which message of the chunk, u8 outcome, f64 value, f64 seconds, f64 US dollars,
          u8 whether a cache answered, u32 size of the error; then the error, and the record to write

The first answer is for no message: the function is imported (`READY`), or cannot be imported (`BROKEN`, with a sentence).

Threads: the main one does everything; a second one ends the process when its parent ends.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from echo_bus.clock import SystemClock
from echo_replay.rescoring.order import RescoreOrder
from echo_runtime.opening import open_codec
from echo_schemas.codec import Codec
from echo_schemas.converters import maker_of
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.records import Coordinates, RewardOutcome, Trajectory
from echo_settings import Settings
from echo_streams.intake import Identity
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import begin_process, described
from echo_streams.scoring import Attached, Judgeable, Judgement, Scorer
from echo_streams.values import end_fork
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import CACHED, COST, RewardKind, ScoredSample, sample_of

READY, BROKEN, UNREADABLE = 255, 254, 253
_OUTCOMES = tuple(RewardOutcome)
_SIZE = struct.Struct(">I")
_PLACED = struct.Struct(">IqI")
_ANSWER = struct.Struct(">IBddd?I")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringTask:
    """The task of a scoring process. `path`: the function, as on the command line."""

    path: str
    order: RescoreOrder
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one message of a chunk. `outcome` None: the message is unreadable. `record`: the bytes to write; None after a call that
    was ended."""

    index: int
    outcome: RewardOutcome | None
    value: float | None = None
    seconds: float = 0.0
    cost_usd: float = 0.0
    is_cached: bool = False
    error: str | None = None
    record: bytes | None = None


_make_answer = maker_of(Answer)


def pack_chunk(messages: Sequence[tuple[Coordinates, bytes]]) -> bytes:
    """A chunk of messages with their places, as a scoring process reads it."""
    heads = [_PLACED.pack(where.partition, where.offset, len(message)) for where, message in messages]
    return b"".join((_SIZE.pack(len(messages)), *heads, *(message for _, message in messages)))


def unpack_answers(data: bytearray) -> list[tuple[int, Answer]]:
    """Take the whole answers off the beginning of `data`: (code, answer) each."""
    found: list[tuple[int, Answer]] = []
    at = 0
    while len(data) - at >= _SIZE.size:
        (size,) = _SIZE.unpack_from(data, at)
        end = at + _SIZE.size + size
        if len(data) < end:
            break
        index, code, value, seconds, cost_usd, is_cached, num_error = _ANSWER.unpack_from(data, at + _SIZE.size)
        behind = at + _SIZE.size + _ANSWER.size
        outcome = _OUTCOMES[code] if code < len(_OUTCOMES) else None
        answer = _make_answer(
            index=index,
            outcome=outcome,
            value=value if outcome is RewardOutcome.SCORED else None,
            seconds=seconds,
            cost_usd=cost_usd,
            is_cached=is_cached,
            error=data[behind : behind + num_error].decode() or None,
            record=bytes(data[behind + num_error : end]) or None,
        )
        found.append((code, answer))
        at = end
    del data[:at]
    return found


def serve(task: ScoringTask, incoming: Connection, outgoing: Connection) -> None:
    """The main function of a scoring process."""
    begin_process(task.settings.scoring.memory_mb)
    out = Answers(functools.partial(os.write, outgoing.fileno()))
    try:
        entry = Attached(name=task.path, function=load_reward(task.path))
        worker = Worker(entry, task, open_codec(task.settings), out)
    except UserError as exc:
        out.send(0, BROKEN, error=exc.message)
        return
    except Exception as exc:  # a user's module may raise anything
        out.send(0, BROKEN, error=described(exc))
        return
    # What the imports made stays: nobody need look at it again for cycles.
    gc.freeze()
    out.send(0, READY)
    with asyncio.Runner() as runner:
        while True:
            try:
                chunk = incoming.recv_bytes()
            except (EOFError, OSError):
                return
            worker.work(chunk, runner)


class Answers:
    """Writes answers, each at once. `write(data)` returns the number of bytes written."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._pid = os.getpid()

    def judged(self, index: int, judgement: Judgement, record: bytes) -> None:
        """Write a function's judgement of a message."""
        self.send(
            index,
            _OUTCOMES.index(judgement.outcome),
            value=judgement.value or 0.0,
            seconds=judgement.seconds,
            cost_usd=judgement.components.get(COST, 0.0),
            is_cached=judgement.components.get(CACHED, 0.0) > 0.0,
            error=judgement.error or "",
            record=record,
        )

    def send(
        self,
        index: int,
        code: int,
        *,
        value: float = 0.0,
        seconds: float = 0.0,
        cost_usd: float = 0.0,
        is_cached: bool = False,
        error: str = "",
        record: bytes = b"",
    ) -> None:
        end_fork(self._pid)
        said = error.encode()
        head = _ANSWER.pack(index, code, value, seconds, cost_usd, is_cached, len(said))
        data = b"".join((_SIZE.pack(len(head) + len(said) + len(record)), head, said, record))
        while data:
            data = data[self._write(data) :]


class Worker:
    """Applies one function to the messages of chunks."""

    def __init__(self, entry: Attached, task: ScoringTask, codec: Codec, out: Answers) -> None:
        self._entry, self._order, self._codec, self._out = entry, task.order, codec, out
        self._clock = SystemClock()
        self._scorer = Scorer([entry], run_id=task.order.run_id, limits=task.settings.scoring, metrics=StreamsMetrics(), clock=self._clock)

    def work(self, chunk: bytes, runner: asyncio.Runner) -> None:
        """Write an answer to each message of a chunk."""
        if self._entry.function.kind is RewardKind.SYNC:
            for index, where, message in _messages(chunk):
                if (item := self._read(index, where, message)) is not None:
                    self._judged(index, item, self._scorer.judge_now(self._entry, item))
        else:
            runner.run(self._together(chunk))

    async def _together(self, chunk: bytes) -> None:
        """Call an asynchronous function for all messages at once, a batch function once for the whole chunk."""
        items: dict[int, Judgeable] = {}
        samples: dict[int, ScoredSample] = {}
        for index, where, message in _messages(chunk):
            if (item := self._read(index, where, message)) is None:
                continue
            items[index] = item
            try:
                samples[index] = sample_of(item.trajectory)
            except (ValueError, RecursionError) as exc:
                self._judged(index, item, Judgement(outcome=RewardOutcome.FAILED, error=described(exc)))
        if self._entry.function.kind is RewardKind.BATCH:
            found = await self._scorer.judge_together(self._entry, list(samples.values())) if samples else []
            for index, judgement in zip(samples, found, strict=True):
                self._judged(index, items[index], judgement)
            return

        async def alone(index: int, sample: ScoredSample) -> None:
            (judgement,) = await self._scorer.judge_together(self._entry, [sample])
            self._judged(index, items[index], judgement)

        await asyncio.gather(*(alone(index, sample) for index, sample in samples.items()))

    def _judged(self, index: int, item: Judgeable, judgement: Judgement) -> None:
        record = self._order.record(Identity.of(item.trajectory), item.at, judgement, self._clock.time_ms())
        self._out.judged(index, judgement, self._codec.encode(record))

    def _read(self, index: int, where: Coordinates, message: bytes) -> Judgeable | None:
        """The message's trajectory. None if it is unreadable; then the answer is written."""
        try:
            record = self._codec.decode(message)
        except InvalidRecord:
            record = None
        if isinstance(record, Trajectory):
            return Judgeable(trajectory=record, at=where)
        self._out.send(index, UNREADABLE)
        return None


def _messages(chunk: bytes) -> Iterator[tuple[int, Coordinates, bytes]]:
    (count,) = _SIZE.unpack_from(chunk)
    at = _SIZE.size + count * _PLACED.size
    for index in range(count):
        partition, offset, size = _PLACED.unpack_from(chunk, _SIZE.size + index * _PLACED.size)
        yield index, Coordinates(partition=partition, offset=offset), chunk[at : at + size]
        at += size
