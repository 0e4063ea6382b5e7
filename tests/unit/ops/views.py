"""Synthetic runs for the tests of what is shown: records made from the schema examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from echo_core.bottleneck import Place, PlaceUse
from echo_ops.report.run_view import RunView
from echo_schemas.records import Drop, DropReason, Record, RewardStats, StepReport, WeightManifest, WorkerState, WorkerStatus
from echo_schemas.topics import DROPS, STEPS, WEIGHTS, WORKERS, Topic
from tests.examples import load_examples

R = TypeVar("R", bound=Record)
SHA = "a" * 64


def example(topic: Topic, cls: type[R]) -> R:
    """The first example of this kind."""
    return next(record for record in load_examples(topic).values() if isinstance(record, cls))


def step(number: int, time_s: float, reward: float, *, histogram: tuple[int, ...] = (4, 6), **metrics: float) -> StepReport:
    stats = RewardStats(name="exact", mean=reward, std=0.1, minimum=0.0, maximum=1.0)
    return replace(
        example(STEPS, StepReport),
        version=number,
        time_ms=round(time_s * 1000),
        idle_s=0.1,
        training_s=0.4,
        staleness_total=histogram,
        reward_stats=(stats, replace(stats, name="total", mean=reward + 1)),
        metrics=metrics,
    )


def drop(reason: DropReason) -> Drop:
    return replace(example(DROPS, Drop), why=reason)


def manifest(version: int, time_s: float) -> WeightManifest:
    return replace(example(WEIGHTS, WeightManifest), version=version, created_ms=round(time_s * 1000))


def status(
    worker: str, time_s: float, *, version: int | None = None, busy_s: float = 0.0, state: WorkerState = WorkerState.READY, **fields: Any
) -> WorkerStatus:
    return replace(
        example(WORKERS, WorkerStatus),
        worker_id=worker,
        state=state,
        installed_version=version,
        weights_sha256=None if version is None else SHA,
        busy_s=busy_s,
        time_ms=round(time_s * 1000),
        **fields,
    )


def empty_view(*, steps: int = 40) -> RunView:
    return RunView("demo", started_ms=0, steps_wanted=steps, budget=3)


def learning_view(num_steps: int = 30) -> RunView:
    """Half a second a step from second 10 on; reward rises by 0.03 a step from 0.03; version published at every second step."""
    view = empty_view()
    for number in range(1, num_steps + 1):
        time_s = 10 + 0.5 * number
        view.apply(
            step(
                number,
                time_s,
                min(1.0, 0.03 * number),
                broadcast_s=0.05 if number < 20 else 0.07,
                outside_compute_share=0.08,
                probe_logprob_diff_max=1e-5 if number < 5 else 2e-5,
                probe_samples=4.0 * number,
                entropy=1.0,
            )
        )
        if number % 2 == 0:
            view.apply(manifest(number, time_s))
            view.apply(status("worker-0", time_s + 0.06, version=number, busy_s=0.45 * number))
        view.read_places("worker-0", {Place.GENERATION: PlaceUse(busy_s=0.9 * number, empty_s=0.1 * number)})
        view.read_places("learner", {Place.TRAIN: PlaceUse(busy_s=0.4 * number, empty_s=0.1 * number)})
        view.close_reading(time_s)
    view.trajectories_published = 10 * num_steps + 7
    return view
