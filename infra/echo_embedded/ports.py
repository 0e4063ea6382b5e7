"""Free TCP ports on loopback."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

from echo_embedded.properties import HOST
from echo_schemas.errors import UserError

# Below the kernels' range for outgoing connections, so that no client takes a port before we bind it.
_LOWEST, _HIGHEST = 20_000, 32_000
_MAX_TRIES = 500


def free_ports(count: int) -> list[int]:
    """`count` distinct free ports. All are bound until the last is found."""
    with ExitStack() as held:
        ports: list[int] = []
        for port in random.sample(range(_LOWEST, _HIGHEST), _MAX_TRIES):
            if len(ports) == count:
                break
            probe = held.enter_context(socket.socket())
            if _binds(probe, port):
                ports.append(port)
    if len(ports) < count:
        raise UserError(
            f"No {count} free ports were found on {HOST} between {_LOWEST} and {_HIGHEST}.",
            hint="Stop the processes that use them.",
        )
    return ports


def is_free(port: int) -> bool:
    """Whether a server could bind `port` on loopback now."""
    with socket.socket() as probe:
        return _binds(probe, port)


def _binds(probe: socket.socket, port: int) -> bool:
    # As Java's servers do: a port with connections in TIME_WAIT counts as free.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((HOST, port))
        probe.listen(1)
    except OSError:
        return False
    return True
