"""Checkpoints: local folders that make a step durable and survive a crash at any moment.

    <folder>/.v16-<session>.tmp/ ─ write, fsync files and folders ─▶ rename ─▶ <folder>/v16-<session>/ ─ fsync <folder>

A checkpoint is never overwritten, names its parent, and belongs to one session: another session's folders are read, and removed only if no
learner can go on from them (`ancestry`). `v16-<session>.<n>` holds the drops since `v16-…` while no step came: a new state beside links to
the same weights. `state.json` holds the size and checksum of every file, and its own checksum, so a changed file is noticed and not used.

    state.json      `LearnerState`, and what the other files must be
    outbox.bin      records that the log does not have yet, in order: (4-byte length, topic name), (4-byte length, encoded record)
    snapshot/       the snapshot's files, if this version is published
    trainer/        model or adapter, optimizer, random state; one file a rank. Missing in a fork from weights alone
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo_learner.commit.ancestry import Relation, comes_from, relations
from echo_learner.commit.fsync import sync, sync_parents, sync_tree
from echo_learner.commit.learner_state import LearnerState, from_json, to_json, version_of
from echo_learner.commit.snapshot import SnapshotFiles, copy_snapshot, read_snapshot
from echo_schemas.codec import Codec
from echo_schemas.errors import InvalidRecord, UserError
from echo_schemas.records import Record, WeightKind
from echo_schemas.topics import BY_NAME, Topic

logger = logging.getLogger(__name__)

_FORMAT = 2
_STATE = "state.json"
_OUTBOX = "outbox.bin"
_SNAPSHOT = "snapshot"
_TRAINER = "trainer"
_ID = re.compile(r"v\d+-.+")
_LENGTH = struct.Struct("<I")
_PROBE_BYTES = 1 << 16
_HASHED_AT_ONCE = 4
_MIB = 1 << 20
# Threads take longer to start than a few MiB to hash.
_WORTH_THREADS = 8 * _MIB
_NOT_WHOLE_HINT = (
    "Bring its folder back as it was. If its version is not in the log yet, removing it lets the run go on from the one before."
)

Outbox = tuple[tuple[Topic, Record], ...]
"""Records to publish, in order."""


class CheckpointStore:
    """The checkpoints in one folder. One thread of one session writes; any process may read."""

    def __init__(self, folder: Path, codec: Codec) -> None:
        self._folder = folder
        self._codec = codec

    def save(self, state: LearnerState, outbox: Outbox, snapshot: SnapshotFiles | None, save_trainer: Callable[[Path], None]) -> Path:
        """Make `state` durable: it survives a power failure once this returns. `save_trainer` writes into the folder it is given.

        Raises UserError if the disk refuses.
        """

        def write_weights(staging: Path) -> dict[str, list[Any]]:
            save_trainer(staging / _TRAINER)
            if snapshot is not None:
                self._keep(snapshot, state.id, staging / _SNAPSHOT)
            paths = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
            return dict(_digests(staging, paths))

        return self._save(state, outbox, write_weights)

    def save_beside(self, state: LearnerState, outbox: Outbox, kept: str) -> Path:
        """As `save`, with links to the weights of the checkpoint `kept`, which are neither written nor hashed again."""

        def link_weights(staging: Path) -> dict[str, list[Any]]:
            files = {path: found for path, found in self._content(kept)["files"].items() if path != _OUTBOX}
            for path in files:
                (staging / path).parent.mkdir(parents=True, exist_ok=True)
                _link(self._folder / kept / path, staging / path)
            return files

        return self._save(state, outbox, link_weights)

    def _save(self, state: LearnerState, outbox: Outbox, put_weights: Callable[[Path], dict[str, list[Any]]]) -> Path:
        """`put_weights` fills the folder and returns size and checksum of each file in it."""
        staging, final = self._folder / f".{state.id}.tmp", self._folder / state.id
        try:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            files = put_weights(staging)
            (staging / _OUTBOX).write_bytes(b"".join(self._packed(outbox)))
            content = {"format": _FORMAT, "files": {**files, **dict(_digests(staging, [_OUTBOX]))}, **to_json(state)}
            (staging / _STATE).write_text(json.dumps({"checksum": _checksum(content), **content}), encoding="utf-8")
            sync_tree(staging)
            staging.rename(final)
            sync(self._folder)
        except OSError as exc:
            raise self._refused(state.id, exc) from exc
        return final

    def take_snapshot(self, name: str, take: Callable[[Path], SnapshotFiles]) -> SnapshotFiles:
        """The snapshot that `take` makes in a new folder, for the checkpoint `name`, which is saved next and gets its files.

        Raises UserError if the disk refuses, and what `take` raises.
        """
        scratch = self._scratch(name)
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            return replace(take(scratch), folder=self.snapshot_folder(name))
        except OSError as exc:
            raise self._refused(name, exc) from exc
        except UserError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    def check_writable(self, run_id: str) -> None:
        """Raise UserError unless a file can be made durable here and one more checkpoint of the run's largest size fits."""
        probe = self._folder / f".probe-{secrets.token_hex(4)}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                probe.write_bytes(bytes(_PROBE_BYTES))
                sync(probe)
            finally:
                probe.unlink(missing_ok=True)
            free = shutil.disk_usage(self._folder).free
        except OSError as exc:
            raise UserError(
                f"Checkpoints cannot be written to {self._folder}: {exc.strerror or exc}. Nothing was changed.",
                hint="A step that is not durable is never published: mend the disk, free space there, or set [checkpoint] folder.",
            ) from exc
        needed = max(map(self.num_bytes, self.states(run_id)), default=0)
        if free < needed:
            raise UserError(
                f"{self._folder} has {free / _MIB:,.1f} MiB left, and a checkpoint of this run takes {needed / _MIB:,.1f}. "
                "Nothing was changed.",
                hint="Free space there, or move the folder to where there is some and set [checkpoint] folder.",
            )

    def free_bytes(self) -> int:
        """Bytes that are free where checkpoints are written. Raises OSError."""
        return shutil.disk_usage(self._folder).free

    def anchor(self) -> None:
        """Make the folder's list of checkpoints, and its parents, durable: a session may have died between a rename and its fsync.

        Nothing of a checkpoint may be published before. Raises UserError if the disk refuses.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            sync(self._folder)
        except OSError as exc:
            raise UserError(
                f"The checkpoint folder {self._folder} cannot be made durable: {exc.strerror or exc}.",
                hint="Mend the disk, or set [checkpoint] folder to one that can be written.",
            ) from exc
        sync_parents(self._folder)

    def ids(self) -> tuple[str, ...]:
        """All whole checkpoints, of any session."""
        if not self._folder.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self._folder.iterdir() if _ID.fullmatch(entry.name) and (entry / _STATE).is_file()))

    def load(self, name: str) -> LearnerState:
        """The state of a checkpoint. Raises UserError if it is not there or not whole."""
        content = self._content(name)
        try:
            return from_json(content)
        except (KeyError, TypeError, ValueError) as exc:
            raise UserError(f"The checkpoint {name} is not whole: {exc!r}.", hint=_NOT_WHOLE_HINT) from exc

    def verify(self, name: str) -> None:
        """Raise UserError unless every file of a checkpoint has the size and checksum that were written."""
        files: Mapping[str, Sequence[Any]] = self._content(name)["files"]
        folder = self._folder / name
        missing = [path for path in files if not (folder / path).is_file()]
        there = [path for path in files if path not in missing]
        try:
            changed = [path for path, found in _digests(folder, there) if found != list(files[path])]
        except OSError as exc:
            raise UserError(f"The checkpoint {name} in {self._folder} cannot be read: {exc}.", hint=_NOT_WHOLE_HINT) from exc
        if missing or changed:
            what = [f"{path} is gone" for path in missing] + [f"{path} is not what was written" for path in changed]
            raise UserError(f"The checkpoint {name} in {self._folder} is not whole: {', '.join(what)}.", hint=_NOT_WHOLE_HINT)

    def load_outbox(self, name: str) -> Outbox:
        """The records that were not in the log when the checkpoint was written. Raises UserError if they are not whole."""
        try:
            pieces = list(_unpacked((self._folder / name / _OUTBOX).read_bytes()))
            topics = [BY_NAME[topic.decode()] for topic in pieces[::2]]
            return tuple(zip(topics, map(self._codec.decode, pieces[1::2]), strict=True))
        except (OSError, LookupError, ValueError, InvalidRecord) as exc:
            raise UserError(
                f"The checkpoint {name} is not whole: its unpublished records cannot be read ({exc!r}).", hint=_NOT_WHOLE_HINT
            ) from exc

    def load_snapshot(self, state: LearnerState, kind: WeightKind, names: Sequence[str]) -> SnapshotFiles:
        """The snapshot that the checkpoint `state` keeps. Raises UserError if it is not whole, or not the one that was written."""
        snapshot = read_snapshot(self.snapshot_folder(state.id), state.version, kind, names)
        if snapshot.sha256 != state.snapshot:
            raise UserError(
                f"The snapshot in the checkpoint {state.id} has another checksum than when it was written.", hint=_NOT_WHOLE_HINT
            )  # fmt: skip
        return snapshot

    def trainer_folder(self, name: str) -> Path:
        return self._folder / name / _TRAINER

    def snapshot_folder(self, name: str) -> Path:
        """The snapshot's files, if the checkpoint has any."""
        return self._folder / name / _SNAPSHOT

    def descendants(self, root: str | None, run_id: str) -> list[LearnerState]:
        """Checkpoints of `run_id` that come from `root` by their parents (None: from the very start), newest version last.

        Raises UserError if one that may be among them cannot be read. Those below `root`'s version are not looked at.
        """
        least = 0 if root is None else version_of(root)
        loaded = (self.load(name) for name in self.ids() if version_of(name) >= least)
        states = {state.id: state for state in loaded if state.run_id == run_id}
        return sorted(
            (state for state in states.values() if comes_from(state, root, states)), key=lambda state: (state.version, state.created_ms)
        )

    def states(self, run_id: str) -> dict[str, LearnerState]:
        """Every checkpoint of `run_id` that can be read, by id; the others are skipped with a warning."""
        found = {}
        for name in self.ids():
            try:
                found[name] = self.load(name)
            except UserError as exc:
                logger.warning("Passed over: %s `echoswarm checkpoints list` shows it.", exc.message)
        return {name: state for name, state in found.items() if state.run_id == run_id}

    def newest(self, run_id: str) -> LearnerState | None:
        """The readable checkpoint of `run_id` with the highest version, of any session."""
        return max(self.states(run_id).values(), key=lambda state: (state.version, state.created_ms), default=None)

    def prune(self, session: str, keep: int, committed_version: int) -> None:
        """Remove this session's checkpoints below `committed_version`, which the log may name, except the newest `keep` versions'."""
        own = sorted((version_of(name), name) for name in self.ids() if name.partition("-")[2].partition(".")[0] == session)
        kept = sorted({version for version, _ in own})[-keep:]
        for version, name in own:
            if version not in kept and version < committed_version:
                self.remove(name)

    def prune_branches(self, run_id: str, tip: str) -> None:
        """Remove checkpoints that no start goes on from: those on dead branches beside `tip`, which the log names."""
        for name, relation in relations(self.states(run_id), tip).items():
            if relation is Relation.DEAD:
                logger.info("The checkpoint %s came to nothing, and is removed: the run went on without it", name)
                self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a checkpoint. Files that the disk refuses to remove stay."""
        # Rename it first: a process that dies while it deletes must not leave half a checkpoint.
        gone = self._folder / f".{name}.gone"
        with suppress(OSError):
            (self._folder / name).rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def num_bytes(self, name: str) -> int:
        """Size of a checkpoint on the disk; less while its learner removes it."""
        total = 0
        for folder, _, files in os.walk(self._folder / name):
            for file in files:
                with suppress(FileNotFoundError):
                    total += (Path(folder) / file).stat().st_size
        return total

    def _scratch(self, name: str) -> Path:
        """The folder of a snapshot until its checkpoint is written."""
        return self._folder / f".{name}.snapshot"

    def _keep(self, snapshot: SnapshotFiles, name: str, folder: Path) -> None:
        """Put the snapshot's files into the new folder `folder`: those that were taken for `name`, or copies of another checkpoint's."""
        if snapshot.folder == self.snapshot_folder(name):
            self._scratch(name).rename(folder)
        else:
            copy_snapshot(snapshot, folder)

    def _refused(self, name: str, exc: OSError) -> UserError:
        """The error for a disk that refuses. Removes the unfinished folders, whose space the next attempt needs."""
        for folder in (self._folder / f".{name}.tmp", self._scratch(name)):
            shutil.rmtree(folder, ignore_errors=True)
        return UserError(
            f"The checkpoint {name} could not be written to {self._folder}: {exc.strerror or exc}. Nothing of it was published.",
            hint="Free space there, or set [checkpoint] folder; then start again: the run goes on from the checkpoint before.",
        )

    def _content(self, name: str) -> dict[str, Any]:
        """The content of `state.json`, its checksum compared."""
        try:
            content = json.loads((self._folder / name / _STATE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"There is no checkpoint {name} in {self._folder}.") from None
        except (OSError, ValueError) as exc:
            raise UserError(f"The checkpoint {name} cannot be read: {exc}.", hint=_NOT_WHOLE_HINT) from exc
        found = content.get("format") if isinstance(content, dict) else None
        if found != _FORMAT:
            raise UserError(
                f"The checkpoint {name} has format {found}; this version of EchoSwarm reads {_FORMAT}.",
                hint="Start the learner with the release that wrote it, or fork from the weights in the log (docs/compatibility.md).",
            )
        if content.pop("checksum", None) != _checksum(content):
            raise UserError(f"The checkpoint {name} is not whole: its {_STATE} is not what was written.", hint=_NOT_WHOLE_HINT)
        return dict(content)

    def _packed(self, outbox: Outbox) -> Iterator[bytes]:
        for topic, record in outbox:
            for piece in (topic.name.encode(), self._codec.encode(record)):
                yield _LENGTH.pack(len(piece)) + piece


def _unpacked(data: bytes) -> Iterator[bytes]:
    position = 0
    while position < len(data):
        start = position + _LENGTH.size
        if start > len(data):
            raise ValueError("the last length is cut off")
        (length,) = _LENGTH.unpack_from(data, position)
        position = start + length
        if position > len(data):
            raise ValueError("the last record is cut off")
        yield data[start:position]


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _link(source: Path, target: Path) -> None:
    """A hard link; a copy where the file system has none."""
    try:
        target.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, target)


def _digests(folder: Path, paths: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Size and SHA-256 of each path. Large files are hashed on several threads: a large trainer has a file for each rank."""

    def digest(path: str) -> tuple[str, list[Any]]:
        with (folder / path).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return path, [file.tell(), sha256]

    if sum((folder / path).stat().st_size for path in paths) < _WORTH_THREADS:
        return list(map(digest, paths))
    with ThreadPoolExecutor(_HASHED_AT_ONCE, thread_name_prefix="checksums") as pool:
        return list(pool.map(digest, paths))
