"""What the assembler decided not to train, as records. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from echo_core.groups import DropDecision
from echo_schemas.records import Drop, group_id_of


def drops_of(decisions: Sequence[DropDecision], *, run_id: str, learner_version: int, time_ms: int) -> list[Drop]:
    """One Drop for each decision, in order."""
    return [
        Drop(
            run_id=run_id,
            group_id=group_id_of(run_id, decision.seq),
            seq=decision.seq,
            what=decision.where,
            attempt=decision.attempt,
            why=decision.why,
            version=decision.version,
            learner_version=learner_version,
            num_tokens=decision.num_tokens,
            detail=decision.detail,
            worker_id=decision.worker_id,
            time_ms=time_ms,
        )
        for decision in decisions
    ]
