"""A schema registry beside the embedded broker: Apicurio Registry, which implements Confluent's API. On loopback only."""

from __future__ import annotations

import logging
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from echo_bus.clock import Deadline
from echo_embedded.artifacts import Artifact, download, install
from echo_embedded.guard import Guard
from echo_embedded.java import find_java
from echo_embedded.ports import free_ports
from echo_embedded.process import JavaProcess
from echo_embedded.properties import HOST
from echo_embedded.readiness import wait_for_http
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)

REGISTRY_VERSION = "3.3.3"
_API = "/apis/ccompat/v7"
# Its classes are compiled for Java 21.
_OLDEST_JAVA = 21
_HEAP_MB = 384


class SchemaRegistry:
    """One registry process, with one owner thread. It keeps its schemas in the folder `data`, or without one in memory."""

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
            # It gets a few requests a minute; the second compiler would cost the broker seconds of CPU.
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
    """The folder of the unpacked registry in the user's cache, downloaded first if it is missing. Blocks and raises as `install`."""
    return install(f"registry-{REGISTRY_VERSION}", "registry.lock", f"the schema registry {REGISTRY_VERSION}", _unpack, report=report)


def _unpack(folder: Path, artifacts: Sequence[Artifact]) -> None:
    download(artifacts, folder)
    archive = folder / artifacts[0].file_name
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as exc:
        raise UserError(
            f"The schema registry could not be unpacked into {folder}: {exc}.", hint="Check that the disk is not full."
        ) from exc
    archive.unlink()
