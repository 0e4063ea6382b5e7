"""Sends the prompts of an evaluation: requests for exactly one version, to the partition with the least work."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock
from echo_bus.errors import ClusterUnreachable
from echo_bus.requests.dispatch import LeastLagChooser, WorkObserver
from echo_core.evaluation import EvaluationSpec, evaluation_seq
from echo_schemas.errors import EchoError
from echo_schemas.records import Purpose
from echo_schemas.topics import REQUESTS
from echo_tasks import requests
from echo_tasks.prompts import TextCodec
from echo_tasks.requests import RequestBuilder
from echo_tasks.task import Prompt, Task

logger = logging.getLogger(__name__)

# No bound on the depth: the window bounds the requests, and the lag only chooses the partition.
_ANY_DEPTH = 1 << 30
# Seconds between two looks at the workers' offsets, which move about once a second.
_OBSERVE_EVERY_S = 0.5


class PromptFailed(EchoError):
    """The task could not make a prompt of an evaluation; only this evaluation is given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An evaluation with its task."""

    spec: EvaluationSpec
    task: Task


class EvaluationRequests:
    """Writes requests of purpose `eval`. Used from the evaluations' thread; `close` it."""

    def __init__(self, run_id: str, publisher: Publisher, observer: WorkObserver, prompts: TextCodec, clock: Clock) -> None:
        """Owns `publisher` and `observer`. `observer` watches the workers' group."""
        self._run_id = run_id
        self._publisher = publisher
        self._observer = observer
        self._prompts = prompts
        self._clock = clock
        self._chooser: LeastLagChooser | None = None
        self._num_partitions = 0
        self._observe_at_s = 0.0

    def ask(self, planned: Planned, version: int, index: int, *, again: bool) -> None:
        """Prompt `index` of an evaluation under `version`. Raises PromptFailed, TransportError (of this or an earlier request)."""
        spec, now_ms = planned.spec, self._clock.time_ms()
        seq = evaluation_seq(version, spec.name, index)
        builder = RequestBuilder(run_id=self._run_id, task=planned.task, seed=spec.seed, prompts=self._prompts)
        request = replace(
            builder.build_of(_prompt(planned, index), seq, Purpose.EVAL, group_size=spec.samples, sampling=spec.sampling),
            required_version=version,
            exact=True,
            learner_version=version,
            issued_ms=now_ms,
            deadline_ms=now_ms + int(spec.patience_s * 1000),
            resends=int(again),
            evaluation=spec.name,
        )
        partition = self._place()
        receipt = self._publisher.publish(REQUESTS, request, partition=partition)
        assert self._chooser is not None, "a place was chosen"
        self._chooser.follow(partition, receipt)

    def close(self) -> None:
        self._publisher.close()
        self._observer.close()

    def _place(self) -> int:
        """The partition with the least work, by the newest answer of the cluster."""
        if self._chooser is None:
            self._num_partitions = self._observer.num_partitions()
            self._chooser = LeastLagChooser(self._num_partitions, depth=_ANY_DEPTH)
        now_s = self._clock.monotonic_s()
        if now_s >= self._observe_at_s:
            self._observe_at_s = now_s + _OBSERVE_EVERY_S
            try:
                self._chooser.observe(self._observer.observe(self._num_partitions))
            except ClusterUnreachable as exc:
                logger.warning("The workers' offsets are not known at the moment: %s", exc)
        chosen = self._chooser.choose()
        assert chosen is not None, "there is no bound on the depth"
        return chosen


def entry_of(planned: Planned, index: int) -> str:
    """The entry in the request of prompt `index`. Raises PromptFailed."""
    return requests.entry_of(_prompt(planned, index))


def _prompt(planned: Planned, index: int) -> Prompt:
    try:
        return planned.task.prompt(planned.spec.seed, index)
    except Exception as exc:  # a task is the user's code and may raise anything
        raise PromptFailed(f"The task {planned.spec.task!r} has no prompt {index}: {type(exc).__name__}: {exc}") from exc
