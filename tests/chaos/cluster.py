"""Real brokers, three by default, whose clients come through proxies; between themselves they speak directly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from echo_embedded import EmbeddedKafka, Jit, Jvm
from echo_embedded.ports import free_ports
from echo_embedded.properties import HOST, render
from tests.chaos.proxy import ProxyBank

NUM_BROKERS = 3
# A cluster of tests is small; without a limit three of them would take what a learner needs.
_HEAP_MB = 256


class ProxiedKafka(EmbeddedKafka):
    """`bootstrap` leads to the brokers themselves, `proxied` through the proxies, and whoever comes that way is told of proxies only."""

    def __init__(self, host: str = HOST, num_brokers: int = NUM_BROKERS) -> None:
        """`host`: the address that the proxies listen on and the brokers advertise."""
        super().__init__(num_brokers, jvm=Jvm(heap_mb=_HEAP_MB, jit=Jit.QUICK))
        self._host = host
        self._outer = free_ports(num_brokers)
        self._inner: list[int] = []

    @property
    def proxied(self) -> str:
        """Addresses of the proxies."""
        return ",".join(f"{self._host}:{port}" for port in self._outer)

    def proxies(self) -> ProxyBank:
        """The proxies of this cluster, to be opened once it is started."""
        return ProxyBank(self._host, self._outer, [(HOST, port) for port in self._inner])

    def _make_nodes(self, command: Sequence[str], lock: TextIO) -> None:
        super()._make_nodes(command, lock)
        self._inner = free_ports(len(self.nodes))
        for node, inner, outer in zip(self.nodes, self._inner, self._outer, strict=True):
            file = self.folder / f"node-{node.node_id}.properties"
            properties = dict(line.split("=", 1) for line in file.read_text(encoding="utf-8").splitlines())
            properties["listeners"] += f",PROXIED://{HOST}:{inner}"
            properties["advertised.listeners"] += f",PROXIED://{self._host}:{outer}"
            properties["listener.security.protocol.map"] += ",PROXIED:PLAINTEXT"
            file.write_text(render(properties), encoding="utf-8")
