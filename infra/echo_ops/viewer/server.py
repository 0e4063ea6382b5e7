"""The viewer's HTTP: GET only, loopback only, for pages that it served itself.

One daemon thread accepts, one more per request. A page of another site that a browser on this machine shows must neither read a run nor
set the viewer to work: so Host, Origin and Sec-Fetch-Site are looked at before anything else. Texts of trajectories travel as JSON alone,
and the pages put them into text nodes; no script runs but the files beside this module (Content-Security-Policy).
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib import resources
from urllib.parse import parse_qs, urlsplit

from echo_bus.errors import TransportError
from echo_ops.viewer.routes import BadQuery, NoSuchPage, answer
from echo_ops.viewer.searches import TooMany
from echo_ops.viewer.source import Source
from echo_runtime.server import HttpServer
from echo_schemas.errors import EchoError, UserError

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_MOST_ADDRESS = 4_000
_MOST_VALUES = 40
# A connection on which nothing is said for so long is closed.
_SILENT_S = 30
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# Of what went wrong, the first that fits.
_STATUSES: tuple[tuple[type[EchoError], HTTPStatus], ...] = (
    (NoSuchPage, HTTPStatus.NOT_FOUND),
    (BadQuery, HTTPStatus.BAD_REQUEST),
    (UserError, HTTPStatus.NOT_FOUND),
    (TooMany, HTTPStatus.SERVICE_UNAVAILABLE),
    (TransportError, HTTPStatus.SERVICE_UNAVAILABLE),
)


class ViewerServer(HttpServer):
    """Serves one source."""

    def __init__(self, source: Source, port: int = 0) -> None:
        """`port` 0 takes a free one. Raises UserError if the port is taken."""
        super().__init__(_handler_of(source, _static_files()), _HOST, port, what="viewer's", hint="--port 0 takes a free one.")

    @property
    def url(self) -> str:
        """Where a browser begins."""
        return f"{super().url}/"


def _static_files() -> dict[str, tuple[bytes, str]]:
    """By path: body and content type."""
    folder = resources.files("echo_ops.viewer").joinpath("static")
    files = {f"/{file.name}": (file.read_bytes(), _TYPES[f".{file.name.rpartition('.')[2]}"]) for file in folder.iterdir()}
    return {**files, "/": files["/index.html"]}


def _handler_of(source: Source, static: Mapping[str, tuple[bytes, str]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _SILENT_S

        def handle(self) -> None:
            # A browser that turned to another page has closed the connection: its own affair.
            with contextlib.suppress(ConnectionError):
                super().handle()

        def do_GET(self) -> None:
            if (refusal := self._refusal()) is not None:
                self._say(HTTPStatus.FORBIDDEN, refusal)
                return
            if len(self.path) > _MOST_ADDRESS:
                self._say(HTTPStatus.REQUEST_URI_TOO_LONG, f"An address has at most {_MOST_ADDRESS} characters.")
                return
            try:
                parts = urlsplit(self.path)
                values = parse_qs(parts.query, max_num_fields=_MOST_VALUES)
            except ValueError:
                self._say(HTTPStatus.BAD_REQUEST, f"The address cannot be read; a query has at most {_MOST_VALUES} values.")
                return
            if parts.path in static:
                self._send(HTTPStatus.OK, *static[parts.path])
            else:
                self._answer(parts.path, values)

        def _answer(self, path: str, values: Mapping[str, list[str]]) -> None:
            try:
                body = json.dumps(answer(source, path, values), ensure_ascii=False, allow_nan=False).encode(errors="backslashreplace")
            except EchoError as exc:
                status = next((status for kind, status in _STATUSES if isinstance(exc, kind)), HTTPStatus.INTERNAL_SERVER_ERROR)
                self._say(status, exc.message, exc.hint)
                return
            except Exception:  # the edge of the thread: its traceback belongs in the log, and the browser must hear of it
                logger.exception("No answer to %s", path)
                self._say(HTTPStatus.INTERNAL_SERVER_ERROR, "The viewer has a mistake; its own output shows it.")
                return
            self._send(HTTPStatus.OK, body, "application/json")

        def _refusal(self) -> str | None:
            own = {f"{name}:{self.server.server_address[1]}" for name in (_HOST, "localhost")}  # type: ignore[index]  # of an IPv4 socket
            if self.headers.get("Host") not in own:
                return "The viewer answers only to 127.0.0.1 and localhost, with its own port."
            origin = self.headers.get("Origin")
            if origin is not None and origin not in {f"http://{name}" for name in own}:
                return "The viewer answers only pages that it served itself."
            if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
                # A link from another page may open the viewer, and a script of it may not ask anything.
                if self.headers.get("Sec-Fetch-Mode") == "navigate" and not self.path.startswith("/api/"):
                    return None
                return "The viewer answers only pages that it served itself."
            return None

        def _say(self, status: HTTPStatus, message: str, hint: str = "") -> None:
            self._send(status, json.dumps({"error": message, "hint": hint}).encode(), "application/json")

        def _send(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
            self.send_response(status)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
            """What http.server refuses itself, such as another method, in the same form."""
            del message, explain
            self.close_connection = True
            with contextlib.suppress(ValueError):
                code = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
            text = "The viewer only shows: GET." if code == HTTPStatus.METHOD_NOT_ALLOWED else "This is no request."
            self._say(HTTPStatus(code), text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the signature of http.server
            """Requests are not worth a line."""

    return Handler
