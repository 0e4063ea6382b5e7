"""Receipts tell a requester how its request ended (walk 2 of sequential mode, and every exact request with a reply address).

    request with address ──begin──▶ new: worked on ──answer──▶ replies, the partition it named
                             ├────▶ in hand already: waits for the same end      └─ acknowledged: the request's offset may be committed
                             ├────▶ answered before: the same answer again
                             └────▶ past its deadline: answered as expired, not worked on

So one correlation id costs one generation per worker, however often its request is delivered. Tasks on the asyncio loop call `answer`; any
thread calls the rest. Only a full buffer of the publisher blocks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from echo_bus.clock import Clock
from echo_bus.errors import RecordTooLarge, TransportError
from echo_bus.message import ACCEPTED, Accepted, Completion, Message
from echo_bus.requests.request_reply import Begin, ReplyAddress, ReplyServer
from echo_rollout.awaited import Awaited
from echo_rollout.engines.engine import SnapshotRef
from echo_rollout.publishing import Ending, GroupEnd
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records import ReplyOutcome, RolloutReply, RolloutRequest

logger = logging.getLogger(__name__)

# Superseded counts as not ready: the worker has a newer version than the required one.
_REPLIES = {
    GroupEnd.PUBLISHED: ReplyOutcome.DONE,
    GroupEnd.EXPIRED: ReplyOutcome.EXPIRED,
    GroupEnd.NOT_READY: ReplyOutcome.NOT_READY,
    GroupEnd.SUPERSEDED: ReplyOutcome.NOT_READY,
    GroupEnd.FAILED: ReplyOutcome.FAILED,
}
_NOTHING = SnapshotRef(version=0, sha256="")
# Most characters of the reason in an answer without trajectories.
_MOST_SAID = 1_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AwaitedRequest:
    """A request whose sender waits for a receipt: `answer` it, or `abandon` it so that it may be begun again."""

    request: RolloutRequest
    address: ReplyAddress


class Receipts:
    """Begins each correlation id once, and answers it."""

    def __init__(
        self,
        server: ReplyServer,
        *,
        worker_id: str,
        installed: Callable[[], SnapshotRef | None],
        clock: Clock,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """`installed`: the weights in force, for answers without trajectories. `on_error` gets a refusal that could not be delivered."""
        self._server = server
        self._worker_id = worker_id
        self._installed = installed
        self._clock = clock
        self._on_error = on_error
        self._lock = threading.Lock()
        self._repeats: dict[bytes, list[Completion]] = {}

    def asked(self, message: Message, request: RolloutRequest) -> AwaitedRequest | None:
        """None for a request without a reply address. Raises InvalidRecord if its headers contradict themselves or the record."""
        address = self._server.address_of(message)
        if address is None:
            if request.correlation is None:
                return None
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                f"The record wants an answer under the correlation id {request.correlation!r}, and no header says where to.",
            )
        if request.correlation not in {None, address.correlation_text}:
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                f"The record's correlation id is {request.correlation!r}, the header's {address.correlation_text!r}.",
            )
        return AwaitedRequest(request=request, address=address)

    def begin(self, asked: AwaitedRequest) -> Accepted | None:
        """None if the request is to be worked on now; else its outcome for the consumer loop."""
        while True:
            begin = self._server.begin(asked.address)
            if begin is Begin.NEW:
                with self._lock:
                    self._repeats[asked.address.correlation] = []
                return None
            if begin is Begin.ANSWERED:
                return ACCEPTED
            completion = Completion()
            if begin is Begin.EXPIRED:
                expired = Ending(outcome=GroupEnd.EXPIRED, detail="It came after its deadline.")
                self._send(asked, expired, self._unless_failed(completion.done))
                return Accepted(completion)
            with self._lock:
                repeats = self._repeats.get(asked.address.correlation)
                if repeats is not None:
                    repeats.append(completion)
                    return Accepted(completion)
            # The request was given up meanwhile: try again.

    async def answer(self, asked: AwaitedRequest, ending: Ending) -> None:
        """Send how the group ended; returns once the log has the answer. Raises TransportError."""
        answered: Awaited[None] = Awaited()
        self._send(asked, ending, lambda error: answered.settle(None) if error is None else answered.fail(error))
        await answered
        self._through(asked)

    def refuse(self, asked: AwaitedRequest, why: str) -> None:
        """Send that the request failed. Does not wait."""
        self._send(asked, Ending(outcome=GroupEnd.FAILED, detail=why), self._unless_failed(lambda: self._through(asked)))

    def abandon(self, asked: AwaitedRequest) -> None:
        """The work was given up without an answer; its deliveries stay open."""
        with self._lock:
            self._repeats.pop(asked.address.correlation, None)
        self._server.abandon(asked.address)

    def _through(self, asked: AwaitedRequest) -> None:
        """Close repeated deliveries, once the log has the answer: later ones get the same answer from the server."""
        with self._lock:
            repeats = self._repeats.pop(asked.address.correlation, [])
        for completion in repeats:
            completion.done()

    def _unless_failed(self, then: Callable[[], None]) -> Callable[[TransportError | None], None]:
        return lambda error: then() if error is None else self._on_error(error)

    def _send(self, asked: AwaitedRequest, ending: Ending, sent: Callable[[TransportError | None], None]) -> None:
        """`sent` is called once, on the publisher's poll thread or here, with None when the log has the answer, or with the error."""
        try:
            receipt = self._server.answer(asked.address, self._reply(asked, ending))
        except (InvalidRecord, RecordTooLarge) as exc:
            # Asking again would not help: the trajectories are in the log, where the requester finds them.
            logger.warning("The receipt for %s cannot be written: %s", asked.request.group_id, exc)
            sent(None)
        except TransportError as exc:
            sent(exc)
        else:
            receipt.on_done(lambda settled: sent(settled.error))

    def _reply(self, asked: AwaitedRequest, ending: Ending) -> RolloutReply:
        outcome, weights = _REPLIES[ending.outcome], ending.weights or self._installed() or _NOTHING
        return RolloutReply(
            run_id=asked.request.run_id,
            correlation=asked.address.correlation_text,
            group_id=asked.request.group_id,
            attempt=ending.attempt,
            worker_id=self._worker_id,
            outcome=outcome,
            version=weights.version,
            weights_sha256=weights.sha256,
            where=ending.where,
            error=None if outcome is ReplyOutcome.DONE else ending.said[:_MOST_SAID],
            time_ms=self._clock.time_ms(),
        )
