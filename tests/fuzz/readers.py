"""Everything that judges records of strangers, by topic, without a cluster: what a role would call for each message that decodes.

A reader is made anew for each run of cases and gets all of them, so that what one case leaves behind meets the next ones. `check` says at
the end whether it still does its work for an honest record.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from echo_bus.client.publisher import Receipt
from echo_bus.clock import ManualClock
from echo_bus.message import Accepted, Busy, Invalid, Message
from echo_bus.requests.broadcast import BroadcastTimer
from echo_bus.requests.dispatch import LeastLagChooser
from echo_bus.requests.request_reply import ReplyServer
from echo_bus.requests.roster import Roster
from echo_bus.wire import Wire
from echo_core.assembly import GroupAssembler
from echo_core.dispatch import may_issue, required_version
from echo_core.patience import StepPace
from echo_core.work_shares import horizon_of
from echo_learner.admission import AdmissionLimits
from echo_learner.metrics import LearnerMetrics
from echo_learner.sequential.requesting import RequestLedger
from echo_learner.training.config import assembly_limits
from echo_learner.trust import WorkerTrust
from echo_memory.message import MemoryMessage
from echo_rollout.holding import AskersTime
from echo_rollout.intake import RequestIntake, Work
from echo_rollout.joining import ready_others
from echo_rollout.open_seqs import Ledger, OpenRequests, OpenSeqs, dispatch_state
from echo_rollout.receipts import Receipts
from echo_schemas.codec import Codec
from echo_schemas.projection import Projection
from echo_schemas.records import (
    Control,
    Coordinates,
    Progress,
    Reward,
    RewardTerm,
    RolloutReply,
    RolloutRequest,
    Trajectory,
    WorkerStatus,
)
from echo_schemas.topics import REPLIES
from echo_settings import Settings
from echo_settings.rules import staleness_policy
from echo_settings.sections import ScoringSettings
from echo_streams.intake import Intake as HeaderIntake
from echo_streams.metrics import StreamsMetrics
from echo_streams.processing import Processor
from echo_streams.scoring import Attached, Scorer
from echo_tasks.rewards import ScoredSample, reward
from tests.fuzz.mutations import NAMESPACE, NUM_PARTITIONS, RUN

VOCABULARY = 64
MAX_LENGTH = 64
SETTINGS = Settings.model_validate({"run": {"name": RUN}})
TERMS = (RewardTerm(name="exact", weight=1.0),)


class Reader:
    """Gets raw messages, then those that decode. Nothing may escape but InvalidRecord from `look`."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.clock = ManualClock()

    def look(self, raw: MemoryMessage) -> None:
        """Every message, before it is decoded."""

    def read(self, message: Message) -> None:
        """A message that decodes."""

    def check(self) -> None:
        """After all of them."""


class RolloutWorker(Reader):
    """A worker's consumer loop: the intake with receipts, whose groups all fail in the end, so that each is answered."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self.failures: list[BaseException] = []
        publisher: Any = _Replies(codec)
        server = ReplyServer(publisher, REPLIES, Wire(namespace=NAMESPACE, role="w", clock=self.clock))
        self._receipts = Receipts(server, worker_id="w", installed=lambda: None, clock=self.clock, on_error=self.failures.append)
        self._taken: list[Work] = []
        self._time = AskersTime(self.clock)
        self.num_accepted = 0
        self._intake = RequestIntake(
            _Letters(), _NoDeaths(), capacity=8, vocabulary=VOCABULARY, max_length=MAX_LENGTH, take=self._taken.append, clock=self.clock,
            receipts=self._receipts,
        )  # fmt: skip

    def read(self, message: Message) -> None:
        outcome = self._intake(message)
        assert isinstance(outcome, (Accepted, Busy, Invalid)), outcome
        self.num_accepted += isinstance(outcome, Accepted)
        for work in self._taken:
            self._time.heard(work.request)
            self._time.left_s(work.request)
            if work.asked is not None:
                self._receipts.refuse(work.asked, "x")
            self._intake.done(work)
        self._taken.clear()
        assert not self.failures, self.failures

    def check(self) -> None:
        assert self._intake.num_in_hand == 0


class FeederRequests(Reader):
    """A feeder that reads what was asked for."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._ledger, self._requests = Ledger(NUM_PARTITIONS), OpenRequests(OpenSeqs())

    def read(self, message: Message) -> None:
        request = message.record
        assert isinstance(request, RolloutRequest)
        ordinal = self._ledger.written(message.partition, message.offset)
        self._requests.issued(request.seq, message.partition, ordinal, 0.0, resends=request.resends, is_ours=False)


