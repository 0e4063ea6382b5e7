"""A broker of six requests, on a socket: it has a topic and a group, and says of every group that another broker coordinates it, as real
ones do for a moment when a broker has come back. Run as a script it lets the supervisor's `OffsetWatch` ask it.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading

# What it understands, by the protocol's key: the lowest and the highest version.
_METADATA, _FIND_COORDINATOR, _OFFSET_FETCH, _API_VERSIONS, _LIST_GROUPS, _LIST_OFFSETS = 3, 10, 9, 18, 16, 2
_APIS = {
    _METADATA: (0, 4),
    _FIND_COORDINATOR: (0, 1),
    _OFFSET_FETCH: (0, 3),
    _API_VERSIONS: (0, 0),
    _LIST_GROUPS: (0, 0),
    _LIST_OFFSETS: (0, 1),
}
_NOT_COORDINATOR, _UNSUPPORTED_VERSION = 16, 35
_NULL = struct.pack(">h", -1)
_NODE = 1
END = 5
"""Where the topic's only partition ends."""


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">h", len(encoded)) + encoded


class NobodysCoordinator:
    """Listens from the start, on a thread for each connection, until the process ends."""

    def __init__(self, topic: str, group: str) -> None:
        self._topic, self._group = topic, group
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._port = self._socket.getsockname()[1]
        self.bootstrap = f"127.0.0.1:{self._port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        requests = connection.makefile("rb")
        while len(head := requests.read(4)) == 4:
            body = requests.read(struct.unpack(">i", head)[0])
            key, version, correlation = struct.unpack(">hhi", body[:8])
            answer = self._answer(key, version)
            connection.sendall(struct.pack(">ii", len(answer) + 4, correlation) + answer)

    def _answer(self, key: int, version: int) -> bytes:
        node = struct.pack(">i", _NODE) + _text("127.0.0.1") + struct.pack(">i", self._port)
        if key == _API_VERSIONS:
            error = _UNSUPPORTED_VERSION if version else 0
            return struct.pack(">hi", error, len(_APIS)) + b"".join(struct.pack(">hhh", api, *span) for api, span in _APIS.items())
        if key == _METADATA:
            replicas = struct.pack(">ii", 1, _NODE)
            partition = struct.pack(">hii", 0, 0, _NODE) + replicas + replicas
            topics = struct.pack(">ih", 1, 0) + _text(self._topic) + b"\0" + struct.pack(">i", 1) + partition
            return struct.pack(">ii", 0, 1)[0 if version >= 3 else 4 :] + node + _NULL + _text("one") + struct.pack(">i", _NODE) + topics
        if key == _FIND_COORDINATOR:
            return struct.pack(">ih", 0, 0) + _NULL + node
        if key == _LIST_GROUPS:
            return struct.pack(">hi", 0, 1) + _text(self._group) + _text("consumer")
        if key == _LIST_OFFSETS:
            return struct.pack(">i", 1) + _text(self._topic) + struct.pack(">iihqq", 1, 0, 0, -1, END)
        return struct.pack(">iih", 0, 0, _NOT_COORDINATOR)


if __name__ == "__main__":
    from echo_bus.client.kafka import KafkaCluster
    from echo_bus.errors import ClusterUnreachable
    from echo_ops.report import offsets
    from echo_schemas.naming import Namespace
    from echo_schemas.topics import REQUESTS

    offsets._TIMEOUT_S = 2.0
    space = Namespace("t")
    broker = NobodysCoordinator(space.topic(REQUESTS), space.group("worker"))
    watch = offsets.OffsetWatch(KafkaCluster(broker.bootstrap), space)
    sys.stdout.write(f"{watch.ends(REQUESTS)}\n")
    try:
        watch.lags()
    except ClusterUnreachable:
        sys.stdout.write("unreachable\n")
