"""A schema registry beside the embedded broker: Apicurio Registry, which answers Confluent's API. On loopback only."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from echo_bus.clock import Deadline
from echo_embedded.artifacts import download, lock_digest, read_lock
from echo_embedded.folders import cache_folder, exclusive, staged
from echo_embedded.guard import Guard
from echo_embedded.java import find_java
from echo_embedded.ports import free_ports
from echo_embedded.process import JavaProcess
from echo_embedded.properties import HOST
from echo_embedded.readiness import wait_for_http
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)

REGISTRY_VERSION = "3.3.3"
_LOCK = "registry.lock"
_API = "/apis/ccompat/v7"
# Its classes are compiled for Java 21.
_OLDEST_JAVA = 21
_HEAP_MB = 384


class SchemaRegistry:
    """One registry process. One owner thread. Its schemas last as long as `data`, a folder; in memory without one."""

    def __init__(self, installation: Path, log: Path, *, data: Path | None, marker: str, lock: TextIO) -> None:
        port, management_port = free_ports(2)
        self.url = f"http://{HOST}:{port}{_API}"
        database = "mem:registry" if data is None else f"file:{data / 'registry'}"
        command = [
            str(find_java(oldest=_OLDEST_JAVA).executable),
            "-Xms64m",
            f"-Xmx{_HEAP_MB}m",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            # It answers a few requests a minute; the second compiler would take seconds of CPU from the broker.
            "-XX:TieredStopAtLevel=1",
            marker,
            f"-Dquarkus.http.host={HOST}",
            f"-Dquarkus.http.port={port}",
            # Without these two the management port listens on every interface.
            f"-Dquarkus.management.host={HOST}",
            f"-Dquarkus.management.port={management_port}",
            "-Dquarkus.log.level=WARN",
            "-Dquarkus.http.access-log.enabled=false",
            "-Dapicurio.storage.kind=sql",
            "-Dapicurio.storage.sql.kind=h2",
            f"-Dapicurio.datasource.url=jdbc:h2:{database}",
            "-jar",
            "quarkus-run.jar",
        ]
        self.process = JavaProcess("The schema registry", command, log, lock=lock, folder=installation)

    def start(self, guard: Guard | None) -> None:
        """Start it; returns before it answers."""
        self.process.start(guard)

    def wait_ready(self, deadline: Deadline) -> None:
        """Block until it answers. Raises DeadlineExceeded, or ProcessDied if it ended."""
        wait_for_http(f"{self.url}/subjects", deadline, check_alive=self.process.check_alive)


def install_registry(*, report: Callable[[str], None] = _log.info) -> Path:
    """The folder of the unpacked registry in the user's cache, downloaded first if it is not there. Raises UserError."""
    artifacts = read_lock(_LOCK)
    final = cache_folder() / f"registry-{REGISTRY_VERSION}-{lock_digest(artifacts)}"
    if final.is_dir():
        return final
    with exclusive(final.with_name(f"{final.name}.lock")):
        if final.is_dir():
            return final
        num_megabytes = sum(artifact.num_bytes for artifact in artifacts) // 1_000_000
        report(f"Downloading the schema registry {REGISTRY_VERSION} ({num_megabytes} MB, once) into {final.parent}")
        with staged(final) as scratch:
            download(artifacts, scratch)
            archive = scratch / artifacts[0].file_name
            _unpack(archive, scratch)
            archive.unlink()
    return final


def _unpack(archive: Path, folder: Path) -> None:
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as exc:
        raise UserError(
            f"The schema registry could not be unpacked into {folder}: {exc}.", hint="Check that the disk is not full."
        ) from exc
