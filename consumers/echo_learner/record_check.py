"""Compares every record of `trajectories` with the request of its seq, which is built again from settings and task.

    record ─▶ does the file allow its kind? ─▶ was its seq issued? ─▶ task, size, sampling, entry, prompt as asked ─▶ assembler
                └──────────────────────────────── no: a dead letter that names the worker ────────────────────────────┘

A record's own claims (`offline`, missing log-probabilities) count only where the settings allow them. The request need not be in the log
any more: it is a pure function of task, seed and seq. `Evaluations` compares its own trajectories, since each evaluation has its own task.

Threads: the reader thread calls it, and runs `task.prompt` and the tokenizer, once for each group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.message import Message
from echo_bus.reading.reader import LogReader
from echo_schemas.columns import TOKEN_BYTES, pack_tokens, view_tokens
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import LogprobSource, Purpose, RolloutRequest, Span, Trajectory
from echo_schemas.topics import REQUESTS
from echo_settings import Settings
from echo_settings.rules import training_sampling
from echo_tasks.prompts import ChatCodec, continued
from echo_tasks.requests import RequestBuilder
from echo_tasks.task import SingleTurn, Task

IsIssued = Callable[[int], bool]
"""Whether a seq was ever issued."""

# Requests kept: the groups of all workers come side by side. An older request is built again.
_REMEMBERED = 1_024
# A worker can choose a name of any length.
_MOST_NAME = 64
_MOST_TEXT = 500
# Stands for an observation, to find the text before it.
_OBSERVATION = "EchoSwarmObservationStandsHere"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """A request with its prompt as text and as token ids."""

    request: RolloutRequest
    text: str
    token_ids: bytes


class CountedRequests:
    """Under `free` admission the number of requests ever written bounds the seqs: each seq above the floor has at least one.

    Asks the cluster for that number only when a seq above the known bound comes. `close` it.
    """

    def __init__(self, bus: Bus, floor: Callable[[], int]) -> None:
        """`floor`: every seq below it is closed."""
        self._bus = bus
        self._floor = floor
        self._reader: LogReader | None = None
        self._num_written = 0

    def __call__(self, seq: int) -> bool:
        """Whether `seq` may have been issued. Raises TransportError."""
        if seq >= self._floor() + self._num_written:
            if self._reader is None:
                self._reader = self._bus.look([REQUESTS])
            self._num_written = sum(self._reader.end_offsets().values())
        return seq < self._floor() + self._num_written

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class RecordCheck:
    """Raises InvalidRecord for a record without a request. `is_issued` may be replaced before reading begins."""

    def __init__(self, settings: Settings, task: Task, prompts: ChatCodec, is_issued: IsIssued = lambda seq: False) -> None:
        """`prompts`: the base model's text codec."""
        self.is_issued = is_issued
        self._settings = settings
        self._sampling = training_sampling(settings.rollout)
        self._builder = RequestBuilder(run_id=settings.run.name, task=task, seed=settings.run.seed, prompts=prompts)
        self._prompts = prompts
        self._has_one_turn = isinstance(task, SingleTurn)
        self._known: OrderedDict[tuple[Purpose, int], _Asked] = OrderedDict()

    def __call__(self, message: Message) -> None:
        """Raises InvalidRecord for a trajectory that differs from its request, and for a dead request of a seq that was never issued."""
        record = message.record
        if isinstance(record, Trajectory) and record.purpose is not Purpose.EVAL:
            fault = self._fault_of(record)
            who = f"Worker {record.worker_id[:_MOST_NAME]!r}"
        elif isinstance(record, RolloutRequest) and record.purpose is Purpose.TRAIN:
            fault, who = self._never_issued(record.seq), "A dead request"
        else:
            return
        if fault is not None:
            raise InvalidRecord(InvalidReason.NOT_ASKED, f"{who} sent what no request asked for: {fault}"[:_MOST_TEXT])

    def _fault_of(self, record: Trajectory) -> str | None:
        if record.purpose is Purpose.TRAIN and (fault := self._never_issued(record.seq)) is not None:
            return fault
        if record.is_exempt:
            return self._fault_of_episode(record)
        if record.logprob_source is LogprobSource.RECOMPUTED and self._settings.rollout.missing_logprobs != "recompute":
            return 'no log-probabilities; [rollout] missing_logprobs = "recompute" would allow that.'
        if record.logprob_source is LogprobSource.RECOMPUTED and self._sampling.cuts:
            return "no log-probabilities; with [rollout] top_p, top_k or min_p only the sampler knows them."
        asked = self._asked(record.purpose, record.seq)
        request = asked.request
        if record.task != request.task:
            return f"the task {record.task[:_MOST_NAME]!r} in place of {request.task!r}."
        if record.group_size != request.group_size:
            return f"a group of {record.group_size} in place of {request.group_size}."
        if record.sampling != request.sampling:
            return f"{record.sampling} in place of {request.sampling}."
        if record.num_generated > request.sampling.max_new_tokens:
            return f"{record.num_generated} generated tokens, above {request.sampling.max_new_tokens}."
        most = self._settings.rollout.max_turn_tokens
        if most is not None and any(span.end - span.start > most for span in record.generated):
            return f"an answer of more than {most} tokens in one turn."
        if record.entry != request.entry:
            return f"another entry of seq {record.seq} than the task {request.task!r} has."
        if not self._has_prompt(record, asked):
            return f"another prompt of seq {record.seq} than the task {request.task!r} has."
        return None

    def _never_issued(self, seq: int) -> str | None:
        return None if self.is_issued(seq) else f"seq {seq}, which was never issued."

    def _fault_of_episode(self, record: Trajectory) -> str | None:
        """An episode that was logged elsewhere has no request; the settings say whether the run takes any."""
        if not self._settings.offline.episodes:
            return "an episode that was logged elsewhere, and [offline] episodes names no file."
        if record.purpose is not Purpose.TRAIN or record.task != self._settings.task.name or record.group_size < 2:
            return "a logged episode that is not one of a group of this task."
        return None

    def _asked(self, purpose: Purpose, seq: int) -> _Asked:
        """The request of (purpose, seq) with its prompt. Raises InvalidRecord if the task has no prompt of that seq."""
        key = (purpose, seq)
        known = self._known.get(key)
        if known is not None:
            return known
        rollout = self._settings.rollout
        size = rollout.probe_size if purpose is Purpose.PROBE else rollout.group_size
        try:
            request = self._builder.build(seq, purpose, group_size=size, sampling=self._sampling)
        except Exception as exc:  # a task is the user's code and may raise anything
            why = f"The task has no prompt of seq {seq}: {type(exc).__name__}: {exc}"
            raise InvalidRecord(InvalidReason.NOT_ASKED, why) from exc
        if request.messages:
            text = self._prompts.render(request.messages)
            token_ids = pack_tokens(self._prompts.encode(text))
        else:
            token_ids = request.prompt_token_ids
            text = self._prompts.decode(view_tokens(token_ids))
        found = self._known[key] = _Asked(request=request, text=text, token_ids=token_ids)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return found

    def _has_prompt(self, record: Trajectory, asked: _Asked) -> bool:
        """Whether the record begins with the prompt of its request. An environment may add its first observation."""
        start = record.generated[0].start * TOKEN_BYTES
        if self._has_one_turn:
            answer = Span(start=len(asked.token_ids) // TOKEN_BYTES, end=len(record.token_ids) // TOKEN_BYTES)
            is_same = record.prompt == asked.text and record.token_ids.startswith(asked.token_ids)
            return is_same and record.generated == (answer,)
        if record.prompt == asked.text:
            return start >= len(asked.token_ids) and record.token_ids.startswith(asked.token_ids)
        if not asked.request.messages or not record.prompt.startswith(self._opening(asked)):
            return False
        # A chat with the observation added is tokenised anew as a whole.
        return pack_tokens(self._prompts.encode(record.prompt)) == record.token_ids[:start]

    def _opening(self, asked: _Asked) -> str:
        """The rendered prompt up to the observation."""
        return self._prompts.render(continued(asked.request.messages, _OBSERVATION)).partition(_OBSERVATION)[0]
