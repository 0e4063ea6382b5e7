"""Where a version's weights come from, and what became of its samples: from the history alone, without reading trajectories. Pure.

A sample belongs to the oldest version of its tokens, like its age: of step s, samples of age a were sampled by version s - 1 - a.
"""

from __future__ import annotations

from echo_ops.viewer.dropped import count_reasons
from echo_ops.viewer.metrics import rewards_in
from echo_ops.viewer.windows import Json, number
from echo_replay.history import History
from echo_replay.origin import made_and_published
from echo_replay.steps import Step
from echo_schemas.records import StepReport


def lineage_page(history: History, version: int) -> Json:
    """Raises UserError for a version that is neither published nor trained."""
    steps, manifests = made_and_published(history, version)
    known = sorted({*steps, *manifests})
    at = known.index(version)
    step, manifest = steps.get(version), manifests.get(version)
    trained = _trained_in(list(steps.values()), version)
    return {
        "version": version,
        "previous": known[at - 1] if at else None,
        "next": known[at + 1] if at + 1 < len(known) else None,
        "step": None if step is None else _made(step),
        "published": None
        if manifest is None
        else {
            "time_ms": manifest.created_ms,
            "kind": manifest.kind.value,
            "num_bytes": manifest.num_bytes,
            "sha256": manifest.sha256,
            "checkpoint": manifest.checkpoint,
            "parent": manifest.parent,
            "parent_run": manifest.parent_run,
        },
        "trained": [{"step": each, "count": count} for each, count in sorted(trained.items())],
        "dropped": _dropped(history, version),
    }


def _made(step: Step) -> Json:
    report = step.report
    return {
        "time_ms": report.time_ms,
        "session": report.session,
        "checkpoint": report.checkpoint,
        "parent": report.parent,
        "training_s": report.training_s,
        "world_size": report.world_size,
        "num_samples": len(step.seqs) or sum(report.staleness_total),
        "num_groups": len(step.tokens),
        "groups": list(dict.fromkeys(step.seqs.tolist())),
        "workers": [{"worker": each.worker_id, "count": sum(each.staleness)} for each in report.workers],
        "sampled_by": [
            {"version": version, "count": count} for version, count in sorted(_sampled_by(report).items(), reverse=True) if count
        ],
        "rewards": [{"name": s.name, "mean": number(s.mean), "std": number(s.std)} for s in rewards_in(report)],
        "terms": [{"name": term.name, "weight": term.weight} for term in report.reward_terms],
        "budget": None if report.policy is None else report.policy.budget,
        "missing": step.missing,
    }


def _sampled_by(report: StepReport) -> dict[int, int]:
    return {report.version - 1 - age: count for age, count in enumerate(report.staleness_total)}


def _trained_in(steps: list[Step], version: int) -> dict[int, int]:
    """How many of the samples of `version` were trained in each step."""
    counts = {step.version: _sampled_by(step.report).get(version, 0) for step in steps if step.version > version}
    return {made: count for made, count in counts.items() if count}


def _dropped(history: History, version: int) -> Json:
    table = history.fates.drops()
    return count_reasons(table.reasons[(table.sampled_by == version) & (table.partitions >= 0)])
