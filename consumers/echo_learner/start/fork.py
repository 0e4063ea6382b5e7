"""A fork: a new run that begins at a snapshot of another one, to go back to an older version or on under another configuration.

    <parent>/checkpoints/v16-…  or  the weights in the log ─▶ <new folder>/checkpoints/v16-<session> ─ the learner's next start ─▶ v/16 of
                                                                                                       the new run, its parent named

The fork is a checkpoint without a parent that the log does not name yet, as after a crash before a run's first publication. It keeps the
version's number and the closed seqs, so that its prompts go on where the parent's ended, and reads the log from its end. The parent is only
read.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from echo_bus.blobs.files import partial_of
from echo_bus.bus import Bus
from echo_core.groups import AssemblyState
from echo_learner.commit import session as sessions
from echo_learner.commit.checkpoint import CheckpointStore, Outbox
from echo_learner.commit.learner_state import LearnerState, Origin, checkpoint_id
from echo_learner.commit.snapshot import SnapshotFiles, file_names, read_snapshot
from echo_learner.commit.store import read_stored
from echo_learner.evaluation.setup import kept_manifests
from echo_learner.start.log_changes import ranges
from echo_learner.training.config import meaning_of, reward_terms
from echo_schemas.errors import EchoError, UserError
from echo_schemas.records import Drop, DropReason, WeightKind, WeightManifest, group_id_of
from echo_schemas.topics import DROPS, REWARDS, TRAJECTORIES
from echo_settings import Settings

_NEAREST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """The new run's name and folder, and the snapshot to begin at. `sha256`: the first digits of its checksum, or empty.

    `weights_only`: with a fresh optimizer, even if a checkpoint with the parent's optimizer is kept.
    """

    run_id: str
    folder: Path
    version: int
    sha256: str = ""
    weights_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The parent's checkpoint of the version, or its manifest in the log, or both."""

    kept: LearnerState | None
    manifest: WeightManifest | None

    @property
    def sha256(self) -> str:
        found = self.kept.snapshot if self.kept is not None else self.manifest.sha256 if self.manifest is not None else None
        assert found is not None
        return found


def fork_run(bus: Bus, settings: Settings, order: ForkOrder) -> LearnerState:
    """Make the fork's first checkpoint. `settings`: the new run's, but for [run] name and [checkpoint] folder, which are the parent's.

    Raises UserError where the version is not there, the new name or folder is taken, or the disk refuses; TransportError.
    """
    parent_store = CheckpointStore(Path(settings.checkpoint.folder) / "checkpoints", bus.codec)
    store = CheckpointStore(order.folder / "checkpoints", bus.codec)
    _refuse_taken(bus, store, settings, order)
    source = _find(bus, parent_store, settings, order)
    name = checkpoint_id(order.version, sessions.new_session())
    snapshot = _snapshot_of(bus, parent_store, settings, source, partial(store.take_snapshot, name))
    state = replace(
        _state_of(source, settings, order.version),
        id=name,
        parent=None,
        run_id=order.run_id,
        version=order.version,
        published=None,
        terms=reward_terms(settings),
        identities=sessions.identities(bus),
        meaning=meaning_of(settings),
        snapshot=snapshot.sha256,
        created_ms=bus.clock.time_ms(),
        origin=Origin(run_id=settings.run.name, version=order.version, sha256=snapshot.sha256),
        weights_of=None,
        weights_ms=0,
    )
    state = replace(state, session=state.id.partition("-")[2], assembly=_from_the_end(bus, state.assembly))
    store.check_writable(order.run_id)
    store.save(state, _settled_in_parent(state), snapshot, _trainer_copy(parent_store, None if order.weights_only else source.kept))
    return state


def _refuse_taken(bus: Bus, store: CheckpointStore, settings: Settings, order: ForkOrder) -> None:
    if order.run_id == settings.run.name:
        raise UserError(f"A fork of {order.run_id!r} needs a name of its own.", hint="`echoswarm fork NAME --version N`.")
    if store.newest(order.run_id) is not None:
        raise UserError(f"{order.folder} holds checkpoints of a run {order.run_id!r} already.", hint="Choose another name, or --folder.")
    if sessions.read_tip(bus, order.run_id).report is not None or kept_manifests(replace(bus, run_id=order.run_id), order.run_id):
        raise UserError(f"The log knows a run {order.run_id!r} already.", hint="Choose another name.")


def _find(bus: Bus, store: CheckpointStore, settings: Settings, order: ForkOrder) -> _Source:
    parent = settings.run.name
    states = [state for state in store.states(parent).values() if state.snapshot is not None]
    manifests = kept_manifests(bus, parent)
    kept = [state for state in states if state.version == order.version and (state.snapshot or "").startswith(order.sha256)]
    manifest = manifests.get(order.version)
    if manifest is not None and not manifest.sha256.startswith(order.sha256):
        manifest = None
    if manifest is not None:
        # Of several checkpoints of one version, take the published one.
        kept = [state for state in kept if state.snapshot == manifest.sha256]
    elif len({state.snapshot for state in kept}) > 1:
        found = ", ".join(sorted({(state.snapshot or "")[:12] for state in kept}))
        raise UserError(f"Version {order.version} of run {parent!r} is kept with different weights: {found}.", hint="Say which: --sha256.")
    newest = max(kept, key=lambda state: state.created_ms, default=None)
    if newest is None and (manifest is None or not order.weights_only):
        with_optimizer, in_log = sorted({state.version for state in states}), sorted(manifests)
        wanted = f"Version {order.version}{f' with the checksum {order.sha256}…' if order.sha256 else ''} of run {parent!r}"
        where = f"Kept with the optimizer in {settings.checkpoint.folder}: {_listed(with_optimizer)}. In the log: {_listed(in_log)}."
        if manifest is not None:
            hint = "--weights-only begins from the weights in the log, with a fresh optimizer."
        else:
            hint = "Choose one of these; those in the log need --weights-only."
        raise UserError(f"{wanted} is not kept with its optimizer. {where}", hint=hint)
    return _Source(kept=newest, manifest=manifest)


