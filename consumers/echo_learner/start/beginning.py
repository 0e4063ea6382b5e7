"""A session's start: the run looked at, the namespace fenced and claimed, the newest checkpoint in the trainer.

look (may it go on?) ─▶ fence ─▶ claim ─▶ tip ─▶ checkpoint ─▶ trainer holds it      nothing is written before the fence
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_core.assembly import GroupAssembler
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore, Outbox
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.session import Tip
from echo_learner.evaluation.setup import published_manifests
from echo_learner.metrics import LearnerMetrics
from echo_learner.start.resuming import choose_checkpoint, choose_resumption, load_trainer, look, since_it_began
from echo_learner.training.config import assembly_limits, meaning_of, reward_terms
from echo_learner.training.ranks import Trainer
from echo_runtime.process import RoleProcess
from echo_schemas.records import SessionClaim, WeightManifest
from echo_settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """How a session starts. `takeover`: even from a process that is alive. `skip`: close the seqs whose records the log has lost. `silent`:
    a session that was found dead a moment ago and need not be checked again."""

    takeover: bool = False
    skip: bool = False
    silent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The state at a session's start. `state.id` is empty for a run that never began; `manifests`: the snapshots in the log by version;
    `lost`: seqs whose records the log has lost."""

    store: CheckpointStore
    writer: TransactionalWriter
    claim: SessionClaim
    state: LearnerState
    manifests: Mapping[int, WeightManifest]
    tip: Tip
    lost: tuple[int, ...]

    @property
    def session(self) -> str:
        return self.claim.session

    @property
    def is_fresh(self) -> bool:
        return not self.state.id

    @property
    def current(self) -> WeightManifest | None:
        """The newest snapshot in the log."""
        return self.manifests[max(self.manifests)] if self.manifests else None

    @property
    def still_owed(self) -> Outbox:
        """Records of the checkpoint that wait for the next publication: it lies between two published versions, or was made for drops."""
        saved, tip = self.state, self.tip
        if self.is_fresh or saved.id == tip.checkpoint:
            return ()
        is_owed = saved.weights_of is not None or (saved.snapshot is None and saved.version > tip.version)
        return self.store.load_outbox(saved.id) if is_owed else ()


@contextmanager
def begin_session(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, tip: Tip, session: str, options: StartOptions
) -> Iterator[Beginning]:
    """Claim the namespace for `session`; the writer is closed at the end of the block. `tip` was just read.

    Raises UserError where the run cannot go on, or is another's; ProducerFenced, TransportError.
    """
    bus, settings = process.bus, process.settings
    run_id = settings.run.name
    seen = look(bus, settings, tip, takeover=options.takeover, skip=options.skip, silent=options.silent)
    store, resumption = seen.store, seen.resumption
    with closing(bus.transactions("learner")) as writer:
        writer.start()
        # Read again: fencing has aborted or completed a predecessor's open transaction.
        before, tip = seen.tip, sessions.read_tip(bus, run_id)
        # A learner that claimed between `look` and the fencing may have trained steps that our folder does not hold. End without a claim:
        # that learner then goes on in a new session.
        if tip.claim is not None and (before.claim is None or tip.claim.session != before.claim.session):
            sessions.refuse_successor(tip.claim)
        claim = sessions.claim_namespace(writer, bus, tip, run_id=run_id, session=session, takeover=options.takeover)
        tip = sessions.read_tip(bus, run_id)
        metrics.clock_skew.set(sessions.check_clock(tip))
        newest = choose_checkpoint(store, tip, settings)
        if (newest and newest.id) != (resumption and resumption.state.id):
            resumption = choose_resumption(bus, store, tip, settings, seen.identities, skip=options.skip)
        store.anchor()
        if resumption is not None:
            load_trainer(trainer, store, resumption.state)
        yield Beginning(
            store=store,
            writer=writer,
            claim=claim,
            state=_fresh_state(bus, settings, session, seen.identities) if resumption is None else resumption.state,
            manifests=published_manifests(bus, run_id),
            tip=tip,
            lost=() if resumption is None else resumption.lost,
        )


def _fresh_state(bus: Bus, settings: Settings, session: str, identities: Mapping[str, str]) -> LearnerState:
    """Version 0, before its checkpoint."""
    assembler = GroupAssembler(settings.run.name, (), assembly_limits(settings))
    return LearnerState(
        id="",
        parent=None,
        run_id=settings.run.name,
        session=session,
        version=0,
        published=None,
        groups_trained=0,
        groups_dropped=0,
        assembly=since_it_began(bus, assembler.state()),
        terms=reward_terms(settings),
        identities=dict(identities),
        meaning=meaning_of(settings),
        snapshot=None,
        created_ms=0,
    )
