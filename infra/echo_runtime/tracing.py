"""OpenTelemetry traces: one per group, from its request to the step that trains it, across all processes.

    request ─▶ generation ─▶ publish ─▶ score (one for each reward)
                                   └──▶ batch ─▶ step ─ ─ link ─ ─ training (a trace of its own)

A group's name (with attempt and reward) determines whether it is traced, its trace id and the ids of its spans. So every process can
compute a span's parent, a redelivered record makes the same span again, and there is no state. Records carry W3C's `traceparent` for other
programs. Spans are created when they end, from times that are measured anyway.

Imports the SDK only where [traces] share is above 0.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version as version_of
from typing import TYPE_CHECKING, Any

from echo_bus.tracing import Tracer, Written
from echo_core.batch_choice import ChosenGroup
from echo_core.group_share import is_chosen
from echo_schemas.headers import Header
from echo_schemas.libraries import library_missing
from echo_schemas.naming import Namespace
from echo_schemas.records import Record, Reward, RolloutRequest, Trajectory
from echo_schemas.topics import REQUESTS, REWARDS, TRAJECTORIES, Topic
from echo_settings import Settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.trace import SpanContext

TRACEPARENT = "traceparent"
# A collector that does not answer must not delay a process, nor its end.
_EXPORT_S = 1.0
_NS_PER_MS = 1_000_000
# The members of a group follow one another.
_REMEMBERED = 64
_TRACE_BYTES, _SPAN_BYTES = 16, 8
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The version of OpenTelemetry's semantic conventions with the common names below."""
SCOPE = "echoswarm"


class SpanName(StrEnum):
    """The spans of a group in order; each is the child of the one before. `TRAINING` is a whole step, in its own trace."""

    REQUEST = "echoswarm.request"
    """From the decision to issue the request until it is in the log."""
    GENERATION = "echoswarm.generation"
    """From the first token of an attempt to its last."""
    PUBLISH = "echoswarm.publish"
    """From the end of generation until the group's first member is in the log."""
    SCORE = "echoswarm.score"
    """One reward, for the samples that were scored together with the group's first member."""
    BATCH = "echoswarm.batch"
    """From the end of generation until a batch took the group. Linked with its scores."""
    STEP = "echoswarm.step"
    """The step that trained the group. Linked with the whole step."""
    TRAINING = "echoswarm.training"
    """A whole step. Linked with its traced groups."""


class Attribute(StrEnum):
    """The attributes of spans."""

    RUN = "echoswarm.run"
    GROUP = "echoswarm.group"
    PURPOSE = "echoswarm.purpose"
    ATTEMPT = "echoswarm.attempt"
    VERSION = "echoswarm.version"
    """Of the policy: the oldest that generated, or the one that was trained."""
    WORKER = "echoswarm.worker"
    ENGINE = "echoswarm.engine"
    REWARD = "echoswarm.reward"
    NUM_SAMPLES = "echoswarm.num_samples"
    NUM_GROUPS = "echoswarm.num_groups"
    STALENESS = "echoswarm.staleness"
    SYSTEM = "messaging.system"
    DESTINATION = "messaging.destination.name"
    SERVICE = "service.name"
    SERVICE_NAMESPACE = "service.namespace"
    SERVICE_INSTANCE = "service.instance.id"
    SERVICE_VERSION = "service.version"


@contextmanager
def open_tracer(settings: Settings, role: str, process: str) -> Iterator[Tracer | None]:
    """The tracer of a process until the block ends; None if [traces] share is 0. Raises UserError if the SDK is not installed."""
    if not settings.traces.share:
        yield None
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise library_missing("[traces]", exc.name, "'echoswarm[otel]', or set share = 0.") from exc
    # Without an endpoint the exporter reads OpenTelemetry's own variables of the environment.
    processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=settings.traces.endpoint or None, timeout=_EXPORT_S))
    try:
        yield GroupTracer(processor, settings, role, process)
    finally:
        processor.force_flush(int(_EXPORT_S * 1000))