def _listed(versions: list[int]) -> str:
    if not versions:
        return "none"
    return ranges(versions[-_NEAREST:]) if len(versions) <= _NEAREST else f"…, {ranges(versions[-_NEAREST:])}"


def _snapshot_of(
    bus: Bus, store: CheckpointStore, settings: Settings, source: _Source, take: Callable[[Callable[[Path], SnapshotFiles]], SnapshotFiles]
) -> SnapshotFiles:
    """The snapshot's files, verified: of the checkpoint, or fetched by `take` from the log or its store."""
    kind = WeightKind(settings.policy.update)
    if source.kept is not None:
        store.verify(source.kept.id)
        return store.load_snapshot(source.kept, kind, file_names(kind))
    manifest = source.manifest
    assert manifest is not None
    return take(partial(fetch_snapshot, bus, manifest))


def fetch_snapshot(bus: Bus, manifest: WeightManifest, folder: Path) -> SnapshotFiles:
    """The snapshot of `manifest` in the new folder `folder`. Raises UserError for missing or changed bytes, TransportError."""
    if manifest.blob is not None:
        try:
            with closing(bus.blob_reader()) as reader:
                reader.read_files(manifest.blob, manifest.run_id, manifest.files, folder)
        except EchoError:
            # Remove the partial download: no later fork resumes it.
            shutil.rmtree(partial_of(folder), ignore_errors=True)
            raise
    else:
        folder.mkdir(parents=True)
        for name, content in read_stored(manifest):
            (folder / name).write_bytes(content)
    snapshot = read_snapshot(folder, manifest.version, manifest.kind, [file.name for file in manifest.files])
    if snapshot.sha256 != manifest.sha256:
        raise UserError(
            f"The weights of version {manifest.version} differ from those that its manifest names.", hint="Choose another version."
        )
    return snapshot


def _state_of(source: _Source, settings: Settings, version: int) -> LearnerState:
    """The parent's state; without a checkpoint, the manifest's: every seq below `next_seq` is closed."""
    if source.kept is not None:
        return source.kept
    assert source.manifest is not None
    floor = source.manifest.next_seq
    # An estimate: the parent's steps may have had another number of groups.
    trained = min(floor, version * settings.learner.groups_per_step)
    return LearnerState(
        id="",
        parent=None,
        run_id=settings.run.name,
        session="",
        version=version,
        published=None,
        groups_trained=trained,
        groups_dropped=floor - trained,
        assembly=AssemblyState(
            floor=floor, closed=frozenset(), trajectory_lows={}, trajectory_read_to={}, reward_lows={}, settled=frozenset()
        ),
        terms=(),
        identities={},
        meaning={},
        snapshot=source.manifest.sha256,
        created_ms=0,
    )


def _from_the_end(bus: Bus, assembly: AssemblyState) -> AssemblyState:
    """The same closed seqs, and positions at the log's end: no record before it belongs to the fork."""
    with closing(bus.look([TRAJECTORIES, REWARDS])) as reader:
        ends = {place: end for place, (_, end) in reader.bounds().items()}

    def of(topic: str) -> Mapping[int, int]:
        return {partition: end for (name, partition), end in ends.items() if name == topic}

    return AssemblyState(
        floor=assembly.floor,
        closed=assembly.closed,
        trajectory_lows=of(TRAJECTORIES.name),
        trajectory_read_to=of(TRAJECTORIES.name),
        reward_lows=of(REWARDS.name),
        settled=frozenset(),
    )


def _settled_in_parent(state: LearnerState) -> Outbox:
    """A drop for each seq above the floor that the parent has closed: the fork's log must account for every seq from its floor on."""
    origin = state.origin
    assert origin is not None
    return tuple(
        (
            DROPS,
            Drop(
                run_id=state.run_id,
                group_id=group_id_of(state.run_id, seq),
                seq=seq,
                why=DropReason.DUPLICATE,
                learner_version=state.version,
                detail=f"Run {origin.run_id} had trained or dropped it before version {origin.version}.",
                time_ms=state.created_ms,
            ),
        )
        for seq in sorted(state.assembly.closed)
    )


def _trainer_copy(store: CheckpointStore, kept: LearnerState | None) -> Callable[[Path], None]:
    def copy(folder: Path) -> None:
        if kept is not None and store.trainer_folder(kept.id).is_dir():
            shutil.copytree(store.trainer_folder(kept.id), folder)

    return copy
