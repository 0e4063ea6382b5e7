"""The requests of one sequential step: which seqs are wanted, sent, answered or given up. Pure: no log, no clock, no thread.

    wanted ──sent──▶ on its way ── whole in the log ──▶ settled ── trained ──▶ over
      ▲                 │  ├─ not ready, failed, expired, whole by its receipt alone: again, `max_resends` times ──▶ wanted
      │                 └──┴─ silent for longer than requests take: again ──▶ wanted
      └── replacement ──┴──┴─ false answer, or no resend left ──▶ given up: a Closing, and a new seq in its place

At every moment `num_groups` seqs are open, so the batch always fills. A correlation id is taken once, a seq is settled once.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from echo_core.groups import SeqState
from echo_schemas.records import DropReason, ReplyOutcome, RolloutReply

# Correlation ids of finished seqs that are kept, to recognise late replies.
_REMEMBERED = 4096
# A request without an answer is sent again after 1, 2, 4, … up to 32 times the patience.
_MOST_DOUBLINGS = 5
_UNFULFILLED = {
    ReplyOutcome.NOT_READY: DropReason.EXPIRED,
    ReplyOutcome.EXPIRED: DropReason.EXPIRED,
    ReplyOutcome.FAILED: DropReason.FAILED,
}


class ReplyFate(StrEnum):
    """How a reply was taken. `foreign`: a refusal by a worker that did not hold the request."""

    ACCEPTED = "accepted"
    UNFULFILLED = "unfulfilled"
    REFUSED = "refused"
    DUPLICATE = "duplicate"
    LATE = "late"
    UNKNOWN = "unknown"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request to send, or on its way. Times are milliseconds since the epoch; `deadline_ms` None: the patience is not known yet."""

    seq: int
    correlation: str
    sent_ms: int
    deadline_ms: int | None = None
    resends: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """A seq that is given up."""

    seq: int
    why: DropReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyVerdict:
    """The verdict on a reply. `seq` None: it answers no request of this step. `closing`: its seq is given up."""

    fate: ReplyFate
    seq: int | None = None
    closing: Closing | None = None


@dataclass(slots=True)
class _OpenSeq:
    """A seq of this step. `sent` None: wanted. `answered`: a receipt for trajectories was taken. `whole`: the log has them.

    `silences`: how many of its `resends` followed requests without any answer.
    """

    seq: int
    resends: int = 0
    silences: int = 0
    sent: Ask | None = None
    answered: bool = False
    answered_ms: int | None = None
    whole: bool = False

    def patience_ms(self, patience_s: float) -> int:
        """Doubles after each silence: a slow worker answers in time at last, and a stuck one costs few requests."""
        return int(patience_s * 1000) << min(self.silences, _MOST_DOUBLINGS)


@dataclass(slots=True)
class _Past:
    """A request of a finished seq. The first receipt of a trained group may come after the group itself."""

    version: int
    sha256: str
    trained: bool
    answered: bool

    def fate_of(self, reply: RolloutReply, group_size: int) -> ReplyFate:
        if self.answered:
            return ReplyFate.DUPLICATE
        self.answered = True
        if reply.outcome is not ReplyOutcome.DONE or not self.trained:
            return ReplyFate.LATE
        return ReplyFate.ACCEPTED if _fault_of(reply, self.version, self.sha256, group_size) is None else ReplyFate.REFUSED


