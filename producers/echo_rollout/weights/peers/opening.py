"""The peers' part of a worker from its settings."""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack, closing

from echo_bus.bus import Bus
from echo_bus.clock import Clock
from echo_rollout.metrics import WorkerMetrics
from echo_rollout.weights.peers.line import Line
from echo_rollout.weights.peers.neighbours import follow_neighbours
from echo_rollout.weights.peers.source import PeerOptions, PeerSource
from echo_rollout.weights.sources import ChunkSource
from echo_schemas.errors import UserError
from echo_schemas.records import WorkerStatus
from echo_schemas.topics import WORKERS
from echo_settings import Settings

# Where nothing is said: a smaller snapshot, or one for fewer workers, is there sooner straight from the truth (bench/broadcast.py).
_LEAST_BYTES, _LEAST_WORKERS = 16 << 20, 3
_BYTES_PER_MBIT = 125_000
_ALL_ADDRESSES = {"0.0.0.0", "::"}  # noqa: S104  compared with, not listened at


def open_peers(
    settings: Settings, bus: Bus, truth: ChunkSource, stack: ExitStack, *, worker_id: str, metrics: WorkerMetrics, clock: Clock
) -> PeerSource | None:
    """Serving, and closed by `stack`; None where [weights] wants no peers. Raises UserError, TransportError."""
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


def tls_contexts(settings: Settings) -> tuple[ssl.SSLContext, ssl.SSLContext] | None:
    """Of a server and of a client, where clients speak TLS to Kafka; else None. Raises UserError where the files for it are not there."""
    client, weights = {key: str(value) for key, value in settings.kafka.client.items()}, settings.weights
    if "SSL" not in client.get("security.protocol", "").upper().replace("SASL_PLAINTEXT", ""):
        return None
    certificate = weights.certificate_file or client.get("ssl.certificate.location", "")
    key = weights.key_file or client.get("ssl.key.location", "")
    authority = weights.ca_file or client.get("ssl.ca.location", "")
    if not certificate or not key:
        raise UserError(
            "Kafka is spoken to with TLS, and workers that pass weights on need a certificate for the same.",
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
    # As librdkafka has it: names are checked unless this says none.
    asking.check_hostname = client.get("ssl.endpoint.identification.algorithm", "https") != "none"
    return serving, asking