class GroupTracer:
    """The tracer of one process. `processor` gets the ended spans."""

    def __init__(self, processor: SpanProcessor, settings: Settings, role: str, process: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._processor = processor
        share = settings.traces.share
        self._follows = functools.lru_cache(_REMEMBERED)(lambda group_id: is_chosen(group_id, share))
        self._namespace = Namespace(settings.kafka.namespace)
        self._run_id = settings.run.name
        self._scope = InstrumentationScope(SCOPE, version_of("echoswarm"), SCHEMA_URL)
        self._resource = Resource(
            {
                Attribute.SERVICE.value: f"echoswarm-{role}",
                Attribute.SERVICE_NAMESPACE.value: self._namespace.name,
                Attribute.SERVICE_INSTANCE.value: process,
                Attribute.SERVICE_VERSION.value: version_of("echoswarm"),
            },
            SCHEMA_URL,
        )

    def writes(self, record: Record) -> tuple[Header, Written] | None:
        if not isinstance(record, RolloutRequest | Trajectory) or not self._follows(record.group_id):
            return None
        if isinstance(record, RolloutRequest):
            return self._header(record.group_id, SpanName.REQUEST), lambda: self._requested(record)
        written_ms = _now_ms()
        header = self._header(record.group_id, SpanName.PUBLISH, record.attempt)
        # The first member's span stands for the group.
        return header, (lambda: self._published(record, written_ms)) if record.index == 0 else (lambda: None)

    def scored(self, rewards: Sequence[Reward], started_ms: int) -> list[list[Header]]:
        headers: list[list[Header]] = []
        for reward in rewards:
            if not self._follows(reward.group_id):
                headers.append([])
                continue
            part = f"{reward.attempt}/{reward.name}"
            if reward.index == 0:
                about = {Attribute.ATTEMPT: reward.attempt, Attribute.REWARD: reward.name, **self._to(REWARDS)}
                parent = (SpanName.PUBLISH, reward.attempt)
                self._emit(reward.group_id, SpanName.SCORE, part, started_ms, reward.time_ms, about, parent=parent)
            headers.append([self._header(reward.group_id, SpanName.SCORE, part)])
        return headers

    def trained(self, groups: Sequence[ChosenGroup], version: int, started_ms: int) -> None:
        ended_ms = _now_ms()
        step = f"{self._run_id}/step/{version}"
        followed: list[SpanContext] = []
        for group in groups:
            samples = [sample for sample in group.samples if self._follows(sample.member.trajectory.group_id)]
            if not samples:
                continue
            first = samples[0].member.trajectory
            name, attempt = first.group_id, first.attempt
            made_ms = max(sample.member.trajectory.finished_ms for sample in samples)
            about = {
                Attribute.ATTEMPT: attempt,
                Attribute.NUM_SAMPLES: len(samples),
                Attribute.STALENESS: max(sample.staleness for sample in samples),
                Attribute.VERSION: first.min_version,
            }
            scores = [_context(name, SpanName.SCORE, f"{attempt}/{reward}") for reward in samples[0].member.scores]
            parent = (SpanName.PUBLISH, attempt)
            self._emit(name, SpanName.BATCH, attempt, made_ms, started_ms, about, parent=parent, links=scores)
            links = [_context(step, SpanName.TRAINING)]
            about = {Attribute.ATTEMPT: attempt, Attribute.VERSION: version}
            self._emit(name, SpanName.STEP, attempt, started_ms, ended_ms, about, parent=(SpanName.BATCH, attempt), links=links)
            followed.append(_context(name, SpanName.STEP, attempt))
        if followed:
            about = {Attribute.VERSION: version, Attribute.NUM_GROUPS: len(groups)}
            self._emit(step, SpanName.TRAINING, "", started_ms, ended_ms, about, links=followed)

    def _requested(self, request: RolloutRequest) -> None:
        about = {Attribute.PURPOSE: request.purpose.value, Attribute.NUM_SAMPLES: request.group_size, **self._to(REQUESTS)}
        self._emit(request.group_id, SpanName.REQUEST, "", request.issued_ms, _now_ms(), about)

    def _published(self, first: Trajectory, written_ms: int) -> None:
        name, attempt = first.group_id, first.attempt
        about = {
            Attribute.ATTEMPT: attempt,
            Attribute.WORKER: first.worker_id,
            Attribute.ENGINE: first.engine,
            Attribute.VERSION: first.min_version,
            Attribute.NUM_SAMPLES: first.group_size,
        }
        parent = (SpanName.REQUEST, "")
        self._emit(name, SpanName.GENERATION, attempt, first.started_ms, first.finished_ms, about, parent=parent)
        about = {Attribute.ATTEMPT: attempt, Attribute.WORKER: first.worker_id, **self._to(TRAJECTORIES)}
        self._emit(name, SpanName.PUBLISH, attempt, written_ms, _now_ms(), about, parent=(SpanName.GENERATION, attempt))

    def _to(self, topic: Topic) -> dict[Attribute, str]:
        return {Attribute.SYSTEM: "kafka", Attribute.DESTINATION: self._namespace.topic(topic)}

    def _emit(
        self,
        name: str,
        span: SpanName,
        part: str,
        start_ms: int,
        end_ms: int,
        about: Mapping[Attribute, Any],
        *,
        parent: tuple[SpanName, str] | None = None,
        links: Sequence[SpanContext] = (),
    ) -> None:
        """Emit an ended span of `name` (a group or a step). Machines' clocks differ, so its end is at least its start."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, SpanKind

        attributes = {Attribute.RUN: self._run_id, **({} if span is SpanName.TRAINING else {Attribute.GROUP: name}), **about}
        is_sent = Attribute.DESTINATION in about
        self._processor.on_end(
            ReadableSpan(
                name=span.value,
                context=_context(name, span, part),
                parent=None if parent is None else _context(name, *parent),
                resource=self._resource,
                attributes={key.value: value for key, value in attributes.items()},
                links=[Link(context) for context in links],
                kind=SpanKind.PRODUCER if is_sent else SpanKind.INTERNAL,
                start_time=start_ms * _NS_PER_MS,
                end_time=max(start_ms, end_ms) * _NS_PER_MS,
                instrumentation_scope=self._scope,
            )
        )

    @staticmethod
    def _header(name: str, span: SpanName, part: str = "") -> Header:
        """W3C Trace Context, level 1: version, trace, parent, sampled."""
        return TRACEPARENT, f"00-{_trace_id(name).hex()}-{_span_id(name, span, part).hex()}-01".encode()


def _context(name: str, span: SpanName, part: str = "") -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    trace_id, span_id = int.from_bytes(_trace_id(name)), int.from_bytes(_span_id(name, span, part))
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _trace_id(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=_TRACE_BYTES).digest()


def _span_id(name: str, span: SpanName, part: str) -> bytes:
    return hashlib.blake2b(f"{name}\n{span.value}\n{part}".encode(), digest_size=_SPAN_BYTES).digest()


def _now_ms() -> int:
    return time.time_ns() // _NS_PER_MS
