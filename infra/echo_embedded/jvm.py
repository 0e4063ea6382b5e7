"""Memory and compiler settings of a broker's JVM, as options of the `java` launcher."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from echo_embedded.java import Java

# Since Java 24 a JVM warns at every start about native libraries and Unsafe, unless options allow them.
_WARNS_OF_NATIVE_CODE = 24
_INITIAL_HEAP_MB = 64


class Jit(StrEnum):
    """How the JVM compiles."""

    FULL = "full"
    """Both compilers: best latency and throughput, after a warm-up that costs some seconds of CPU."""
    QUICK = "quick"
    """The first compiler only: less CPU in the first minute; for tests."""


@dataclass(frozen=True, slots=True)
class Jvm:
    """Settings of each JVM. With `class_cache` it starts from a cache of parsed classes (see `class_cache`)."""

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