class RequestLedger:
    """The requests of one run, step after step. Used from the learner's thread alone."""

    def __init__(
        self, *, num_groups: int, group_size: int, max_resends: int, session: str, next_seq: int, again: Iterable[int] = ()
    ) -> None:
        """`next_seq` was never requested; `again`: open seqs below it without a request. `session` makes correlation ids unique."""
        self._num_groups = num_groups
        self._group_size = group_size
        self._max_resends = max_resends
        self._session = session
        self.next_seq = next_seq
        self._spare: deque[int] = deque(sorted(again))
        self._version = -1
        self._sha256 = ""
        self._open: dict[int, _OpenSeq] = {}
        self._seq_of: dict[str, int] = {}
        self._taken: set[str] = set()
        self._over: OrderedDict[str, _Past] = OrderedDict()
        self.num_given_up = 0
        """Seqs of this step that were replaced."""

    @property
    def open_seqs(self) -> frozenset[int]:
        return frozenset(self._open)

    @property
    def num_wanted(self) -> int:
        """Seqs of this step that have no request on its way."""
        return sum(each.sent is None and not each.whole for each in self._open.values())

    @property
    def current(self) -> frozenset[str]:
        """Correlation ids of requests that are on their way."""
        return frozenset(each.sent.correlation for each in self._open.values() if each.sent is not None and not each.whole)

    def adopt(self, ask: Ask) -> None:
        """Take over a request of an earlier session that is still on its way, for the version that the next `begin` names.

        Its earlier resends count as silences, since their reason is not known: refusals count from now on.
        """
        self._open[ask.seq] = _OpenSeq(seq=ask.seq, resends=ask.resends, silences=ask.resends, sent=ask)
        self._seq_of[ask.correlation] = ask.seq
        self.next_seq = max(self.next_seq, ask.seq + 1)

    def begin(self, version: int, sha256: str) -> None:
        """Begin a step at `version`, whose snapshot has `sha256`. Seqs that the step before left untrained are requested again."""
        if version == self._version:
            return
        is_first = self._version < 0
        self._version, self._sha256 = version, sha256
        self.num_given_up = 0
        if not is_first:
            left = sorted(self._open)
            for seq in left:
                self._forget(seq)
            self._spare.extendleft(reversed(left))
        while len(self._open) < self._num_groups:
            self._add()

    def next_wanted(self, now_ms: int, patience_s: float | None) -> Ask | None:
        """The request to send next, to be answered within `patience_s`; the smallest seq first. Call `sent` after sending it."""
        wanted = min((seq for seq, each in self._open.items() if each.sent is None and not each.whole), default=None)
        if wanted is None:
            return None
        each = self._open[wanted]
        return Ask(
            seq=wanted,
            correlation=f"{self._session}-{wanted}-{self._version}-{each.resends}",
            sent_ms=now_ms,
            deadline_ms=None if patience_s is None else now_ms + each.patience_ms(patience_s),
            resends=each.resends,
        )

    def sent(self, ask: Ask) -> None:
        self._open[ask.seq].sent = ask
        self._seq_of[ask.correlation] = ask.seq

    def take(self, correlation: str, reply: RolloutReply, *, is_holder: bool = True) -> ReplyVerdict:
        """Take the reply to `correlation`. `is_holder`: its sender may have held the request.

        An unexpected receipt makes a seq be sent again or given up, so it counts only from a holder, and not if the log holds the group.
        """
        if (past := self._over.get(correlation)) is not None:
            return ReplyVerdict(fate=past.fate_of(reply, self._group_size))
        seq = self._seq_of.get(correlation)
        if seq is None:
            return ReplyVerdict(fate=ReplyFate.UNKNOWN)
        each = self._open[seq]
        if correlation in self._taken or each.answered:
            return ReplyVerdict(fate=ReplyFate.DUPLICATE, seq=seq)
        fault = _fault_of(reply, self._version, self._sha256, self._group_size) if reply.outcome is ReplyOutcome.DONE else None
        is_expected = reply.outcome is ReplyOutcome.DONE and fault is None
        if not is_expected and not is_holder:
            return ReplyVerdict(fate=ReplyFate.FOREIGN, seq=seq)
        self._taken.add(correlation)
        if is_expected:
            each.answered = True
            return ReplyVerdict(fate=ReplyFate.ACCEPTED, seq=seq)
        if fault is not None:
            if each.whole:
                return ReplyVerdict(fate=ReplyFate.REFUSED, seq=seq)
            self._give_up(seq)
            return ReplyVerdict(fate=ReplyFate.REFUSED, seq=seq, closing=Closing(seq=seq, why=fault[0], detail=fault[1]))
        if each.whole or each.sent is None or each.sent.correlation != correlation:
            # Refusal of an attempt that was already resent, or whose group is whole: ignored.
            return ReplyVerdict(fate=ReplyFate.UNFULFILLED, seq=seq)
        said = f"{reply.worker_id}: {reply.error or reply.outcome.value}"
        return ReplyVerdict(fate=ReplyFate.UNFULFILLED, seq=seq, closing=self._again(seq, _UNFULFILLED[reply.outcome], said))

    def look(self, seq: int, state: SeqState, now_ms: int) -> float | None:
        """Note the log's state of an open seq. A seq that was closed without training is replaced.

        Returns the seconds that its request took, if the group has become whole.
        """
        if state is SeqState.CLOSED:
            self._give_up(seq)
            return None
        each = self._open[seq]
        was_whole, each.whole = each.whole, state is SeqState.WHOLE
        return (now_ms - each.sent.sent_ms) / 1000 if each.whole and not was_whole and each.sent is not None else None

    def expire(self, now_ms: int, patience_s: float | None, *, least_s: float) -> list[Closing]:
        """Send again requests without an answer within `patience_s`, without limit: the worker may be slow or stuck, and has not refused.
        Also those answered `least_s` ago whose group is not in the log. Returns the seqs that are given up for the latter.
        """
        found = []
        for each in list(self._open.values()):
            if each.sent is None or each.whole:
                continue
            if each.answered:
                each.answered_ms = now_ms if each.answered_ms is None else each.answered_ms
                if now_ms - each.answered_ms > least_s * 1000:
                    closing = self._again(each.seq, DropReason.LOST, "Its receipt came, its trajectories did not.")
                    found += [] if closing is None else [closing]
            elif patience_s is not None and now_ms - each.sent.sent_ms > each.patience_ms(patience_s):
                each.resends += 1
                each.silences += 1
                each.sent = None
        return found

    def trained(self, seqs: Iterable[int]) -> None:
        for seq in seqs:
            if seq in self._open:
                self._forget(seq, trained=True)

    # Private

    def _again(self, seq: int, why: DropReason, said: str) -> Closing | None:
        """Wanted once more, or given up."""
        each = self._open[seq]
        if each.resends - each.silences >= self._max_resends:
            self._give_up(seq)
            return Closing(seq=seq, why=why, detail=f"Sent {each.resends + 1} times. {said}")
        each.resends += 1
        each.sent, each.answered, each.answered_ms = None, False, None
        return None

    def _give_up(self, seq: int) -> None:
        self._forget(seq)
        self.num_given_up += 1
        self._add()

    def _forget(self, seq: int, *, trained: bool = False) -> None:
        del self._open[seq]
        for correlation in [correlation for correlation, of in self._seq_of.items() if of == seq]:
            del self._seq_of[correlation]
            self._over[correlation] = _Past(self._version, self._sha256, trained, answered=correlation in self._taken)
            self._taken.discard(correlation)
        while len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    def _add(self) -> None:
        if self._spare:
            seq = self._spare.popleft()
        else:
            seq, self.next_seq = self.next_seq, self.next_seq + 1
        self._open[seq] = _OpenSeq(seq=seq)


def _fault_of(reply: RolloutReply, version: int, sha256: str, group_size: int) -> tuple[DropReason, str] | None:
    """What is wrong with a receipt for trajectories, if anything."""
    if reply.version != version or reply.weights_sha256 != sha256:
        said = f"{reply.worker_id} answered under version {reply.version} ({reply.weights_sha256[:12]})"
        return DropReason.WRONG_VERSION, f"{said}; asked for was {version} ({sha256[:12]})."
    places = len(set(reply.where))
    if places != group_size or len(reply.where) != group_size:
        return (
            DropReason.INCOMPLETE,
            f"{reply.worker_id} names {len(reply.where)} trajectories at {places} places; asked for were {group_size}.",
        )
    return None
