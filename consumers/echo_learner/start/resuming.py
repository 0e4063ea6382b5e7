"""Chooses the checkpoint that a session goes on from: the one that the log's tip names, or its newest unpublished descendant.

Only reads: a learner that refuses to start has neither fenced nor claimed. Every refusal names the command to go on with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echo_bus.bus import Bus
from echo_bus.clock import MAX_CLOCK_ERROR_MS
from echo_core.groups import AssemblyState
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.placement import SnapshotPlacement, expected_bytes
from echo_learner.commit.session import Tip
from echo_learner.start.log_changes import examine_log, fork_hint
from echo_learner.training.config import changed_meaning, meaning_of
from echo_learner.training.ranks import Trainer
from echo_schemas.errors import UserError
from echo_schemas.topics import REWARDS, TRAJECTORIES, Topic
from echo_settings import Settings

logger = logging.getLogger(__name__)

# Attempts: a run of tiny steps replaces a checkpoint or two during each.
_MOST_LOOKS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """A checkpoint to go on from, with positions that the log has now. `lost`: seqs of lost records, to be closed as drops."""

    state: LearnerState
    lost: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """The result of `look`. `resumption`: None for a run that never began."""

    store: CheckpointStore
    identities: dict[str, str]
    tip: Tip
    resumption: Resumption | None


def look(bus: Bus, settings: Settings, tip: Tip, *, takeover: bool, skip: bool, silent: str = "") -> StartState:
    """Check a run whose tip was just read. `silent`: a session that was found dead a moment ago and need not be checked again.

    Raises UserError if another learner has the run, or if it cannot go on as it is; TransportError.
    """
    store = CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
    if tip.claim is not None and tip.claim.session != silent:
        sessions.refuse_if_alive(bus, tip.claim, run_id=settings.run.name, takeover=takeover)
    identities = sessions.identities(bus)
    tip, resumption = _find_resumption(bus, store, tip, settings, identities, skip=skip)
    store.check_writable(settings.run.name)
    SnapshotPlacement(bus, settings).check(expected_bytes(settings))
    return StartState(store=store, identities=identities, tip=tip, resumption=resumption)


def _find_resumption(
    bus: Bus, store: CheckpointStore, tip: Tip, settings: Settings, identities: Mapping[str, str], *, skip: bool
) -> tuple[Tip, Resumption | None]:
    """The checkpoint to go on from. Tries again if a learner that is to be taken over trains on and removes the chosen one meanwhile."""
    for looks_left in reversed(range(_MOST_LOOKS)):
        try:
            return tip, choose_resumption(bus, store, tip, settings, identities, skip=skip)
        except UserError:
            before, tip = tip, sessions.read_tip(bus, settings.run.name)
            if tip.checkpoint == before.checkpoint or not looks_left:
                raise
    raise AssertionError("the last look returns or raises")


def choose_resumption(
    bus: Bus, store: CheckpointStore, tip: Tip, settings: Settings, identities: Mapping[str, str], *, skip: bool
) -> Resumption | None:
    """The checkpoint to go on from; None for a run that never began. `skip`: even if the log has lost records.

    Raises UserError if the tip's checkpoint is not here or not whole, or belongs to another log or configuration; TransportError.
    """
    chosen = choose_checkpoint(store, tip, settings)
    if chosen is None:
        return None
    store.verify(chosen.id)
    change = examine_log(bus, chosen, identities)
    if change.what and not skip:
        raise UserError(
            f"The log is not the one that the checkpoint {chosen.id} goes on from. {change.summary}",
            hint="Start once more with --skip (`echoswarm up` and `run learner` have it), which closes the lost seqs as drops and goes on "
            f"with what is there. Or leave this run as it is: {fork_hint(chosen)}",
        )
    if change.what:
        logger.warning("Told to skip. %s", change.summary)
    return Resumption(state=change.state, lost=change.lost)


def choose_checkpoint(store: CheckpointStore, tip: Tip, settings: Settings) -> LearnerState | None:
    """The checkpoint that the tip names or its newest unpublished descendant; None for a run that never began.

    Raises UserError if the tip's is not here, or if it belongs to another configuration.
    """
    run_id = settings.run.name
    found = store.descendants(tip.checkpoint, run_id)
    if tip.checkpoint is not None:
        if tip.checkpoint not in store.ids():
            raise UserError(
                f"The log says that run {run_id!r} is at version {tip.version}, kept in the checkpoint {tip.checkpoint}, which is not in "
                f"{settings.checkpoint.folder}.",
                hint="Bring the checkpoint folder back. If it is gone for good, the weights are still in the log, without the optimizer: "
                f"`echoswarm fork {run_id}-2 --version N --weights-only` (it lists the versions there are).",
            )
        found = [store.load(tip.checkpoint), *found]
    if not found:
        _refuse_lost_log(store, settings)
        return None
    chosen = found[-1]
    now = meaning_of(settings)
    changed = changed_meaning(chosen.meaning, now)
    if changed:
        differences = "; ".join(f"{key} was {_shown(chosen.meaning[key])} and is {_shown(now[key])}" for key in changed)
        raise UserError(
            f"Run {run_id!r} was started with other values: {differences}. Going on would make another experiment of it.",
            hint=f"Put them back, or keep them for a run of its own: {fork_hint(chosen)}",
        )
    return chosen


def load_trainer(trainer: Trainer, store: CheckpointStore, state: LearnerState) -> None:
    """Load a verified checkpoint into the trainer: the trainer's state, or in a fork without one the snapshot's weights."""
    if store.trainer_folder(state.id).is_dir():
        trainer.load(store.trainer_folder(state.id))
    else:
        trainer.load_weights(store.snapshot_folder(state.id))


def since_it_began(bus: Bus, assembly: AssemblyState) -> AssemblyState:
    """`assembly` of a run that begins now: positions before which all records are of other runs, even if clocks differ."""
    with closing(bus.look([TRAJECTORIES, REWARDS])) as reader:
        found = reader.offsets_at(max(0, bus.clock.time_ms() - MAX_CLOCK_ERROR_MS))

    def of(topic: Topic) -> dict[int, int]:
        return {partition: offset for (name, partition), offset in found.items() if name == topic.name}

    return replace(assembly, trajectory_lows=of(TRAJECTORIES), reward_lows=of(REWARDS))


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _refuse_lost_log(store: CheckpointStore, settings: Settings) -> None:
    """Raise UserError if the folder has checkpoints of the run and the log has no record of it: it must be another log."""
    kept = store.newest(settings.run.name)
    if kept is not None:
        raise UserError(
            f"{settings.checkpoint.folder} holds run {settings.run.name!r} up to version {kept.version}, and the log knows nothing of it.",
            hint=f"Point [kafka] to where it came from. If that is gone for good: {fork_hint(kept)}",
        )
