"""The run's health, progress and bottleneck, from the step reports and the present records of learner and workers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from echo_core.bottleneck import Place, PlaceUse, describe, find_bottleneck
from echo_ops.harmless import harmless
from echo_ops.viewer.metrics import rewards_in, values_of
from echo_ops.viewer.windows import Json, number
from echo_replay.history import History
from echo_runtime.notices import STANDSTILL_S
from echo_schemas.records import Progress, StepReport, WorkerState, WorkerStatus

# Steps for the present values.
_RECENT = 10
# Without DRAINING, which may be a worker's last record.
_AT_WORK = (WorkerState.READY, WorkerState.STANDBY, WorkerState.STARTING)


def overview_page(
    history: History,
    progress: Progress | None,
    workers: Mapping[str, WorkerStatus],
    earlier: Mapping[str, WorkerStatus],
    now_ms: int,
) -> Json:
    """`earlier`: the workers' records some time before, to compute how busy they were since."""
    reports = [step.report for step in list(history.log.steps)[-_RECENT:]]
    run = history.log.runs[-1] if history.log.runs else None
    newest = reports[-1] if reports else None
    span_s = (reports[-1].time_ms - reports[0].time_ms) / 1000 if len(reports) > 1 else None
    return {
        "run": history.run_id,
        "task": None if run is None else harmless(run.task),
        "model": None if run is None else harmless(run.model),
        "mode": None if run is None else run.mode.value,
        "version": history.log.tip,
        "published": None if progress is None else progress.published,
        "num_steps": len(history.log.steps),
        "last_step_ms": None if newest is None else newest.time_ms,
        "now_ms": now_ms,
        "ended_s": _ended_s(progress, workers, now_ms),
        "troubles": list(_troubles(history, progress, workers, now_ms)),
        "limit": _limit(reports, workers, earlier),
        "rewards": {} if newest is None else {s.name: number(_mean(reports, f"reward: {s.name}")) for s in rewards_in(newest)},
        "s_per_step": None if span_s is None else span_s / (len(reports) - 1),
        "samples_per_s": sum(sum(report.staleness_total) for report in reports[1:]) / span_s if span_s else None,
        "staleness_mean": number(_mean(reports, "staleness_mean")),
        "cost": number(sum(step.report.metrics.get("cost", 0.0) for step in list(history.log.steps))),
        "cost_per_1000": number(_mean(reports, "cost_per_1000")),
        "num_trained": sum(len(step.seqs) for step in list(history.log.steps)),
        "num_dropped": len(history.fates.drops().seqs),
        "groups_ready": None if progress is None else progress.groups_ready,
        "workers": [_worker(status, now_ms) for _, status in sorted(workers.items())],
        "notes": list(history.notes),
    }


def _ended_s(progress: Progress | None, workers: Mapping[str, WorkerStatus], now_ms: int) -> float | None:
    """Seconds since the learner's last record, if the learner is silent and all workers have ended; else None."""
    if progress is None or any(status.state in _AT_WORK for status in workers.values()):
        return None
    silent_s = (now_ms - progress.time_ms) / 1000
    return silent_s if silent_s > STANDSTILL_S else None


def _troubles(history: History, progress: Progress | None, workers: Mapping[str, WorkerStatus], now_ms: int) -> Iterator[str]:
    if progress is None:
        yield "The learner has not said yet how far it is."
    elif _ended_s(progress, workers, now_ms) is None and (silent_s := (now_ms - progress.time_ms) / 1000) > STANDSTILL_S:
        yield f"The learner was last heard of {_ago(silent_s)} ago: does its process run, and Kafka answer?"
    silent = [
        name for name, status in sorted(workers.items()) if status.state in _AT_WORK and (now_ms - status.time_ms) / 1000 > STANDSTILL_S
    ]
    if silent:
        yield f"Workers that were at work are silent: {', '.join(map(harmless, silent))}."
    if progress is not None and _ended_s(progress, workers, now_ms) is None and not any(s.state in _AT_WORK for s in workers.values()):
        yield "No worker is at work."
    disbelieved = sorted({worker for worker in history.fates.drops().workers if worker})
    if disbelieved:
        yield f"Other weights than claimed, or than asked for, were served by {', '.join(map(harmless, disbelieved))}."


def _limit(reports: Sequence[StepReport], workers: Mapping[str, WorkerStatus], earlier: Mapping[str, WorkerStatus]) -> str:
    """The bottleneck, from the learner's own times and the workers' busy time between two heartbeats."""
    if len(reports) < 2:
        return "Too few steps were trained to say what the run waits for."
    waited, trained = sum(report.idle_s for report in reports[1:]), sum(report.training_s for report in reports[1:])
    places = {Place.TRAIN: PlaceUse(busy_s=trained, empty_s=waited)}
    generation = PlaceUse()
    for name, status in workers.items():
        before = earlier.get(name)
        if before is not None and (passed_s := (status.time_ms - before.time_ms) / 1000) > 0:
            busy_s = min(passed_s, max(0.0, status.busy_s - before.busy_s))
            generation += PlaceUse(busy_s=busy_s, empty_s=passed_s - busy_s)
    if generation.observed_s > 0:
        return describe(find_bottleneck({**places, Place.GENERATION: generation}))
    share = waited / (waited + trained) if waited + trained > 0 else 0.0
    return f"In its last {len(reports) - 1} steps the learner waited {share:.0%} of its time for batches; no worker is heard now."


def _worker(status: WorkerStatus, now_ms: int) -> Json:
    return {
        "worker": harmless(status.worker_id),
        "kind": harmless(status.kind),
        "engine": harmless(status.engine),
        "state": status.state.value,
        "version": status.installed_version,
        "rollouts_per_s": number(status.rollouts_per_s),
        "tokens_per_s": number(status.tokens_per_s),
        "in_flight": status.in_flight,
        "rollouts": status.rollouts,
        "silent_s": max(0.0, (now_ms - status.time_ms) / 1000),
    }


def _mean(reports: Sequence[StepReport], name: str) -> float | None:
    values = [value for report in reports if (value := values_of(report).get(name)) is not None]
    return sum(values) / len(values) if values else None


def _ago(seconds: float) -> str:
    for least, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * least:
            return f"{seconds / least:.0f} {unit}"
    return f"{seconds:.0f} s"
