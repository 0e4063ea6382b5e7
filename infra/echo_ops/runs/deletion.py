"""Everything that belongs to a run, and its removal.

In a namespace without another run: topics, groups, access lists and files. Beside other runs Kafka cannot remove one run's records from a
topic: tombstones remove the newest record of each key from compacted topics, and retention removes the others.
"""

from __future__ import annotations

import shutil
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclBinding, AclBindingFilter, AclOperation, AclPermissionType, ResourcePatternType, ResourceType

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.client.kafka_errors import translated
from echo_bus.message import raw_headers
from echo_learner.commit.checkpoint import CheckpointStore
from echo_ops.groups import groups_with_members
from echo_ops.supervisor.registration import FOLDER_LOCK
from echo_ops.topic_admin import TopicAdmin
from echo_replay.raw_log import RawLog
from echo_rollout.journal import journals_folder
from echo_schemas.errors import UserError
from echo_schemas.headers import RUN
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import BY_NAME, RUNS

# The client ends each request after this time by itself.
_WAIT_S = 30.0
# Files of `echoswarm up` and the learner beside the checkpoints.
_BESIDE = ("logs", "processes", "snapshots", "report.html", "summary.json", "supervisor.log", FOLDER_LOCK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What would be removed. `topics`: physical names, in a namespace without another run; else `keys`: name of a compacted topic → keys.
    `acls` None: this login may not see them, or the cluster has none."""

    run_id: str
    topics: tuple[str, ...]
    keys: dict[str, tuple[str, ...]]
    groups: tuple[str, ...]
    acls: tuple[AclBinding, ...] | None
    paths: tuple[Path, ...]
    num_bytes: int


def find_remains(bus: Bus, run_id: str, folder: Path, *, is_alone: bool) -> Remains:
    """Everything of the run. `is_alone`: the namespace has no other run. Raises UserError if a group still has members; TransportError."""
    prefix = f"{bus.namespace.name}."
    members = {name: busy for name, busy in groups_with_members(bus.cluster).items() if name.startswith(prefix)} if is_alone else {}
    if working := sorted(name for name, is_busy in members.items() if is_busy):
        raise UserError(f"The group {working[0]} still has members.", hint="End workers and reward processes first. Nothing was removed.")
    # A run of the same name begins at the same offsets: what its workers died of is not this one's.
    journals = journals_folder(bus, run_id)
    paths = (*_paths_of(bus, run_id, folder), *([journals] if journals.exists() else []))
    return Remains(
        run_id=run_id,
        topics=tuple(TopicAdmin(bus.cluster, bus.namespace).existing()) if is_alone else (),
        keys={} if is_alone else _keys_of(bus, run_id),
        groups=tuple(sorted(members)),
        acls=_acls_of(bus, prefix) if is_alone else (),
        paths=paths,
        num_bytes=sum(map(_size_of, paths)),
    )


def remove(bus: Bus, remains: Remains) -> None:
    """Remove the log first, so that the files stay if the cluster refuses, and the run's record in `runs` last, so that a removal that was
    killed can be repeated. Raises TransportError, UserError.
    """
    admin = bus.cluster.admin()
    last = bus.namespace.topic(RUNS)
    with translated("the cluster"):
        _delete_topics(admin, [name for name in remains.topics if name != last])
        if remains.groups:
            for done in admin.delete_consumer_groups(list(remains.groups), request_timeout=_WAIT_S).values():
                done.result()
        if remains.acls:
            for done in admin.delete_acls([_exactly(each) for each in remains.acls], request_timeout=_WAIT_S).values():
                done.result()
        _bury(bus, {name: keys for name, keys in remains.keys.items() if name != RUNS.name})
        _remove_files(remains.paths)
        _delete_topics(admin, [name for name in remains.topics if name == last])
    _bury(bus, {name: keys for name, keys in remains.keys.items() if name == RUNS.name})


def _delete_topics(admin: Any, names: list[str]) -> None:
    if not names:
        return
    for done in admin.delete_topics(names, request_timeout=_WAIT_S).values():
        try:
            done.result()
        except KafkaException as exc:
            # An earlier attempt has removed it, and some broker still listed it.
            if exc.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise


def _remove_files(paths: tuple[Path, ...]) -> None:
    for path in paths:
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as exc:
            raise UserError(
                f"{path} cannot be removed: {exc.strerror or exc}.", hint="The log is gone; remove the folder, then type the same again."
            ) from exc
    for folder in {path.parent for path in paths}:
        # A folder that is not empty holds files of others.
        with suppress(OSError):
            folder.rmdir()


def _keys_of(bus: Bus, run_id: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for spec in load_topic_specs():
        if spec.name not in BY_NAME or spec.config["cleanup.policy"] != "compact":
            continue
        alive: dict[bytes, bool] = {}
        with RawLog(bus, bus.namespace.topic(BY_NAME[spec.name])) as log:
            for messages in log.messages():
                for raw in messages:
                    is_own = dict(raw_headers(raw)).get(RUN) == run_id.encode()
                    key = raw.key() or b""
                    if is_own or key in alive:
                        alive[key] = raw.value() is not None
        if keys := tuple(sorted(key.decode(errors="replace") for key, is_there in alive.items() if is_there)):
            found[spec.name] = keys
    return found


def _bury(bus: Bus, keys: dict[str, tuple[str, ...]]) -> None:
    if not keys:
        return
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        receipts = [publisher.publish_tombstone(BY_NAME[name], key) for name, each in keys.items() for key in each]
        for receipt in receipts:
            receipt.wait(_WAIT_S)


def _acls_of(bus: Bus, prefix: str) -> tuple[AclBinding, ...] | None:
    # None matches everything; the client's type annotations lack that.
    some: Any = None
    anything = AclBindingFilter(ResourceType.ANY, some, ResourcePatternType.ANY, some, some, AclOperation.ANY, AclPermissionType.ANY)
    # Keep the client in a variable: one that is collected cancels its request.
    admin = bus.cluster.admin()
    try:
        bindings = admin.describe_acls(anything, request_timeout=_WAIT_S).result()
    except KafkaException:
        # The cluster has no authorizer, or this login may not see access lists.
        return None
    return tuple(each for each in bindings if each.name.startswith(prefix))


def _exactly(binding: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype,
        binding.name,
        binding.resource_pattern_type,
        binding.principal,
        binding.host,
        binding.operation,
        binding.permission_type,
    )


def _paths_of(bus: Bus, run_id: str, folder: Path) -> list[Path]:
    """The run's checkpoints; if the folder has none of another run, the whole folder of checkpoints and the files beside it."""
    if not folder.is_dir():
        return []
    checkpoints = folder / "checkpoints"
    store = CheckpointStore(checkpoints, bus.codec)
    names = store.ids() if checkpoints.is_dir() else []
    own = []
    for name in names:
        # A checkpoint that cannot be read may be of another run.
        with suppress(UserError):
            if store.load(name).run_id == run_id:
                own.append(checkpoints / name)
    return own if len(own) < len(names) else [path for path in (checkpoints, *(folder / name for name in _BESIDE)) if path.exists()]


def _size_of(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
