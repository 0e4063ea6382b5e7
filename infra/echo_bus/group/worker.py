"""The worker thread of a consumer loop: takes batches, decodes, calls the handler, tracks the offsets.

It may block for as long as the handler does; the poll thread does not wait for it. It never calls the client: to pause or resume a
partition it appends to `requests`, which the poll thread reads.

A message for which the handler is busy waits here, and is offered again when a message in flight is done and after `busy_retry_s`. Later
messages of its partition wait behind it. When as many wait as `LoopLimits` allows, the partition is paused and further ones are skipped;
they are fetched again when all that waited are accepted. So memory stays bounded, and no other partition waits.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from echo_bus.client.cluster import RawMessage
from echo_bus.client.publisher import Receipt
from echo_bus.dead_letter_budget import DeadLetterBudget
from echo_bus.dead_letters import DeadLetters
from echo_bus.group.state import Assignment, FetchedBatch, Handover, InFlight, LoopLimits, PartitionState, Reopened, Signal
from echo_bus.message import ACCEPTED, Accepted, Busy, Handler, Invalid, Outcome
from echo_bus.reading.decoding import Decoder, IgnoredReason
from echo_bus.wire import Wire
from echo_schemas.errors import EchoError, InvalidRecord, RegistryError

logger = logging.getLogger(__name__)

# The thread checks this often whether it should stop.
_LOOK_S = 0.2
_ALONE_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class Request:
    """A request of the worker to the poll thread: resume a partition at `seek_to`, or pause it (None)."""

    state: PartitionState
    seek_to: int | None


class LoopWorker:
    """Runs on its own thread between `start` and `stop`; `error`: the exception that ended it."""

    def __init__(
        self, wire: Wire, handler: Handler, decoder: Decoder, dead_letters: DeadLetters, *, handover: Handover, limits: LoopLimits
    ) -> None:
        self.in_flight = InFlight()
        self.requests: deque[Request] = deque()
        self.error: BaseException | None = None
        self._handler = handler
        self._decoder = decoder
        self._dead_letters = dead_letters
        self._budget = DeadLetterBudget(wire.dead_letter_limits, wire.clock, wire.metrics)
        self._handover = handover
        self._metrics, self._clock = wire.metrics, wire.clock
        self._max_in_flight, self._busy_retry_s = limits.max_in_flight, limits.busy_retry_s
        self._max_waiting, self._max_waiting_bytes = limits.max_waiting_messages, limits.max_waiting_bytes
        self._busy: list[PartitionState] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="consumer worker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Offer nothing more; the handler finishes its present message."""
        self._stopping = True
        self._handover.give(Signal.STOP)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if the handler did not return in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, or has failed and is about to."""
        return self.error is not None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping:
                item = self._handover.take(self._wait_s())
                if isinstance(item, FetchedBatch):
                    self._work(item.assignment, item.messages)
                    self._handover.finished(item)
                elif isinstance(item, Reopened):
                    item.state.skipping = False
                elif item is Signal.ROOM:
                    self._offer_again(list(self._busy), until_busy=True)
                if self._busy:
                    now_s = self._clock.monotonic_s()
                    self._offer_again([state for state in self._busy if state.closed or state.retry_at_s <= now_s])
        except BaseException as exc:  # the edge of the thread: the loop raises it
            self.error = exc

    def _wait_s(self) -> float:
        """Seconds until the next busy message is due, or until the stop flag is checked."""
        now_s = self._clock.monotonic_s()
        return min([_LOOK_S, *(max(0.0, state.retry_at_s - now_s) for state in self._busy)])

    def _work(self, assignment: Assignment, messages: list[RawMessage]) -> None:
        """The hot path; rare cases are in the methods below."""
        decode, handler = self._decoder.decode, self._handler
        state: PartitionState | None = None
        physical, partition = None, None
        num_valid = num_accepted = 0
        for raw in messages:
            if raw.partition() != partition or raw.topic() != physical:
                if state is not None:
                    state.counters.accepted.inc(num_accepted)
                    num_accepted = 0
                physical, partition = raw.topic(), raw.partition()
                state = assignment.get((physical, partition))  # type: ignore[arg-type]  # a message without error has both
            if self._stopping:
                break
            if state is None or state.closed or state.skipping:
                continue
            if state.is_busy:
                self._put_behind(state, raw)
                continue
            offset: int = raw.offset()  # type: ignore[assignment]  # likewise
            tracker = state.tracker
            if tracker.position is not None and offset < tracker.position:
                continue
            try:
                message = decode(raw)
            except InvalidRecord as invalid:
                self._budget.count_valid(num_valid)
                num_valid = 0
                self._reject(state, raw, invalid, whole=self._budget.count_invalid(raw, invalid))
                continue
            except RegistryError as error:
                self._postpone(state, raw, error)
                continue
            num_valid += 1
            if message is None:
                self._ignore(state, offset)
                continue
            outcome = handler(message)
            if outcome is ACCEPTED:
                num_accepted += 1
                tracker.position = offset + 1
            elif self._settle(state, raw, outcome):
                num_accepted += 1
        if state is not None:
            state.counters.accepted.inc(num_accepted)
        self._budget.count_valid(num_valid)

    def _settle(self, state: PartitionState, raw: RawMessage, outcome: Outcome) -> bool:
        """Handle every outcome but a plain ACCEPTED. Returns whether the message was accepted."""
        offset: int = raw.offset()  # type: ignore[assignment]  # a message without error has one
        if isinstance(outcome, Busy):
            self._postpone(state, raw, None)
            return False
        if isinstance(outcome, Invalid):
            invalid = InvalidRecord(outcome.reason, outcome.detail or f"The handler refused the message: {outcome.reason}.")
            self._budget.count_invalid(raw, invalid)
            # Always whole: it is a valid record, and a reader of the dead letters may need it to close its request.
            self._reject(state, raw, invalid, whole=True)
            return False
        if not isinstance(outcome, Accepted):
            raise TypeError(f"The handler returned {outcome!r}; it must return Accepted, Invalid or Busy.")
        if outcome.completion is None:
            state.tracker.advance(offset)
        else:
            release = self._hold(state, offset)
            outcome.completion.on_done(lambda refused: release() if refused is None else self._refuse(state, raw, refused, release))
            self._wait_for_completions()
        return True

    def _hold(self, state: PartitionState, offset: int) -> Callable[[], None]:
        """Count the message as in flight; the function returned counts it as done."""
        self.in_flight.add()
        tracker = state.tracker
        tracker.hold(offset)
        if state.closed:
            # Revoked while the handler ran: if `close` came before `hold`, this message is still counted.
            self.in_flight.subtract(tracker.close())

        def release() -> None:
            tracker.release(offset)
            if self._busy:
                self._handover.give(Signal.ROOM)

        return release

    def _wait_for_completions(self) -> None:
        """Wait while `max_in_flight` messages are in flight, to bound the memory."""
        while self.in_flight.count >= self._max_in_flight and not self._stopping:
            self.in_flight.wait_below(self._max_in_flight, _LOOK_S)

    def _ignore(self, state: PartitionState, offset: int) -> None:
        self._metrics.records_ignored.labels(state.key[0], IgnoredReason.OTHER_RUN.value).inc()
        state.tracker.advance(offset)

    def _reject(self, state: PartitionState, raw: RawMessage, invalid: InvalidRecord, *, whole: bool) -> None:
        """Dead-letter a message; its offset is done when the copy is acknowledged."""
        offset: int = raw.offset()  # type: ignore[assignment]  # a message without error has one
        self._bury(state, raw, invalid, self._hold(state, offset), whole=whole)
        self._wait_for_completions()

    def _refuse(self, state: PartitionState, raw: RawMessage, refused: Invalid, release: Callable[[], None]) -> None:
        """Dead-letter an accepted message whose work has failed for good. It was readable, so no budget counts it. Any thread."""
        self._metrics.records_invalid.labels(state.key[0], refused.reason.value).inc()
        self._bury(state, raw, InvalidRecord(refused.reason, refused.detail or "Its work has failed."), release, whole=True)

    def _bury(self, state: PartitionState, raw: RawMessage, invalid: InvalidRecord, release: Callable[[], None], *, whole: bool) -> None:
        """Dead-letter a message in flight, and release it when the copy is acknowledged. Any thread."""

        def written(receipt: Receipt) -> None:
            # After a failed delivery the offset stays open, and the loop ends: the message is read again after the restart.
            if receipt.error is None:
                release()
            else:
                self._fail(receipt.error)

        self._dead_letters.send(raw, state.topic, invalid, whole).on_done(written)

    def _fail(self, error: BaseException) -> None:
        """Stop with this error; called from the publisher's poll thread."""
        if self.error is None:
            self.error = error
        self._stopping = True

    def _postpone(self, state: PartitionState, raw: RawMessage, error: EchoError | None) -> None:
        """Keep the message, before those that wait already, to be offered again."""
        if error is not None:
            logger.warning("%s[%s]@%s waits: %s", *state.key, raw.offset(), error)
        state.counters.busy.inc()
        state.waiting.appendleft(raw)
        state.waiting_bytes += len(raw)
        state.is_busy = True
        self._busy.append(state)
        # With nothing in flight no `release` reports room, so retry soon. First note the message, then read the count: `release` does the
        # reverse.
        wait_s = self._busy_retry_s if self.in_flight.count else min(self._busy_retry_s, _ALONE_RETRY_S)
        state.retry_at_s = self._clock.monotonic_s() + wait_s

    def _put_behind(self, state: PartitionState, raw: RawMessage) -> None:
        """Keep a message behind the busy one, or have the partition paused if there is no room for it."""
        if len(state.waiting) < self._max_waiting and state.waiting_bytes + len(raw) <= self._max_waiting_bytes:
            state.waiting.append(raw)
            state.waiting_bytes += len(raw)
        else:
            state.skipping = True
            self.requests.append(Request(state, None))

    def _offer_again(self, states: list[PartitionState], *, until_busy: bool = False) -> None:
        """Offer what waits in these partitions, the longest waiting first; a paused one is resumed when all of it is accepted.

        `until_busy`: stop at the first message for which the handler is busy again.
        """
        for state in states:
            if self._stopping:
                return
            self._busy.remove(state)
            paused, state.skipping, state.is_busy = state.skipping, False, False
            raw: RawMessage | None = None
            while state.waiting and not (state.closed or state.is_busy or self._stopping):
                raw = state.waiting.popleft()
                state.waiting_bytes -= len(raw)
                self._work({state.key: state}, [raw])
            state.skipping = paused
            if state.is_busy:
                if until_busy:
                    return
            elif paused and raw is not None:
                self.requests.append(Request(state, raw.offset() + 1))  # type: ignore[operator]  # it has one
