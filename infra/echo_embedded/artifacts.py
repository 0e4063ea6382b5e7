"""Files from Maven repositories, verified against the SHA-256 values in this package's lock files."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from echo_embedded.folders import cache_folder, exclusive, staged
from echo_schemas.errors import UserError
from echo_schemas.libraries import library_missing

if TYPE_CHECKING:
    from jgo.maven import MavenContext

_log = logging.getLogger(__name__)

# Small files, one connection each: more threads than this do not shorten the download.
_NUM_THREADS = 8
_TIMEOUT_S = 30
_TRIES = 5
_PAUSE_S = 1.0
_OFFLINE_HINT = (
    "The first start needs the network, later ones do not. You can name a mirror in jgo's settings, or use another cluster: set "
    "ECHO_KAFKA__BOOTSTRAP."
)


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file of a Maven repository."""

    group: str
    name: str
    version: str
    sha256: str
    num_bytes: int
    classifier: str = ""
    packaging: str = "jar"

    @property
    def file_name(self) -> str:
        classifier = f"-{self.classifier}" if self.classifier else ""
        return f"{self.name}-{self.version}{classifier}.{self.packaging}"


def read_lock(name: str) -> tuple[Artifact, ...]:
    """The artifacts of a lock file of this package: `group:name:version[:classifier:packaging] sha256 bytes` a line."""
    artifacts = []
    for line in files("echo_embedded").joinpath(name).read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        coordinates, sha256, num_bytes = line.split()
        group, artifact, version, *rest = coordinates.split(":")
        classifier, packaging = rest or ("", "jar")
        artifacts.append(Artifact(group, artifact, version, sha256, int(num_bytes), classifier, packaging))
    return tuple(artifacts)


def lock_digest(artifacts: Sequence[Artifact]) -> str:
    """Eight characters that name this exact set of files."""
    return hashlib.sha256("".join(sorted(artifact.sha256 for artifact in artifacts)).encode()).hexdigest()[:8]


def install(name: str, lock: str, title: str, fill: Callable[[Path, Sequence[Artifact]], None], *, report: Callable[[str], None]) -> Path:
    """The folder `<name>-<digest of the lock file>` in the user's cache; if it is missing, `fill` makes it from the locked artifacts.

    Blocks; processes that install at the same time wait for one another. The folder appears by one rename, so an interrupted installation
    leaves no incomplete folder. Raises UserError.
    """
    artifacts = read_lock(lock)
    final = cache_folder() / f"{name}-{lock_digest(artifacts)}"
    if final.is_dir():
        return final
    with exclusive(final.with_name(f"{final.name}.lock")):
        if not final.is_dir():
            num_megabytes = sum(artifact.num_bytes for artifact in artifacts) // 1_000_000
            report(f"Downloading {title} ({num_megabytes} MB, once) into {final.parent}")
            with staged(final) as scratch:
                fill(scratch, artifacts)
    return final


def download(artifacts: Sequence[Artifact], folder: Path) -> None:
    """Put every artifact into `folder` under its file name. Blocks until all are downloaded and verified.

    Copies files from the user's local Maven repository if it has them. Raises UserError without network, disk space or `jgo`, and for bytes
    that are not the locked ones.
    """
    try:
        import requests
        from jgo.config import GlobalSettings
        from jgo.maven import MavenContext, PythonResolver
    except ModuleNotFoundError as exc:
        raise library_missing("The embedded broker", exc.name, "'echoswarm[embedded]'") from exc
    settings = GlobalSettings.load()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as scratch:
        context = MavenContext(
            resolver=PythonResolver(),
            repo_cache=Path(scratch),
            local_repos=[settings.repo_cache],
            timeout=_TIMEOUT_S,
        )
        context.remote_repos.update(settings.repositories)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="download") as pool:
            pending = [pool.submit(_fetch, artifact, context, folder) for artifact in artifacts]
            try:
                for future in pending:
                    future.result()
            except (requests.RequestException, RuntimeError, OSError) as exc:
                pool.shutdown(wait=True, cancel_futures=True)
                raise UserError(f"A file of the embedded broker could not be downloaded: {_reason(exc)}.", hint=_OFFLINE_HINT) from exc


def _fetch(artifact: Artifact, context: MavenContext, folder: Path) -> None:
    path = _resolve(artifact, context)
    if _sha256(path) != artifact.sha256:
        raise UserError(
            f"{artifact.file_name} from {path.parent} is not the locked file: its SHA-256 differs.",
            hint="Delete the file if it lies in your local Maven repository, or mend the mirror that served it.",
        )
    shutil.copyfile(path, folder / artifact.file_name)
    _log.debug("Fetched %s", artifact.file_name)


def _resolve(artifact: Artifact, context: MavenContext) -> Path:
    """The local path of the file. Retries, because repositories sometimes drop a connection."""
    component = context.project(artifact.group, artifact.name).at_version(artifact.version)
    wanted = component.artifact(classifier=artifact.classifier, packaging=artifact.packaging)
    for number in range(1, _TRIES):
        try:
            return wanted.resolve()
        except (OSError, RuntimeError) as exc:
            _log.info("%s did not come (%s); trying again", artifact.file_name, _reason(exc))
        if wanted.cached_path is not None:
            # Otherwise the next try would use an incomplete file.
            wanted.cached_path.unlink(missing_ok=True)
        time.sleep(_PAUSE_S * number)
    return wanted.resolve()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(exc: Exception) -> str:
    """The innermost cause in one line; the outer errors repeat the addresses."""
    while exc.__context__ is not None and isinstance(exc.__context__, Exception):
        exc = exc.__context__
    return (str(exc).splitlines() or [type(exc).__name__])[0].rstrip(".") or type(exc).__name__
