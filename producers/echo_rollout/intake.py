"""What a worker does with a request that arrives: refuse it for good, put it off, take it in hand, or answer it as it did before.

A partition that goes to another worker takes along its requests that the engine has not begun: only the new owner does them. Groups that
are begun are finished and published, and the new owner makes them again: the learner takes the attempt that is whole first.

Threads: the consumer loop calls from its one worker thread, and `keep` from its poll thread; any thread may call the rest. Nothing blocks
for longer than a chat template takes, except `done` with a dead letter while the publisher's buffer is full.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Protocol

from echo_bus.clock import Clock, Deadline
from echo_bus.errors import ClusterUnreachable
from echo_bus.message import ACCEPTED, BUSY, Accepted, Completion, Invalid, Message, Outcome
from echo_rollout.engines.engine import EngineError, check_prompt
from echo_rollout.generation import GroupPrompt
from echo_rollout.journal import ALONE_FROM, MAX_DEATHS
from echo_rollout.receipts import AwaitedRequest, Receipts
from echo_schemas.columns import view_tokens
from echo_schemas.entry import parse_entry
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import Coordinates, Purpose, RolloutRequest
from echo_tasks.prompts import ChatCodec

logger = logging.getLogger(__name__)

# Other requests wait at most so long for a suspect that was put off until nothing is in flight: another worker may have its partition now.
_SUSPECT_WAIT_S = 5.0
# Done requests that are remembered: more than are ever done between two commits.
_REMEMBERED = 4_096
# No token has more characters, so a text that is longer than all tokens together is refused without tokenising it.
_MOST_CHARACTERS = 256
MOST_SAMPLES = 4_096
"""Samples that one request may ask for: an engine takes all at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """A request in hand. `completion`: once done, the offset may be committed. `asked`: the sender wants a receipt before."""

    request: RolloutRequest
    where: Coordinates
    prompt: GroupPrompt
    text: str
    completion: Completion
    asked: AwaitedRequest | None = None
    # Further deliveries of the same record while it is in hand; they are done together with it.
    repeats: list[Completion] = field(default_factory=list)


class Deaths(Protocol):
    """Counts the deaths of workers that had a request in hand."""

    def deaths(self, where: Coordinates) -> int:
        """Deaths of workers that had the request in hand."""

    def begin(self, where: Coordinates) -> None:
        """The request is in hand."""

    def end(self, where: Coordinates) -> None:
        """The request is no longer in hand, and no worker died of it."""


