"""The data folder of an embedded cluster: formats a new one, and checks whether a used one fits this cluster and version."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from echo_embedded.installation import KAFKA_VERSION, new_uuid
from echo_schemas.errors import UserError

_MARKER = "echoswarm-cluster.json"
# Leftovers of a start that was interrupted before it wrote the marker.
_OURS = re.compile(r"lock|logs|security|registry|node-\d(\.properties)?")


@dataclass(frozen=True, slots=True)
class ClusterIdentity:
    """The content of a data folder's marker. A folder belongs to one cluster of one size for ever."""

    cluster_id: str
    num_brokers: int
    secure: bool
    kafka_version: str


def open_storage(folder: Path, *, num_brokers: int, secure: bool, checkpoint: Callable[[], Path]) -> ClusterIdentity:
    """Format `folder` for a new cluster, or check the cluster that it holds.

    `checkpoint()` makes or finds the checkpoint of a new cluster. The marker is written last, so no broker has used a folder without it.
    Raises UserError for a cluster of another size or security, or data of another major version of Kafka.
    """
    marker = folder / _MARKER
    if marker.is_file():
        identity = _read(marker)
        _check(identity, folder, num_brokers=num_brokers, secure=secure)
        return identity
    for stale in folder.glob("node-?"):
        shutil.rmtree(stale)
    identity = ClusterIdentity(cluster_id=new_uuid(), num_brokers=num_brokers, secure=secure, kafka_version=KAFKA_VERSION)
    template = checkpoint()
    for node_id in range(1, num_brokers + 1):
        _format(log_folder(folder, node_id), identity, node_id, template)
    scratch = marker.with_suffix(".tmp")
    scratch.write_text(json.dumps(asdict(identity), indent=2) + "\n", encoding="utf-8")
    scratch.replace(marker)
    return identity


def refuse_foreign(folder: Path) -> None:
    """Raises UserError if `folder` holds files that are not of an embedded cluster."""
    if not folder.exists() or (folder / _MARKER).is_file():
        return
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder.", hint="Name a new folder for the embedded Kafka.")
    foreign = sorted(path.name for path in folder.iterdir() if not _OURS.fullmatch(path.name))
    if foreign:
        raise UserError(
            f"The folder {folder} is not an embedded Kafka's, and not empty (it holds {foreign[0]!r}).", hint="Name an empty or new folder."
        )


def log_folder(folder: Path, node_id: int) -> Path:
    """The folder of node `node_id`'s partitions."""
    return folder / f"node-{node_id}" / "data"


def _format(folder: Path, identity: ClusterIdentity, node_id: int, checkpoint: Path) -> None:
    folder.mkdir(parents=True)
    shutil.copyfile(checkpoint, folder / "bootstrap.checkpoint")
    lines = {"version": "1", "cluster.id": identity.cluster_id, "node.id": str(node_id), "directory.id": new_uuid()}
    text = "".join(f"{key}={value}\n" for key, value in lines.items())
    (folder / "meta.properties").write_text(text, encoding="utf-8")


def _read(marker: Path) -> ClusterIdentity:
    try:
        return ClusterIdentity(**json.loads(marker.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as exc:
        raise UserError(f"The file {marker} cannot be read.", hint=f"Remove the folder {marker.parent} to start afresh.") from exc


def _check(identity: ClusterIdentity, folder: Path, *, num_brokers: int, secure: bool) -> None:
    afresh = f"Remove {folder} to start afresh, or name another folder."
    if identity.num_brokers != num_brokers:
        raise UserError(
            f"The folder {folder} holds a cluster of {identity.num_brokers} broker(s), not {num_brokers}.",
            hint=afresh,
        )
    if identity.secure != secure:
        held, asked = ("a secured", "an open") if identity.secure else ("an open", "a secured")
        raise UserError(f"The folder {folder} holds {held} cluster, and {asked} one was asked for.", hint=afresh)
    if identity.kafka_version.split(".")[0] != KAFKA_VERSION.split(".")[0]:
        raise UserError(
            f"The folder {folder} was written by Kafka {identity.kafka_version}, and this is Kafka {KAFKA_VERSION}.",
            hint=afresh,
        )
    for node_id in range(1, num_brokers + 1):
        if not (log_folder(folder, node_id) / "meta.properties").is_file():
            raise UserError(f"The folder {folder} has lost the data of node {node_id}.", hint=afresh)
