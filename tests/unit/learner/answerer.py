"""A hand that plays the workers and the reward processors of a sequential learner."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from echo_bus.request_reply import CORRELATION_ID
from echo_schemas.records import Coordinates, Purpose, ReplyOutcome, RolloutReply, RolloutRequest
from echo_schemas.topics import REQUESTS
from tests.unit.learner.pipeline import GROUP_SIZE, Pipeline

REPLY_PARTITION = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as a worker saw it. `number`: the how-many-th of its seq, from 1. `known`: checksums by version."""

    request: RolloutRequest
    correlation: str
    number: int
    pipeline: Pipeline
    known: dict[int, str]

    def publish(self, *, sha256: str | None = None, attempt: str | None = None) -> list[Coordinates]:
        """The group, with its rewards."""
        request = self.request
        return self.pipeline.write_group(
            request.seq,
            version=request.required_version,
            weights_sha256=sha256 or self.sha256(),
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
            weights_sha256=self.sha256(),
            where=tuple(places),
            time_ms=1,
        )
        answer = replace(made, **changes)  # type: ignore[arg-type]
        self.pipeline.write_reply(answer, REPLY_PARTITION)

    def answer(self) -> None:
        """As a worker does that works."""
        self.reply(self.publish())

    def sha256(self) -> str:
        """Of the version that is asked for, once it is published."""
        version = self.request.required_version
        if version not in self.known:
            self.known[version] = self.pipeline.wait_for_manifest(version).sha256
        return self.known[version]


Behaviour = Callable[[Asked], None]


def works(asked: Asked) -> None:
    """Answers everything as it should."""
    asked.answer()


class Answerer:
    """Reads `requests` on a thread and does to each training request what `behave` says. A context."""

    def __init__(self, pipeline: Pipeline, behave: Behaviour = works) -> None:
        self.seen: list[RolloutRequest] = []
        self._pipeline = pipeline
        self._behave = behave
        self._numbers: Counter[int] = Counter()
        self._known: dict[int, str] = {}
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
            with closing(self._pipeline.bus.reader([REQUESTS])) as reader:
                reader.start()
                while not self._closed.is_set():
                    for message in reader.read(timeout_s=0.01):
                        assert isinstance(message.record, RolloutRequest)
                        self._take(message.record, message.headers.get(CORRELATION_ID, b"").decode())
        except BaseException as exc:  # the edge of the thread: the test gets it
            self._error = exc

    def _take(self, request: RolloutRequest, correlation: str) -> None:
        self.seen.append(request)
        if request.purpose is not Purpose.TRAIN:
            return
        assert (request.correlation or "") == correlation
        assert request.group_size == GROUP_SIZE
        self._numbers[request.seq] += 1
        self._behave(
            Asked(
                request=request,
                correlation=correlation,
                number=self._numbers[request.seq],
                pipeline=self._pipeline,
                known=self._known,
            )
        )
