"""A hand that plays the workers and the reward processors of a sequential learner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from echo_bus.message import Message
from echo_bus.requests.request_reply import CORRELATION_ID
from echo_schemas.records import Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest, WeightManifest
from echo_schemas.topics import REQUESTS, WEIGHTS
from tests.unit.learner.pipeline import Pipeline

REPLY_PARTITION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as a worker saw it. `number`: the how-many-th of its seq, from 1. `sha256`: of the version that is asked for."""

    request: RolloutRequest
    correlation: str
    number: int
    pipeline: Pipeline
    sha256: str

    def publish(self, *, sha256: str | None = None, attempt: str | None = None) -> list[Coordinates]:
        """The group, with its rewards."""
        request = self.request
        return self.pipeline.write_group(
            request.seq,
            version=request.required_version,
            weights_sha256=sha256 or self.sha256,
            attempt=attempt or f"a{self.number}-{self.correlation[-24:]}",
            run_id=request.run_id,
        )

    def reply(self, places: list[Coordinates], **changes: object) -> None:
        """A receipt; `changes` replace its fields."""
        made = RolloutReply(
            run_id=self.request.run_id,
            correlation=self.correlation,
            group_id=self.request.group_id,
            attempt="a",
            worker_id="w0",
            outcome=ReplyOutcome.DONE if places else ReplyOutcome.FAILED,
            version=self.request.required_version,
            weights_sha256=self.sha256,
            where=tuple(places),
            time_ms=1,
        )
        answer = replace(made, **changes)  # type: ignore[arg-type]
        self.pipeline.write_reply(answer, REPLY_PARTITION)

    def answer(self) -> None:
        """As a worker does that works."""
        self.reply(self.publish())


Behaviour = Callable[[Asked], None]


def works(asked: Asked) -> None:
    """Answers everything as it should."""
    asked.answer()


class Answerer:
    """Reads `requests` on a thread and, once the version that is asked for is published, does to each what `behave` says. A context."""

    def __init__(self, pipeline: Pipeline, behave: Behaviour = works) -> None:
        self.seen: list[RolloutRequest] = []
        self._pipeline = pipeline
        self._behave = behave
        self._numbers: Counter[int] = Counter()
        self._known: dict[int, str] = {}
        self._held: list[tuple[RolloutRequest, str]] = []
        self._closed = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="answerer", daemon=True)

    def __enter__(self) -> Answerer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(60)
        if self._error is not None:
            raise self._error

    def seqs(self) -> list[int]:
        """Of the training requests, in the order of arrival."""
        return [request.seq for request in self.seen if request.purpose is Purpose.TRAIN]

    def _run(self) -> None:
        try:
            with closing(self._pipeline.bus.reader([REQUESTS, WEIGHTS])) as reader:
                reader.start()
                while not self._closed.is_set():
                    for message in reader.read(timeout_s=0.01):
                        self._take(message)
                    self._work()
        except BaseException as exc:  # the edge of the thread: the test gets it
            self._error = exc

    def _take(self, message: Message) -> None:
        record = message.record
        if isinstance(record, WeightManifest):
            self._known[record.version] = record.sha256
            return
        assert isinstance(record, RolloutRequest)
        self.seen.append(record)
        correlation = message.headers.get(CORRELATION_ID, b"").decode()
        assert (record.correlation or "") == correlation
        if record.purpose is Purpose.TRAIN:
            self._held.append((record, correlation))

    def _work(self) -> None:
        """What can be answered now. What is asked under a version that is not published yet stays."""
        ready = [each for each in self._held if each[0].required_version in self._known]
        self._held = [each for each in self._held if each[0].required_version not in self._known]
        for request, correlation in ready:
            self._numbers[request.seq] += 1
            self._behave(
                Asked(
                    request=request,
                    correlation=correlation,
                    number=self._numbers[request.seq],
                    pipeline=self._pipeline,
                    sha256=self._known[request.required_version],
                )
            )
