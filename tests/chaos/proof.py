"""What must be true of the log after every schedule: the audit finds every promise kept."""

from __future__ import annotations

from echo_bus.bus import Bus
from echo_replay.audit import audit_run
from echo_replay.verdicts import SENTENCES, AuditReport, Verdict


def prove(bus: Bus) -> AuditReport:
    """Audit the run. Fails, with the first counter-examples or with what could not be looked at, unless all is proved."""
    report = audit_run(bus, str(bus.run_id))
    said = []
    for finding in report.findings:
        if finding.verdict is Verdict.PROVED:
            continue
        said.append(f"{finding.verdict.value}: {SENTENCES[finding.promise]}")
        said += [f"    {example.says} {dict(example.where)}" for example in finding.examples]
        said += [f"    because {gap}" for gap in finding.gaps]
    assert not said, "\n".join([f"the audit of {report.num_steps} steps does not hold:", *said])
    return report


def in_words(report: AuditReport) -> str:
    """One line."""
    counts = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in report.counts.items() if count)
    return f"audit passed: {report.num_steps} steps, {report.num_trajectories} trajectories ({counts})"
