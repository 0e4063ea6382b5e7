"""`echoswarm checkpoints list|prune`: the checkpoints on a run's disk, and removing those that the run does not need any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from echo_bus.bus import Bus
from echo_learner.commit import session as sessions
from echo_learner.commit.ancestry import Relation, relations
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.commit.learner_state import LearnerState, version_of
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import out
from echo_schemas.errors import UserError
from echo_settings import Settings

_GIB = 1 << 30
_MEANINGS = {
    Relation.TIP: "the newest step in the log",
    Relation.UNPUBLISHED: "trained, not in the log yet",
    Relation.OLDER: "older",
    Relation.DEAD: "came to nothing: the run went on without it",
    Relation.UNKNOWN: "unknown: its parents are not here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLine:
    """One checkpoint. `relation` is None for a checkpoint of another run, and for one that cannot be read; then `problem` says why."""

    name: str
    num_bytes: int
    state: LearnerState | None
    relation: Relation | None
    problem: str = ""


def list_checkpoints(config: Config = None) -> None:
    """Print a line for each."""
    settings = read_settings(config)
    found = _look(settings, reach_bus(settings))
    for kept in found:
        made = "" if kept.state is None else f"{datetime.fromtimestamp(kept.state.created_ms / 1000, UTC):%Y-%m-%d %H:%M}"
        out.print(f"{kept.name:<24} {made:<16} {kept.num_bytes / _GIB:>10.3f} GiB  {_meaning(kept)}")
    out.print(f"{len(found)} checkpoints, {sum(kept.num_bytes for kept in found) / _GIB:.3f} GiB, in {settings.checkpoint.folder}")


def prune(
    config: Config = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Newest of the run to keep, instead of [checkpoint] keep.")] = None,
    unreadable: Annotated[
        bool, typer.Option("--unreadable", help="Also checkpoints that cannot be read and are older than the newest in the log.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove checkpoints that came to nothing, and those older than the newest `keep` of the run.

    The tip, checkpoints that are not in the log yet, unknown ones and those of other runs stay. Raises UserError if the log names no
    checkpoint of the run, or one that is not here.
    """
    settings = read_settings(config)
    bus = reach_bus(settings)
    keep = settings.checkpoint.keep if keep is None else keep
    tip = sessions.read_tip(bus, settings.run.name).checkpoint
    found = _look(settings, bus, tip)
    if tip is None or not any(kept.relation is Relation.TIP for kept in found):
        what = "no checkpoint" if tip is None else f"the checkpoint {tip}, which cannot be read here,"
        raise UserError(
            f"The log names {what} as the newest of run {settings.run.name!r}. Nothing was removed.",
            hint="Name the file of the run with --config: [kafka] and [checkpoint] folder must be those of the run.",
        )
    store = _store(settings, bus)
    gone = list(_superfluous(found, version_of(tip), keep, unreadable=unreadable))
    for kept in gone:
        out.print(f"{'would remove' if dry_run else 'removed'} {kept.name:<24} {kept.num_bytes / _GIB:>10.3f} GiB  {_meaning(kept)}")
        if not dry_run:
            store.remove(kept.name)
    out.print(f"{len(gone)} checkpoints, {sum(kept.num_bytes for kept in gone) / _GIB:.3f} GiB; {len(found) - len(gone)} stay")


def _superfluous(found: list[CheckpointLine], tip_version: int, keep: int, *, unreadable: bool) -> Iterator[CheckpointLine]:
    older = sorted((kept for kept in found if kept.relation is Relation.OLDER), key=lambda kept: version_of(kept.name))
    # The tip counts as one of `keep`.
    stay = {kept.name for kept in older[max(0, len(older) - keep + 1) :]}
    for kept in found:
        is_old = kept.relation is Relation.OLDER and kept.name not in stay
        is_broken = unreadable and kept.state is None and version_of(kept.name) < tip_version
        if kept.relation is Relation.DEAD or is_old or is_broken:
            yield kept


def _look(settings: Settings, bus: Bus, tip: str | None = None) -> list[CheckpointLine]:
    """Every checkpoint of the folder, oldest version first."""
    store, run_id = _store(settings, bus), settings.run.name
    tip = tip or sessions.read_tip(bus, run_id).checkpoint
    states: dict[str, LearnerState] = {}
    problems: dict[str, str] = {}
    for name in store.ids():
        try:
            states[name] = store.load(name)
        except UserError as exc:
            problems[name] = exc.message
    own = {name: state for name, state in states.items() if state.run_id == run_id}
    related = relations(own, tip or "")
    return [
        CheckpointLine(
            name=name,
            num_bytes=store.num_bytes(name),
            state=states.get(name),
            relation=related.get(name),
            problem=problems.get(name, ""),
        )
        for name in sorted(store.ids(), key=lambda name: (version_of(name), name))
    ]


def _meaning(kept: CheckpointLine) -> str:
    if kept.relation is not None:
        return _MEANINGS[kept.relation]
    return kept.problem if kept.state is None else f"of the run {kept.state.run_id}"


def _store(settings: Settings, bus: Bus) -> CheckpointStore:
    return CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
