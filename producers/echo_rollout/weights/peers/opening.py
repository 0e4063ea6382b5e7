"""Opens a worker's `PeerSource` from the settings."""

from __future__ import annotations

import ipaddress
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_bus.reading.view import CompactedView
from echo_bus.requests.roster import Roster
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.source import PeerSource
from echo_rollout.weights.peers.wire import PeerOptions
from echo_rollout.weights.sources import ChunkSource
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerStatus
from echo_schemas.topics import WORKERS
from echo_settings import Settings

# Defaults: a smaller snapshot, or one for fewer workers, arrives sooner straight from the log or store (bench/broadcast.py).
_LEAST_BYTES, _LEAST_WORKERS = 16 << 20, 3
_BYTES_PER_MBIT = 125_000
_ALL_ADDRESSES = {"0.0.0.0", "::"}  # noqa: S104  compared with, not listened at


def open_peers(
    settings: Settings, bus: Bus, truth: ChunkSource, stack: ExitStack, *, worker_id: str, metrics: WorkerMetrics, clock: Clock
) -> PeerSource | None:
    """A started source, which `stack` closes; None where [weights] wants no peers. Raises UserError, TransportError."""
    weights = settings.weights
    if not weights.may_pass_on:
        return None
    is_told = weights.source == "peers"
    options = PeerOptions(
        worker_id=worker_id,
        run_id=settings.run.name,
        secret=weights.secret.get_secret_value().encode(),
        host=weights.host,
        port=weights.port,
        advertise=weights.advertise or (socket.gethostname() if weights.host in _ALL_ADDRESSES else weights.host),
        tls=tls_contexts(settings),
        least_bytes=0 if is_told else _LEAST_BYTES,
        least_workers=2 if is_told else _LEAST_WORKERS,
        up=Line() if weights.upload_mbit is None else Line(weights.upload_mbit * _BYTES_PER_MBIT),
    )
    workers = stack.enter_context(closing(bus.view(WORKERS, WorkerStatus)))
    neighbours = follow_neighbours(workers, clock, worker_id=worker_id, host=socket.gethostname(), heartbeat_s=settings.rollout.heartbeat_s)
    return stack.enter_context(closing(PeerSource(truth, options, neighbours=neighbours, metrics=metrics).start()))


def follow_neighbours(
    workers: CompactedView[WorkerStatus], clock: Clock, *, worker_id: str, host: str, heartbeat_s: float
) -> Callable[[], Mapping[str, str]]:
    """A function that returns names and addresses of the living peers other than `worker_id`. `host`: this machine; loopback addresses of
    other machines are left out.
    """
    roster = Roster(heartbeat_s=heartbeat_s, group_size=1)
    roster.follow(workers, clock)

    def neighbours() -> Mapping[str, str]:
        return {
            status.worker_id: status.peer_address
            for status in roster.living(clock.monotonic_s())
            if status.worker_id != worker_id and status.peer_address and (status.host == host or not _is_loopback(status.peer_address))
        }

    return neighbours


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def tls_contexts(settings: Settings) -> tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None]:
    """Contexts of server and client, if clients use TLS with Kafka. Raises UserError if files for it are missing."""
    client, weights = {key: str(value) for key, value in settings.kafka.client.items()}, settings.weights
    if "SSL" not in client.get("security.protocol", "").upper().replace("SASL_PLAINTEXT", ""):
        return None, None
    certificate = weights.certificate_file or client.get("ssl.certificate.location", "")
    key = weights.key_file or client.get("ssl.key.location", "")
    authority = weights.ca_file or client.get("ssl.ca.location", "")
    if not certificate or not key:
        raise UserError(
            "Clients use TLS with Kafka, so workers that pass weights on need a certificate too.",
            hint='Set [weights] certificate_file, key_file and ca_file, or source = "log".',
        )
    try:
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        serving.load_cert_chain(certificate, key, client.get("ssl.key.password") if not weights.key_file else None)
        asking = ssl.create_default_context(cafile=authority or None)
    except (OSError, ssl.SSLError) as exc:
        raise UserError(
            f"The certificate {certificate}, its key or {authority or 'the system’s authorities'} cannot be read: {exc}."
        ) from exc
    # As in librdkafka: host names are checked unless this is `none`.
    asking.check_hostname = client.get("ssl.endpoint.identification.algorithm", "https") != "none"
    return serving, asking
