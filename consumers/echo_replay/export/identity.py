"""Which cluster and topics an export is of: names come back when a cluster or a topic is made anew, ids do not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from echo_bus.bus import Bus
from echo_learner.commit.session import identities
from echo_replay.export.manifest import ExportManifest
from echo_schemas.errors import UserError

_OTHER = "Export into another folder; this one stays as it is."


def identity_of(bus: Bus) -> dict[str, str]:
    """The cluster's id under `cluster`, and the ids of the topics that every run keeps."""
    return identities(bus)


def check_identity(manifest: ExportManifest, home: Path, *, run_id: str, namespace: str, identity: Mapping[str, str]) -> None:
    """Raises UserError unless the export is of this run of this cluster."""
    if manifest.run_id != run_id:
        raise UserError(f"{home} holds an export of the run {manifest.run_id!r}, not of {run_id!r}.", hint=_OTHER)
    if manifest.namespace != namespace:
        raise UserError(f"{home} is of the namespace {manifest.namespace!r}, this run is in {namespace!r}.", hint=_OTHER)
    if manifest.identity.get("cluster") != identity.get("cluster"):
        raise UserError(f"{home} is an export of another Kafka cluster, whose run has the same name.", hint=_OTHER)
    for topic, known in manifest.identity.items():
        if topic in identity and identity[topic].partition("/")[0] != known.partition("/")[0]:
            raise UserError(f"The topic {topic} was made anew since {home} was exported.", hint=_OTHER)