class RewardApplication(Reader):
    """The reward process: filtered by headers, decoded, scored, encoded."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)

        def exact(sample: ScoredSample) -> float:
            return float(len(str(sample.entry)) % 2)

        function = reward(name="exact")(exact)
        metrics = StreamsMetrics(CollectorRegistry())
        wire = Wire(namespace=NAMESPACE, role="r", codec=codec, clock=self.clock, run_id=RUN)
        scorer = Scorer(
            [Attached(name="exact", function=function)], run_id=RUN, limits=ScoringSettings(), metrics=metrics, clock=self.clock
        )
        intake = HeaderIntake(RUN, budget=2, drop_stale=True)
        self._processor = Processor(wire, scorer, intake, group="g", learner_version=lambda: 7, metrics=metrics)
        self._processor.set_num_partitions(NUM_PARTITIONS)

    def look(self, raw: MemoryMessage) -> None:
        for answer in asyncio.run(self._processor.process([raw])) if raw.value() is not None else ():
            fits(answer.key, answer.value, answer.headers)


class Learner(Reader):
    """The learner's assembler, its limits and its trust, for trajectories and rewards alike."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._assembler = GroupAssembler(RUN, TERMS, assembly_limits(SETTINGS))
        self._limits = AdmissionLimits(vocabulary=VOCABULARY, max_length=MAX_LENGTH)
        self._trust = WorkerTrust(LearnerMetrics(CollectorRegistry()), self.clock, tolerance=0.01)
        self._offsets = itertools.count()

    def read(self, message: Message) -> None:
        record, where = message.record, Coordinates(partition=message.partition, offset=next(self._offsets))
        if isinstance(record, Trajectory):
            if self._trust.wants(record) and self._limits.fault_of(record) is None:
                self._trust.offer(record)
            self._trust.fault_of(record)
            self._assembler.add_trajectory(where, record)
        elif isinstance(record, Reward):
            self._assembler.add_reward(where, record)
        self.clock.advance(0.01)
        self._assembler.tick(self.clock.monotonic_s(), range(NUM_PARTITIONS), range(NUM_PARTITIONS))

    def check(self) -> None:
        assert self._assembler.num_open - self._assembler.num_whole <= assembly_limits(SETTINGS).max_open_groups
        self._assembler.state()
        for group in self._assembler.ready:
            assert group.seq >= 0


class TrajectoryIndex(Reader):
    """The audit, which reads a few fields out of the bytes."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._fields = Projection(Trajectory, ("run_id", "seq", "attempt", "index", "purpose"), codec.ids)

    def look(self, raw: MemoryMessage) -> None:
        self._fields.read(raw.value())


class RosterOfWorkers(Reader):
    """Who gets work; the honest worker must still get some at the end."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._roster = Roster(heartbeat_s=1.0, group_size=4)
        self._chooser = LeastLagChooser(NUM_PARTITIONS, depth=2)
        self._broadcast = BroadcastTimer(self._roster, self.clock, lambda _: None)
        self._broadcast.ready(3)

    def read(self, message: Message) -> None:
        status = message.record
        if not isinstance(status, WorkerStatus):
            return
        self._broadcast.on_worker(message.key or "", status)
        ready_others([status], "w")
        self._roster.heard(status, self.clock.monotonic_s())
        self._roster.found({status.worker_id: status}, self.clock.monotonic_s(), 5)
        shares = self._roster.shares(self.clock.monotonic_s())
        self._chooser.share(shares.owners, horizon_s=horizon_of(3, 1.0), alone=shares.alone)
        chosen = self._chooser.choose()
        if chosen is not None:
            self._chooser.failed(chosen)
        self.clock.advance(0.1)


