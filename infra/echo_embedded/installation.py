"""Apache Kafka in the user's cache folder: the locked jars and a formatted storage to copy. Installed once per version."""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from echo_embedded.artifacts import Artifact, download, install
from echo_embedded.java import Java
from echo_schemas.errors import UserError

_log = logging.getLogger(__name__)

KAFKA_VERSION = "4.3.1"
_FORMAT_TIMEOUT_S = 120
# The tool needs a whole configuration; the checkpoint contains nothing of it.
_TEMPLATE_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:9093
controller.listener.names=CONTROLLER
listeners=PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093
"""


@dataclass(frozen=True, slots=True)
class Installation:
    """An installed Kafka. `folder` holds `jars/`, `log4j2.xml` and `bootstrap.checkpoint`."""

    folder: Path

    @property
    def jars(self) -> Path:
        return self.folder / "jars"

    @property
    def bootstrap_checkpoint(self) -> Path:
        """Written by `StorageTool format`: the feature levels of a new cluster, without ids."""
        return self.folder / "bootstrap.checkpoint"

    @property
    def log_settings(self) -> Path:
        """The log4j2 file of every JVM of this installation."""
        return self.folder / "log4j2.xml"

    def class_path(self) -> str:
        """Every jar, in a fixed order, because the class cache is valid for one class path only."""
        return os.pathsep.join(str(jar) for jar in sorted(self.jars.glob("*.jar")))


def install_kafka(java: Java, *, report: Callable[[str], None] = _log.info) -> Installation:
    """The installed Kafka, downloaded and prepared first if this user has none. Blocks and raises as `install`."""

    def fill(scratch: Path, artifacts: Sequence[Artifact]) -> None:
        partial = Installation(scratch)
        partial.jars.mkdir()
        download(artifacts, partial.jars)
        log_settings = files("echo_embedded").joinpath("log4j2.xml").read_text(encoding="utf-8")
        partial.log_settings.write_text(log_settings, encoding="utf-8")
        format_checkpoint(java, partial, partial.bootstrap_checkpoint)

    return Installation(install(f"kafka-{KAFKA_VERSION}", "kafka.lock", f"Apache Kafka {KAFKA_VERSION}", fill, report=report))


def format_checkpoint(java: Java, installation: Installation, target: Path, options: Sequence[str] = ()) -> None:
    """Run Kafka's format tool on a scratch folder and keep only the checkpoint, which contains no cluster or node id.

    `options` are added to the tool's command line, for example `--add-scram`. Raises UserError if the tool fails.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".format-") as scratch:
        data, properties = Path(scratch, "data"), Path(scratch, "server.properties")
        properties.write_text(_TEMPLATE_PROPERTIES + f"log.dirs={data}\n", encoding="utf-8")
        command = [str(java.executable), "-XX:TieredStopAtLevel=1", "-cp", installation.class_path()]
        command += ["kafka.tools.StorageTool", "format", "-t", new_uuid(), "-c", str(properties), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FORMAT_TIMEOUT_S, check=False)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines()
            raise UserError(
                f"Kafka's storage tool failed: {lines[-1] if lines else f'exit code {done.returncode}'}.",
                hint=f"Check that {java.executable} runs and that the disk of {target.parent} is not full.",
            )
        (data / "bootstrap.checkpoint").rename(target)


def new_uuid() -> str:
    """A random id as Kafka prints them: 22 characters of URL-safe base64."""
    while True:
        text = secrets.token_urlsafe(16)
        # The storage tool parses an id that starts with a dash as an option.
        if not text.startswith("-"):
            return text
