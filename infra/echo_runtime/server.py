"""`/metrics`, `/healthz` and `/readyz` of one process, on loopback unless told otherwise.

One daemon thread accepts, one more per request; the checks run on the request's thread and must be quick.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from echo_schemas.errors import UserError

Check = Callable[[], str | None]
"""None when all is well, else one sentence that says what is not."""


class HttpServer:
    """Answers on threads of its own inside its block."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str, port: int, *, what: str, hint: str) -> None:
        """`port` 0 takes a free one. Raises UserError, with `hint`, if the port is taken. `what` is served."""
        try:
            self._server = ThreadingHTTPServer((host, port), handler)
        except OSError as exc:
            raise UserError(f"The {what} port {host}:{port} cannot be opened: {exc.strerror}.", hint=hint) from exc
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name=f"{what} http", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port actually bound."""
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
    """Serves one registry and two sets of checks. A process is healthy when it should not be restarted, ready when it should get work."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        healthy: Mapping[str, Check] | None = None,
        ready: Mapping[str, Check] | None = None,
        notices: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`port` 0 takes a free one. `notices`: what both sets of checks say besides. Raises UserError if the port is taken."""
        routes = {"/healthz": dict(healthy or {}), "/readyz": {**(healthy or {}), **(ready or {})}}
        handler = _handler_of(registry, routes, notices)
        super().__init__(handler, host, port, what="metrics", hint="Set [metrics] port = 0 to take a free one.")


def _handler_of(
    registry: CollectorRegistry, routes: Mapping[str, Mapping[str, Check]], notices: Callable[[], Mapping[str, str]]
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            # Whoever asked may be gone: a scrape that timed out is the scraper's affair.
            with contextlib.suppress(ConnectionError):
                super().handle()

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                encode, content_type = choose_encoder(self.headers.get("Accept", ""))
                self._answer(HTTPStatus.OK, encode(registry), content_type)
            elif path in routes:
                problems = {name: problem for name, check in routes[path].items() if (problem := check()) is not None}
                status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
                body = json.dumps({"status": "failing" if problems else "ok", "problems": problems, "notices": dict(notices())}).encode()
                self._answer(status, body, "application/json")
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"/metrics, /healthz and /readyz are served here.\n", "text/plain")

        def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the signature of http.server
            """Scrapes are not worth a line."""

    return Handler
