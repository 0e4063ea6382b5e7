"""`/metrics`, `/healthz` and `/readyz` of one process, on loopback unless told otherwise.

One daemon thread accepts, one more per request; the checks run on the request's thread and must be quick.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, TracebackType
from typing import Self
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from echo_schemas.errors import UserError

Check = Callable[[], str | None]
"""Returns None, or one sentence that names the problem."""
_number: Callable[[float], str] = floatToGoString
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Several times the number of series of a learner whose bounded labels are all full.
_MOST_NAMES = 16_384
# What Prometheus says with each question, and whatever asks as it does.
_SCRAPER_HEADER = "X-Prometheus-Scrape-Timeout-Seconds"


def exposition(registry: Collector) -> bytes:
    """What prometheus_client's `generate_latest` says of counters, gauges and histograms, in half the time: there each name and label of
    each series is checked and escaped again at every scrape, here once. No exemplars and no times of samples: we have none.
    """
    lines: list[str] = []
    for metric in registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        lines.append(_head(name, metric.documentation, metric.type))
        # In this format the time at which a series was created is a gauge of its own.
        created = f"{metric.name}_created"
        begun: list[str] = []
        for sample in metric.samples:
            line = f"{_series(sample.name, tuple(sample.labels.items()))} {_number(sample.value)}\n"
            (begun if sample.name == created else lines).append(line)
        if begun:
            lines += [_head(created, metric.documentation, "gauge"), *begun]
    return "".join(lines).encode()


def _head(name: str, documentation: str, kind: str) -> str:
    text = documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


@lru_cache(_MOST_NAMES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    if not labels:
        return name
    said = [f'{label}="{_escaped(value)}"' for label, value in sorted(labels)]
    return f"{name}{{{','.join(said)}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class HttpHandler(BaseHTTPRequestHandler):
    """Sends whole answers and logs nothing; a client that closes the connection is no error."""

    extra_headers: Mapping[str, str] = MappingProxyType({})

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        """Send the answer, with `extra_headers`."""
        self.send_response(status)
        for name, value in {**self.extra_headers, "Content-Type": content_type, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the signature of http.server
        """Do not log requests."""


class HttpServer:
    """A context manager that answers requests on its own threads."""

    def __init__(self, handler: type[HttpHandler], host: str, port: int, *, what: str, hint: str) -> None:
        """`port` 0 takes a free one. `what`: the server's name in the error. Raises UserError, with `hint`, if the port is taken."""
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as exc:
            raise UserError(f"The {what} port {host}:{port} cannot be opened: {exc.strerror}.", hint=hint) from exc
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"{what} http", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """The bound host and port."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def url(self) -> str:
        """`http://host:port`."""
        return "http://{}:{}".format(*self.address)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MetricsServer(HttpServer):
    """Serves one registry and two sets of checks. An unhealthy process should be restarted; only a ready one should get work."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        healthy: dict[str, Check] | None = None,
        ready: dict[str, Check] | None = None,
        notices: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`port` 0 takes a free one. The caller may add checks later. `notices`: added to the answers of both sets. Raises UserError."""
        healthy = {} if healthy is None else healthy
        ready = {} if ready is None else ready
        self._scraped_s = -math.inf
        self._scraped = threading.Event()
        handler = _handler_of(registry, {"/healthz": healthy, "/readyz": ChainMap(ready, healthy)}, notices, self._note_scrape)
        super().__init__(handler, host, port, what="metrics", hint="Set [metrics] port = 0 to take a free one.")

    def await_scrape(self, most_s: float, on_stop: Callable[[Callable[[], object]], None]) -> None:
        """Wait until Prometheus has asked once more, at most `most_s`; not at all if it did not ask in the last `most_s`.

        `on_stop` calls what it is given when the process is told to end, which ends the wait too.
        """
        if time.monotonic() - self._scraped_s < most_s:
            self._scraped.clear()
            on_stop(self._scraped.set)
            self._scraped.wait(most_s)

    def _note_scrape(self) -> None:
        self._scraped_s = time.monotonic()
        self._scraped.set()


def _handler_of(
    registry: CollectorRegistry,
    routes: Mapping[str, Mapping[str, Check]],
    notices: Callable[[], Mapping[str, str]],
    note_scrape: Callable[[], None],
) -> type[HttpHandler]:
    class Handler(HttpHandler):
        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == "/metrics":
                # As prometheus_client's own server: `?name[]=` asks for some series, and the collectors of others are left alone.
                names = parse_qs(query).get("name[]")
                self.send(HTTPStatus.OK, exposition(registry if names is None else registry.restricted_registry(names)), CONTENT_TYPE)
                if _SCRAPER_HEADER in self.headers:
                    note_scrape()
            elif path in routes:
                problems = {name: problem for name, check in list(routes[path].items()) if (problem := check()) is not None}
                status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
                body = json.dumps({"status": "failing" if problems else "ok", "problems": problems, "notices": dict(notices())}).encode()
                self.send(status, body, "application/json")
            else:
                self.send(HTTPStatus.NOT_FOUND, b"/metrics, /healthz and /readyz are served here.\n", "text/plain")

    return Handler
