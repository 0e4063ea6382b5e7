"""The proxy does to connections what it says: a chaos suite whose faults do nothing would pass."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from echo_bus.clock import Deadline
from echo_embedded.ports import free_ports
from echo_embedded.properties import HOST
from tests.chaos.proxy import ProxyBank

_WAIT_S = 30.0
_SILENCE_S = 0.3


class Echo:
    """A server that answers every byte with itself."""

    def __init__(self) -> None:
        self._server = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._server.getsockname()
        self._threads: list[threading.Thread] = []
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in (self._accepting, *self._threads):
            thread.join(_WAIT_S)
            assert not thread.is_alive(), "a connection of the test's server is still open"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
            self._threads[-1].start()

    @staticmethod
    def _serve(connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(4096):
                    connection.sendall(data)
            except OSError:
                return


class Way:
    """A proxy before an echo, and clients of it."""

    def __init__(self, bank: ProxyBank, port: int) -> None:
        self.bank = bank
        self._port = port
        self.clients: list[socket.socket] = []

    def connect(self) -> socket.socket:
        client = socket.create_connection((HOST, self._port), timeout=_WAIT_S)
        self.clients.append(client)
        return client


@pytest.fixture
def way() -> Iterator[Way]:
    echo = Echo()
    (port,) = free_ports(1)
    with ProxyBank(HOST, [port], [echo.address]) as bank:
        way = Way(bank, port)
        yield way
        for client in way.clients:
            client.close()
    echo.close()


def ask(client: socket.socket, text: bytes = b"hello") -> bytes:
    client.sendall(text)
    return client.recv(4096)


def says_nothing(client: socket.socket, text: bytes) -> bool:
    """Whether `text` is not answered for a while; the connection stays open."""
    client.settimeout(_SILENCE_S)
    try:
        ask(client, text)
    except TimeoutError:
        return True
    finally:
        client.settimeout(_WAIT_S)
    return False


def test_bytes_pass_both_ways(way: Way) -> None:
    assert ask(way.connect()) == b"hello"
    assert way.bank.num_links(0) == 1


def test_latency_counts_each_way(way: Way) -> None:
    client = way.connect()
    ask(client)
    way.bank.slow(0.1, [0])
    started_s = time.monotonic()
    assert ask(client) == b"hello"
    assert time.monotonic() - started_s >= 0.2


def test_silence_keeps_what_was_sent_until_it_heals(way: Way) -> None:
    client = way.connect()
    ask(client)
    way.bank.silence(0)
    assert says_nothing(client, b"later")
    way.bank.heal()
    assert client.recv(4096) == b"later"


def test_a_half_open_connection_never_answers_again_and_a_new_one_does(way: Way) -> None:
    client = way.connect()
    ask(client)
    way.bank.cut_half_open(0)
    way.bank.heal()
    assert says_nothing(client, b"lost")
    assert ask(way.connect()) == b"hello"


def test_a_reset_reaches_the_client_and_new_ones_are_refused_until_it_heals(way: Way) -> None:
    client = way.connect()
    ask(client)
    way.bank.reset(0, refuse=True)
    with pytest.raises(ConnectionResetError):
        ask(client)
    with pytest.raises(ConnectionResetError):
        # The reset may be there before `connect` has returned.
        ask(way.connect())
    way.bank.heal()
    assert ask(way.connect()) == b"hello"


def test_a_client_that_leaves_ends_the_brokers_side_too(way: Way) -> None:
    client = way.connect()
    ask(client)
    client.close()
    deadline = Deadline.after(_WAIT_S)
    while way.bank.num_links(0):
        assert not deadline.expired(), "waited for the proxy to end the connection"