class FeederPace(Reader):
    """How much the feeder may issue, by the learner's word."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._pace = StepPace()

    def read(self, message: Message) -> None:
        progress = message.record
        if isinstance(progress, Progress):
            state, policy = dispatch_state(progress, 3), staleness_policy(SETTINGS)
            may_issue(state, policy)
            required_version(state, policy)
            self._pace.saw(progress.version, self.clock.monotonic_s())
            horizon_of(3, self._pace.step_s)
            self.clock.advance(0.1)


class SequentialLearner(Reader):
    """Who asked, and gets receipts."""

    def __init__(self, codec: Codec) -> None:
        super().__init__(codec)
        self._ledger = RequestLedger(num_groups=4, group_size=2, max_resends=2, session="s", next_seq=0)
        self._ledger.begin(3, "ab")

    def read(self, message: Message) -> None:
        reply = message.record
        assert isinstance(reply, RolloutReply)
        while (ask := self._ledger.next_wanted(10**6, None)) is not None:
            self._ledger.sent(ask)
        self._ledger.take(reply.correlation, reply)
        for current in self._ledger.current:
            self._ledger.take(current, reply)
        if self._ledger.num_given_up > 100:
            self._ledger.begin(3, "ab")


class Orders(Reader):
    """What `control` asks of a feeder."""

    def read(self, message: Message) -> None:
        order = message.record
        if isinstance(order, Control) and order.run is not None:
            assert order.run.state.value


class _Letters:
    """A character is a token; text may be anything."""

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.array([ord(letter) % VOCABULARY for letter in text], np.int32)

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(64 + int(token)) for token in token_ids)

    def render(self, messages: Any) -> str:
        # As templates do.
        if any(message.role not in {"system", "user", "assistant"} for message in messages):
            raise KeyError("role")
        return "".join(message.content for message in messages)

    def render_reply(self, content: str) -> str:
        return content


class _NoDeaths:
    def deaths(self, where: Coordinates) -> int:
        return 0

    def begin(self, where: Coordinates) -> None: ...

    def end(self, where: Coordinates) -> None: ...


class _Replies:
    """A publisher of replies: encoded and bounded, acknowledged at once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._condition = threading.Condition()

    def num_partitions(self, _topic: object) -> int:
        return NUM_PARTITIONS

    def publish(self, topic: Any, record: Any, *, partition: int, headers: Sequence[tuple[str, bytes]]) -> Receipt:
        assert 0 <= partition < NUM_PARTITIONS
        fits((topic.key_of(record) or "").encode(), self._codec.encode(record), headers)
        receipt = Receipt(self._condition)
        receipt.settle(Coordinates(partition=partition, offset=0), None)
        return receipt


def fits(key: bytes | None, value: bytes | None, headers: Sequence[tuple[str, bytes | None]]) -> None:
    """Fails for what a cluster would refuse: a million bytes is librdkafka's limit, and below every broker's."""
    size = len(key or b"") + len(value or b"") + sum(len(name.encode()) + len(content or b"") + 10 for name, content in headers)
    assert size < 1_000_000, f"{size} bytes would be refused"


READERS: dict[str, tuple[Callable[[Codec], Reader], ...]] = {
    "requests": (RolloutWorker, FeederRequests),
    "trajectories": (RewardApplication, Learner, TrajectoryIndex),
    "rewards": (Learner,),
    "replies": (SequentialLearner,),
    "workers": (RosterOfWorkers,),
    "progress": (FeederPace,),
    "control": (Orders,),
}
"""Of the other topics, the decoder and the dead letters: their records go to a learner's start, views and screens as they are."""
