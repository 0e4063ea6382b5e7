"""Simulated machines of a benchmark: network namespaces of this machine, each behind a line whose rate the kernel limits (tc, tbf).

    machine 0 ── veth, tbf both ways ──┐
    machine 1 ── veth, tbf both ways ──┴── a bridge, as fast as the kernel

Needs root, `ip` and `tc`. In `inside` the sockets of the calling thread are in that machine; threads that it starts there stay in it.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import socketserver
import struct
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

_NEW_NET = 0x40000000
_SPAN = struct.Struct(">QQ")
_READ_AT_ONCE = 1 << 20
# Bytes that may pass at once after a pause, and the longest wait in the line.
_BURST, _QUEUE = "64kb", "50ms"


def why_not() -> str:
    """Why this machine cannot have network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "it needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


class Machines:
    """`count` machines, with lines of `mbit` in each direction. Use it in a `with` block."""

    def __init__(self, count: int, mbit: float) -> None:
        self._prefix = f"echo-bench-{os.getpid()}"
        self._count, self._mbit = count, mbit
        self.addresses = [f"10.77.0.{number + 1}" for number in range(count)]

    def __enter__(self) -> Machines:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        switch = f"{self._prefix}-switch"
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        for number, address in enumerate(self.addresses):
            machine, port = f"{self._prefix}-{number}", f"port{number}"
            _ip("netns", "add", machine)
            _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "line", "netns", machine)
            _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", machine, "addr", "add", f"{address}/24", "dev", "line")
            _ip("-n", machine, "link", "set", "line", "up")
            _ip("-n", machine, "link", "set", "lo", "up")
            for place, device in ((machine, "line"), (switch, port)):
                limit = ("rate", f"{self._mbit:g}mbit", "burst", _BURST, "latency", _QUEUE)
                _run("tc", "-n", place, "qdisc", "add", "dev", device, "root", "tbf", *limit)

    def __exit__(self, *_: object) -> None:
        for name in ("switch", *range(self._count)):
            subprocess.run(["ip", "netns", "del", f"{self._prefix}-{name}"], capture_output=True, check=False)

    @contextmanager
    def inside(self, number: int) -> Iterator[None]:
        """The calling thread is in this machine."""
        home_file, there_file = Path("/proc/thread-self/ns/net"), Path("/run/netns") / f"{self._prefix}-{number}"
        with home_file.open("rb") as home, there_file.open("rb") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


class ByteServer(socketserver.ThreadingTCPServer):
    """Serves spans of `data` to clients. `close` it."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, data: bytes, host: str) -> None:
        self._data = memoryview(data)
        super().__init__((host, 0), socketserver.BaseRequestHandler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """One span, then the end."""
        assert isinstance(request, socket.socket)
        start, end = _SPAN.unpack(request.recv(_SPAN.size, socket.MSG_WAITALL))
        request.sendall(self._data[start:end])

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()


def read_bytes(address: tuple[str, int], start: int, end: int) -> Generator[bytes, None, None]:
    """The bytes from `start` to `end` of a `ByteServer`, in pieces. Raises EOFError, OSError."""
    with closing(socket.create_connection(address)) as connection:
        connection.sendall(_SPAN.pack(start, end))
        while start < end:
            piece = connection.recv(min(_READ_AT_ONCE, end - start))
            if not piece:
                raise EOFError(address)
            start += len(piece)
            yield piece


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _NEW_NET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
