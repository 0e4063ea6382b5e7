"""One trace a group, from processes that know nothing of one another; nothing where traces are off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk.trace", reason="install the extra 'otel'")
pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from echo_bus.wire import Wire
from echo_core.group_share import is_chosen
from echo_memory.message import MemoryMessage
from echo_runtime.tracing import SCHEMA_URL, TRACEPARENT, Attribute, GroupTracer, SpanName, open_tracer
from echo_schemas.records import Trajectory
from echo_schemas.topics import REQUESTS, TRAJECTORIES
from echo_settings import Settings
from echo_streams.intake import Intake
from echo_streams.metrics import StreamsMetrics
from echo_streams.processing import Processor
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline
from tests.unit.replay.forged import request_of
from tests.unit.streams.stage import CODEC, attached, scorer

pytestmark = pytest.mark.slow

NUM_GROUPS = 2 * GROUPS_PER_STEP


class Traced:
    """A run's processes, each with a tracer of its own, whose spans come together."""

    def __init__(self, folder: Path, share: float) -> None:
        self._exporter = InMemorySpanExporter()
        self._settings = Settings.model_validate({"kafka": {"namespace": "echo.test"}, "traces": {"share": share}})
        self._folder = folder
        self._first = Pipeline(folder, tracer=self.tracer("worker"))

    def tracer(self, role: str) -> GroupTracer:
        return GroupTracer(SimpleSpanProcessor(self._exporter), self._settings, role, f"{role}.1")

    def run(self) -> None:
        """Requests, trajectories, rewards and two steps."""
        swarm = self._first
        for seq in range(NUM_GROUPS):
            swarm.write(REQUESTS, request_of(seq), partition=0)
            swarm.write(TRAJECTORIES, *(swarm.sample(seq, index) for index in range(GROUP_SIZE)))
        self._score()
        learner = Pipeline(self._folder, cluster=swarm.cluster, tracer=self.tracer("learner"))
        learner.train(NumpyTrainer(), steps=2)

    def _score(self) -> None:
        """As the reward process does."""
        swarm, physical = self._first, self._first.namespace.topic(TRAJECTORIES)
        batch = [
            MemoryMessage(physical, where.partition, where.offset, record.group_id.encode(), CODEC.encode(record), None, 1)
            for where, record in swarm.placed(TRAJECTORIES, Trajectory)
        ]
        metrics = StreamsMetrics()
        wire = Wire(namespace=self._first.namespace, role="r1", run_id="demo", tracer=self.tracer("reward"))
        processor = Processor(
            wire,
            scorer(attached(lambda sample: float(sample.token_ids[1]), name="exact"), metrics=metrics),
            Intake("demo", budget=3, drop_stale=True),
            group="g",
            learner_version=lambda: 0,
            metrics=metrics,
        )
        answers = asyncio.run(processor.process(batch))
        self.reward_headers = [dict(answer.headers) for answer in answers]
        for answer in answers:
            swarm._publisher.publish_bytes(answer.topic, answer.value, key=answer.key, partition=answer.partition, headers=answer.headers)
        swarm._publisher.flush(10)

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    def of(self, name: str) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.spans if span.attributes and span.attributes.get(Attribute.GROUP.value) == name}


def test_a_group_has_one_trace_through_all_processes(tmp_path: Path) -> None:
    traced = Traced(tmp_path, 1.0)
    traced.run()
    for seq in range(NUM_GROUPS):
        spans = traced.of(f"demo/{seq}")
        assert set(spans) == {name.value for name in SpanName} - {SpanName.TRAINING.value}
        assert len({span.context.trace_id for span in spans.values() if span.context}) == 1
        for child, parent in (
            (SpanName.GENERATION, SpanName.REQUEST),
            (SpanName.PUBLISH, SpanName.GENERATION),
            (SpanName.SCORE, SpanName.PUBLISH),
            (SpanName.BATCH, SpanName.PUBLISH),
            (SpanName.STEP, SpanName.BATCH),
        ):
            said = spans[child].parent
            assert said is not None
            assert said.span_id == spans[parent].context.span_id, f"{child} is not the child of {parent}"
        assert spans[SpanName.REQUEST].parent is None
        assert [link.context.span_id for link in spans[SpanName.BATCH].links] == [spans[SpanName.SCORE].context.span_id]
        assert all(span.end_time >= span.start_time for span in spans.values() if span.end_time and span.start_time)
    trainings = [span for span in traced.spans if span.name == SpanName.TRAINING]
    steps = {span.context.span_id for span in traced.spans if span.name == SpanName.STEP and span.context}
    assert [span.attributes[Attribute.VERSION.value] for span in trainings if span.attributes] == [1, 2]
    assert {link.context.span_id for span in trainings for link in span.links} == steps
    roles = {span.resource.attributes[Attribute.SERVICE.value] for span in traced.spans}
    assert roles == {"echoswarm-worker", "echoswarm-reward", "echoswarm-learner"}
    assert {span.resource.schema_url for span in traced.spans} == {SCHEMA_URL}


def test_every_process_follows_the_same_share_and_says_so_in_headers(tmp_path: Path) -> None:
    share = 0.5
    traced = Traced(tmp_path, share)
    traced.run()
    followed = {f"demo/{seq}" for seq in range(NUM_GROUPS) if is_chosen(f"demo/{seq}", share)}
    assert 0 < len(followed) < NUM_GROUPS
    assert {span.attributes.get(Attribute.GROUP.value) for span in traced.spans if span.attributes} - {None} == followed
    seen = [header[TRACEPARENT].decode() for header in traced.reward_headers if TRACEPARENT in header]
    assert len(seen) == len(followed) * GROUP_SIZE
    scores = {(span.context.trace_id, span.context.span_id) for span in traced.spans if span.name == SpanName.SCORE and span.context}
    assert {(int(trace, 16), int(span, 16)) for _, trace, span, _ in (each.split("-") for each in seen)} == scores


def test_without_a_share_there_is_no_tracer() -> None:
    with open_tracer(Settings(), "worker", "worker.1") as tracer:
        assert tracer is None


def test_a_collector_that_is_not_there_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def fail(_: OTLPSpanExporter, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        tried.append(len(spans))
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(OTLPSpanExporter, "export", fail)
    settings = Settings.model_validate({"traces": {"share": 1.0, "endpoint": "http://127.0.0.1:9/v1/traces"}})
    with open_tracer(settings, "feeder", "feeder") as tracer:
        assert tracer is not None
        found = tracer.writes(request_of(1))
        assert found is not None
        found[1]()
    assert tried == [1]
