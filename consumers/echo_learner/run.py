"""The learner's process: checks the run, starts a trainer, then runs sessions until one ends normally.

look (may it go on?) ─▶ trainer up (slow: torch, model) ─▶ session: start ─▶ parts ─▶ train ─▶ end
                                                             ▲ fenced, and the newest claim is still ours: once more
"""

from __future__ import annotations

import logging
from contextlib import closing, suppress
from dataclasses import replace

from echo_bus.errors import ProducerFenced, TransportError
from echo_learner.commit import session as sessions
from echo_learner.commit.session import Tip
from echo_learner.evaluation.setup import kept_manifests
from echo_learner.learner import Learner
from echo_learner.metrics import LearnerMetrics
from echo_learner.orders import refuse_stopped
from echo_learner.parts import LearnerParts, open_parts
from echo_learner.start.beginning import Beginning, StartOptions, begin_session
from echo_learner.start.resuming import look
from echo_learner.training.config import ignored_rewards, trainer_config
from echo_learner.training.ranks import Trainer, follow, is_follower, open_trainer
from echo_runtime.garbage import without_collection
from echo_runtime.process import RoleProcess
from echo_schemas.records import DropReason
from echo_tasks.base_models import resolve_base
from echo_tasks.prompts import ChatCodec, PromptCodec, check_positions

logger = logging.getLogger(__name__)


def run_learner(process: RoleProcess, *, takeover: bool = False, skip: bool = False) -> None:
    """Train the run of the settings until its steps are done or `process.stop` is set. `takeover`: from a process that is alive. `skip`:
    close the seqs whose records the log has lost, and go on.

    Raises UserError where the run cannot go on as it is, with what to do; TransportError where the cluster does not let it.
    """
    settings = process.settings
    base = resolve_base(settings.policy.base)
    check_positions(base, settings.policy.max_length)
    config = trainer_config(settings, base)
    if is_follower():
        follow(config)
        return
    metrics = LearnerMetrics(process.registry)
    # Refuse a run that cannot go on before the trainer is started, which is slow.
    refuse_stopped(process.bus, settings.run.name)
    claim = look(process.bus, settings, sessions.read_tip(process.bus, settings.run.name), takeover=takeover, skip=skip).tip.claim
    with without_collection():
        trainer = open_trainer(config, settings.learner.ranks)
    with closing(trainer):
        logger.info("The trainer is up")
        options = StartOptions(takeover=takeover, skip=skip, silent="" if claim is None else claim.session)
        train_in_sessions(process, trainer, metrics, PromptCodec(base), options)


def train_in_sessions(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, prompts: ChatCodec, options: StartOptions | None = None
) -> None:
    """Run sessions until one ends normally. A fatal transactional error does not prove a successor: a new claim does.

    `prompts`: the base model's text codec.
    """
    options = options or StartOptions()
    bus, run_id = process.bus, process.settings.run.name
    known: frozenset[str] = frozenset()
    while True:
        session, tip = sessions.new_session(process.start), sessions.read_tip(bus, run_id)
        if known and tip.claim is not None and tip.claim.session not in known:
            sessions.refuse_successor(tip.claim)
        known |= {session} if tip.claim is None else {session, tip.claim.session}
        try:
            _run_session(process, trainer, metrics, prompts, tip, session, options)
        except ProducerFenced as exc:
            sessions.refuse_successor(sessions.find_successor(bus, run_id, process.stop, known=known), exc)
            logger.warning("The transactional producer died without a successor (%s); starting the session over", exc)
            options = replace(options, takeover=True)
        except TransportError as exc:
            # A process that was frozen meets its own time-outs before it is told of the successor that has fenced it.
            with suppress(TransportError):
                sessions.refuse_successor(sessions.find_successor(bus, run_id, process.stop, known=known), exc)
            raise
        else:
            return


def _run_session(
    process: RoleProcess, trainer: Trainer, metrics: LearnerMetrics, prompts: ChatCodec, tip: Tip, session: str, options: StartOptions
) -> None:
    with (
        begin_session(process, trainer, metrics, tip, session, options) as beginning,
        open_parts(process, trainer, metrics, beginning, prompts) as parts,
    ):
        learner = Learner(parts, beginning)
        parts.intake.drop_once_read(beginning.lost, DropReason.LOST, "The log lost its records before it was trained.")
        parts.intake.start(beginning.state.assembly)
        learner.begin()
        if not beginning.is_fresh:
            _go_on(process, parts, beginning)
        learner.run(process.stop)


def _go_on(process: RoleProcess, parts: LearnerParts, beginning: Beginning) -> None:
    """Log the checkpoint, and resume unfinished evaluations of versions whose weights are kept."""
    settings, saved = process.settings, beginning.state
    logger.info("Going on from version %d (checkpoint %s)", saved.version, saved.id)
    if ignored := ignored_rewards(saved.terms, settings):
        logger.warning("%s", ignored)
    if settings.eval:
        kept = kept_manifests(process.bus, settings.run.name)
        newest = max(kept, default=0)
        parts.evaluations.resume(newest, kept, is_complete=0 < settings.learner.steps <= newest)
