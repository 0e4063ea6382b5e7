"""The promises that an audit checks, and its possible verdicts. Pure.

PROVED      all records that the promise is about were checked, and it holds
UNPROVED    no counter-example, but some records could not be checked: retention removed them, or the log never had them
BROKEN      at least one counter-example, named by its coordinates, seq or version
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

# Counter-examples kept for each promise; all are counted.
_KEPT = 10


class Promise(StrEnum):
    """A promise of EchoSwarm about a run (docs/audit.md)."""

    ONE_STATE = "one-terminal-state"
    SEQS = "seqs-accounted-for"
    STALENESS = "within-policy"
    VERSIONS = "versions-never-decrease"
    CURRENT = "current-is-whole"
    TAGS = "tags-match-checksums"
    REQUESTS = "requests-accepted-once"
    CHAIN = "steps-chain"
    SIGNED = "trained-is-signed"


SENTENCES: Mapping[Promise, str] = {
    Promise.ONE_STATE: "Every trajectory record is exactly one of trained, dropped, dead-lettered or open",
    Promise.SEQS: "No seq is trained twice, and every seq below the floor is trained or dropped",
    Promise.STALENESS: "No sample is trained beyond what the run's policy allows at its step",
    Promise.VERSIONS: "Published versions never decrease, and one published again has the same bytes",
    Promise.CURRENT: "No manifest names a missing or corrupt blob",
    Promise.TAGS: "The version tag of every trained sample is that of published weights",
    Promise.REQUESTS: "Every request is accepted at most once",
    Promise.CHAIN: "Step reports follow one another without a gap, each from its predecessor's checkpoint",
    Promise.SIGNED: "Every trained sample is signed by the worker that it names, and its rewards by an application that may give them",
}


class Verdict(StrEnum):
    """The audit's answer to one promise."""

    PROVED = "proved"
    UNPROVED = "unproved"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One counter-example. `where` names its subject: partition, offset, seq, version, correlation, …"""

    says: str
    where: Mapping[str, Any]


@dataclass(slots=True)
class Finding:
    """The result for one promise, filled while the audit runs."""

    promise: Promise
    num_looked_at: int = 0
    num_broken: int = 0
    examples: list[Example] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def broken(self, says: str, **where: Any) -> None:
        """Add a counter-example."""
        self.num_broken += 1
        if len(self.examples) < _KEPT:
            self.examples.append(Example(says=says, where=where))

    def gap(self, why: str) -> None:
        """Add a reason why some records could not be checked; the same sentence only once."""
        if why not in self.gaps:
            self.gaps.append(why)

    def note(self, says: str) -> None:
        """Add a remark that breaks no promise."""
        self.notes.append(says)

    @property
    def verdict(self) -> Verdict:
        """The verdict so far."""
        if self.num_broken:
            return Verdict.BROKEN
        return Verdict.UNPROVED if self.gaps else Verdict.PROVED

    def to_plain(self) -> dict[str, Any]:
        return {
            "promise": self.promise.value,
            "sentence": SENTENCES[self.promise],
            "verdict": self.verdict.value,
            "looked_at": self.num_looked_at,
            "num_broken": self.num_broken,
            "examples": [{"says": example.says, **example.where} for example in self.examples],
            "unproved_because": list(self.gaps),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """The audit of one run. `counts`: records by state. `seconds`: its duration, of which `reading_s` to read `num_trajectories`."""

    run_id: str
    findings: tuple[Finding, ...]
    counts: Mapping[str, int]
    num_steps: int
    num_trajectories: int
    seconds: float
    reading_s: float

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all findings."""
        verdicts = {finding.verdict for finding in self.findings}
        return next((each for each in (Verdict.BROKEN, Verdict.UNPROVED) if each in verdicts), Verdict.PROVED)

    def finding(self, promise: Promise) -> Finding:
        """The finding for one promise."""
        return next(finding for finding in self.findings if finding.promise is promise)

    def to_plain(self) -> dict[str, Any]:
        return {
            "run": self.run_id,
            "verdict": self.verdict.value,
            "steps": self.num_steps,
            "trajectories": self.num_trajectories,
            "states": dict(self.counts),
            "seconds": round(self.seconds, 3),
            "reading_s": round(self.reading_s, 3),
            "promises": [finding.to_plain() for finding in self.findings],
        }
