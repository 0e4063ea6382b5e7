"""What a scoring process of a rescore does: chunks of messages in, one answer for each message out, as soon as it is there.

    in    u32 count, then for each message u32 size; then the messages one behind another
    out   u32 size of what follows, u32 which message of the chunk, u8 outcome, f64 value, f64 seconds, JSON or nothing

The first answer is for no message: the function is imported (`READY`), or cannot be (`BROKEN`, with a sentence).

Threads: everything on the main one, but for one that ends the process with its parent.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from echo_bus.clock import SystemClock
from echo_runtime.opening import open_codec
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.records import Coordinates, RewardOutcome, Trajectory
from echo_settings import Settings
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import begin_process, described
from echo_streams.scoring import Attached, Judgeable, Judgement, Scorer, ScoringLimits
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import RewardKind, ScoredSample, sample_of

READY, BROKEN, UNREADABLE = 255, 254, 253
_OUTCOMES = tuple(RewardOutcome)
_SIZE = struct.Struct(">I")
_ANSWER = struct.Struct(">IBdd")
# Where a message lies is the parent's to know.
_NOWHERE = Coordinates(partition=0, offset=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """What a scoring process is told. `path`: the function, as the command line names it."""

    path: str
    settings: Settings
    limits: ScoringLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of one message of a chunk. `outcome` None: nobody can read it."""

    index: int
    outcome: RewardOutcome | None
    value: float | None = None
    seconds: float = 0.0
    components: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None


def pack_chunk(messages: Sequence[bytes]) -> bytes:
    """Messages as a scoring process takes them."""
    sizes = struct.pack(f">I{len(messages)}I", len(messages), *map(len, messages))
    return b"".join((sizes, *messages))


def unpack_answers(data: bytearray) -> list[tuple[int, Answer]]:
    """The whole answers at the beginning of `data`, which they are removed from: (code, answer) each."""
    found: list[tuple[int, Answer]] = []
    at = 0
    while len(data) - at >= _SIZE.size:
        (size,) = _SIZE.unpack_from(data, at)
        end = at + _SIZE.size + size
        if len(data) < end:
            break
        index, code, value, seconds = _ANSWER.unpack_from(data, at + _SIZE.size)
        rest = bytes(data[at + _SIZE.size + _ANSWER.size : end])
        outcome = _OUTCOMES[code] if code < len(_OUTCOMES) else None
        said = json.loads(rest) if rest else {}
        answer = Answer(
            index=index,
            outcome=outcome,
            value=value if outcome is RewardOutcome.SCORED else None,
            seconds=seconds,
            components=said.get("components", {}),
            error=said.get("error"),
        )
        found.append((code, answer))
        at = end
    del data[:at]
    return found


def serve(errand: Errand, incoming: Connection, outgoing: Connection) -> None:
    """The life of a scoring process."""
    # A group of its own: what a function forks is ended with it.
    os.setpgid(0, 0)
    begin_process(errand.settings.scoring.memory_mb)
    out = Answers(functools.partial(os.write, outgoing.fileno()))
    try:
        entry = Attached(name=errand.path, function=load_reward(errand.path))
        worker = Worker(entry, errand.limits, open_codec(errand.settings), out)
    except UserError as exc:
        out.send(0, BROKEN, said={"error": exc.message})
        return
    except Exception as exc:  # a user's module may raise anything
        out.send(0, BROKEN, said={"error": described(exc)})
        return
    out.send(0, READY)
    with asyncio.Runner() as runner:
        while True:
            try:
                chunk = incoming.recv_bytes()
            except (EOFError, OSError):
                return
            worker.work(chunk, runner)


class Answers:
    """Writes answers, each at once. `write(data)` says how many bytes of it were taken."""

    def __init__(self, write: Callable[[bytes], int]) -> None:
        self._write = write
        self._pid = os.getpid()

    def judged(self, index: int, judgement: Judgement) -> None:
        """What a function said of a message."""
        said = {"components": dict(judgement.components), "error": judgement.error}
        code = _OUTCOMES.index(judgement.outcome)
        self.send(index, code, value=judgement.value or 0.0, seconds=judgement.seconds, said=said if any(said.values()) else None)

    def send(self, index: int, code: int, *, value: float = 0.0, seconds: float = 0.0, said: Mapping[str, object] | None = None) -> None:
        """One answer."""
        if os.getpid() != self._pid:
            # A function has forked and returned twice; only the process that was asked may answer.
            os._exit(0)
        rest = json.dumps(said).encode() if said else b""
        data = _SIZE.pack(_ANSWER.size + len(rest)) + _ANSWER.pack(index, code, value, seconds) + rest
        while data:
            data = data[self._write(data) :]


class Worker:
    """One function and the messages that it is asked about."""

    def __init__(self, entry: Attached, limits: ScoringLimits, codec: Codec, out: Answers) -> None:
        self._entry, self._codec, self._out = entry, codec, out
        self._scorer = Scorer([entry], run_id="", limits=limits, metrics=StreamsMetrics(), clock=SystemClock())

    def work(self, chunk: bytes, runner: asyncio.Runner) -> None:
        """Answer each message of a chunk."""
        if self._entry.function.kind is RewardKind.SYNC:
            self._one_by_one(chunk)
        else:
            runner.run(self._together(chunk))

    def _one_by_one(self, chunk: bytes) -> None:
        for index, message in enumerate(_messages(chunk)):
            trajectory = self._read(index, message)
            if trajectory is not None:
                self._out.judged(index, self._scorer.judge_now(self._entry, Judgeable(trajectory=trajectory, at=_NOWHERE)))

    async def _together(self, chunk: bytes) -> None:
        """Asynchronous functions at once, each answer when it is there; a batch function with all of the chunk."""
        samples: dict[int, ScoredSample] = {}
        for index, message in enumerate(_messages(chunk)):
            if (trajectory := self._read(index, message)) is None:
                continue
            try:
                samples[index] = sample_of(trajectory)
            except (ValueError, RecursionError) as exc:
                self._out.judged(index, Judgement(outcome=RewardOutcome.FAILED, error=described(exc)))
        if self._entry.function.kind is RewardKind.BATCH:
            found = await self._scorer.judge_together(self._entry, list(samples.values())) if samples else []
            for index, judgement in zip(samples, found, strict=True):
                self._out.judged(index, judgement)
            return

        async def alone(index: int, sample: ScoredSample) -> None:
            (judgement,) = await self._scorer.judge_together(self._entry, [sample])
            self._out.judged(index, judgement)

        await asyncio.gather(*(alone(index, sample) for index, sample in samples.items()))

    def _read(self, index: int, message: bytes) -> Trajectory | None:
        """None if nobody can read it, which is the answer then."""
        try:
            record = self._codec.decode(message)
        except InvalidRecord:
            record = None
        if isinstance(record, Trajectory):
            return record
        self._out.send(index, UNREADABLE)
        return None


def _messages(chunk: bytes) -> list[bytes]:
    (count,) = _SIZE.unpack_from(chunk)
    sizes = struct.unpack_from(f">{count}I", chunk, _SIZE.size)
    at, found = _SIZE.size * (1 + count), []
    for size in sizes:
        found.append(chunk[at : at + size])
        at += size
    return found