class RequestIntake:
    """The handler of the consumer loop on `requests`: at most `capacity` groups are in hand."""

    def __init__(
        self,
        codec: ChatCodec,
        record: Deaths,
        *,
        capacity: int,
        vocabulary: int,
        max_length: int,
        take: Callable[[Work], None],
        clock: Clock,
        receipts: Receipts | None = None,
        is_stuck: Callable[[], bool] = lambda: False,
        num_early: Callable[[], int] = lambda: 0,
    ) -> None:
        """`take` gets each request that is taken in hand, and must not block. Without `receipts` no request is answered. `is_stuck`: no
        request is taken, because finished groups do not reach Kafka. `num_early`: requests in hand that wait for unpublished weights.
        """
        self._codec = codec
        self._record = record
        self._capacity = capacity
        self._vocabulary = vocabulary
        self._max_length = max_length
        self._take = take
        self._clock = clock
        self._receipts = receipts
        self._is_stuck = is_stuck
        self._num_early = num_early
        self._lock = threading.Lock()
        self._in_hand: dict[Coordinates, Work] = {}
        self._begun: set[Coordinates] = set()
        self._over: OrderedDict[Coordinates, tuple[str, int]] = OrderedDict()
        self._alone: Coordinates | None = None
        self._alone_until: Deadline | None = None

    @property
    def num_in_hand(self) -> int:
        """Groups taken and not ended."""
        return len(self._in_hand)

    def __call__(self, message: Message) -> Outcome:
        request, where = message.record, message.coordinates
        if not isinstance(request, RolloutRequest):
            return Invalid(InvalidReason.UNEXPECTED_RECORD)
        if self._receipts is None:
            return self._take_in_hand(request, where, None)
        try:
            asked = self._receipts.asked(message, request)
        except InvalidRecord as invalid:
            return Invalid(invalid.reason, invalid.message)
        except ClusterUnreachable as exc:
            logger.warning("A request that wants a receipt waits: %s", exc, extra={"group": request.group_id})
            return BUSY
        if asked is None:
            return self._take_in_hand(request, where, None)
        if (known := self._receipts.begin(asked)) is not None:
            return known
        outcome = self._take_in_hand(request, where, asked)
        exhausted = isinstance(outcome, Invalid) and outcome.reason is InvalidReason.RETRIES_EXHAUSTED
        if exhausted and request.purpose is Purpose.TRAIN:
            # Not answered: the learner would send the request once more. It reads the dead letter, and closes the seq.
            self._receipts.abandon(asked)
        elif isinstance(outcome, Invalid):
            self._receipts.refuse(asked, outcome.detail or outcome.reason.value)
        elif outcome is BUSY:
            self._receipts.abandon(asked)
        return outcome

    def _take_in_hand(self, request: RolloutRequest, where: Coordinates, asked: AwaitedRequest | None) -> Outcome:
        if (repeated := self._repeat(request, where)) is not None:
            return repeated
        if self._is_stuck():
            return BUSY
        deaths = self._record.deaths(where)
        if deaths >= MAX_DEATHS:
            # The deaths are kept: this process may die before the dead letter is out.
            return Invalid(InvalidReason.RETRIES_EXHAUSTED, f"{deaths} times a worker died with this request in hand.")
        if not self._has_room(where, is_suspect=deaths >= ALONE_FROM):
            return BUSY
        try:
            text, prompt = self._prompt_of(request)
        except InvalidRecord as invalid:
            return Invalid(invalid.reason, invalid.message)
        except Exception as exc:  # templates and tokenizers may raise anything for a stranger's text
            logger.exception("The prompt of %s cannot be prepared", request.group_id, extra={"group": request.group_id})
            return Invalid(InvalidReason.HANDLER_REFUSED, f"Preparing the prompt raised {type(exc).__name__}: {exc}")
        work = Work(request=request, where=where, prompt=prompt, text=text, completion=Completion(), asked=asked)
        # First, so that `keep`, which may come in between, ends it.
        self._record.begin(where)
        with self._lock:
            self._in_hand[where] = work
        self._take(work)
        return Accepted(work.completion)

    def _repeat(self, request: RolloutRequest, where: Coordinates) -> Accepted | None:
        """The outcome for a record that is delivered again after its partition came back: still in hand, or done and not committed."""
        with self._lock:
            if self._over.get(where) == (request.group_id, request.issued_ms):
                return ACCEPTED
            work = self._in_hand.get(where)
            if work is None:
                return None
            completion = Completion()
            work.repeats.append(completion)
        return Accepted(completion)

    def begins(self, work: Work) -> bool:
        """Call before the engine gets `work`. False if it is not in hand any more: it went to another worker with its partition."""
        with self._lock:
            if self._in_hand.get(work.where) is not work:
                return False
            self._begun.add(work.where)
            return True

    def keep(self, partitions: Set[int]) -> list[Work]:
        """Give up the requests of all other partitions that are not begun, and return them. Call it before a partition can come back."""
        with self._lock:
            moved = [work for where, work in self._in_hand.items() if where.partition not in partitions and where not in self._begun]
            for work in moved:
                self._forget(work)
        for work in moved:
            self._record.end(work.where)
            self._abandon(work)
        return moved

    def done(self, work: Work, refused: Invalid | None = None) -> None:
        """The group has ended, and its offset may be committed; `refused`: why it becomes a dead letter."""
        self._record.end(work.where)
        with self._lock:
            # Not the coordinates alone: a topic that was made anew has other requests there.
            self._over[work.where] = (work.request.group_id, work.request.issued_ms)
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
            was_in_hand = self._forget(work)
        if was_in_hand:
            for completion in (work.completion, *work.repeats):
                completion.done(refused)

    def handed_back(self, work: Work, *, blamed: bool) -> bool:
        """The group is given up, and its request is delivered again. `blamed`: the request may be why the worker ends. Returns whether it
        was in hand."""
        with self._lock:
            if not self._forget(work):
                return False
        if not blamed:
            self._record.end(work.where)
        self._abandon(work)
        return True

    def _forget(self, work: Work) -> bool:
        """Whether it was in hand until now. Call it with the lock."""
        if self._in_hand.get(work.where) is not work:
            return False
        del self._in_hand[work.where]
        self._begun.discard(work.where)
        if self._alone == work.where:
            self._alone = self._alone_until = None
        return True

    def _abandon(self, work: Work) -> None:
        if work.asked is not None and self._receipts is not None:
            self._receipts.abandon(work.asked)

    def forgive(self) -> None:
        """The worker ends in good order: requests in hand are handed back, and none of them counts a death."""
        with self._lock:
            left = list(self._in_hand)
        for where in left:
            self._record.end(where)

    def _has_room(self, where: Coordinates, *, is_suspect: bool) -> bool:
        """Whether the request may be taken: the capacity is not reached; a suspect is taken alone, when nothing is in hand."""
        with self._lock:
            if self._alone is not None and self._alone != where:
                waits = self._alone in self._in_hand or (self._alone_until is not None and not self._alone_until.expired())
                if waits:
                    return False
                self._alone = self._alone_until = None
            if is_suspect:
                self._alone, self._alone_until = where, Deadline.after(_SUSPECT_WAIT_S, self._clock)
                return not self._in_hand
            return len(self._in_hand) - self._num_early() < self._capacity

    def _prompt_of(self, request: RolloutRequest) -> tuple[str, GroupPrompt]:
        """The prompt as text and as the sampler takes it. Raises InvalidRecord for one that no engine of this model can serve."""
        if request.group_size > MOST_SAMPLES:
            raise InvalidRecord(
                InvalidReason.HANDLER_REFUSED, f"{request.group_size} samples are wanted; a request may ask for {MOST_SAMPLES}."
            )
        if request.messages:
            num_characters, most = sum(len(message.content) for message in request.messages), _MOST_CHARACTERS * self._max_length
            if num_characters > most:
                raise InvalidRecord(
                    InvalidReason.HANDLER_REFUSED,
                    f"The messages have {num_characters} characters; {self._max_length} tokens have at most {most}.",
                )
            text = self._codec.render(request.messages)
            token_ids = self._codec.encode(text)
        else:
            token_ids = view_tokens(request.prompt_token_ids)
        try:
            check_prompt(token_ids.tolist(), request.sampling, vocabulary=self._vocabulary, max_length=self._max_length)
        except EngineError as exc:
            raise InvalidRecord(InvalidReason.HANDLER_REFUSED, exc.message) from exc
        try:
            entry = parse_entry(request.entry)
        except ValueError as exc:
            raise InvalidRecord(InvalidReason.MALFORMED, str(exc)) from exc
        prompt = GroupPrompt(
            token_ids=token_ids,
            entry=entry,
            sampling=request.sampling,
            group_size=request.group_size,
            max_length=self._max_length,
            messages=tuple(request.messages),
        )
        return text if request.messages else self._codec.decode(token_ids), prompt
